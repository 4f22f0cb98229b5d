"""The rules for a package's Python: sources that break them, and sources that look similar and do not."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kernel_builder import toml_file
from kernel_builder.checks import run, run_all
from tests.support.sample_package import Make, findings

ROOT = Path(__file__).resolve().parents[3]

PYTHON_CHECKS = ("python-source", "python-imports", "op-namespace")


@pytest.mark.parametrize(
    ("check", "source", "message", "hint"),
    [
        (
            "python-source",
            "try:\n    pass\nexcept* OSError:\n    pass\n",
            "Exception groups are only supported in Python 3.11",
            "Python 3.10",
        ),
        ("python-source", "import tomllib\n", "line 1: 'tomllib' module needs Python 3.11", "Python 3.10"),
        ("python-source", "import math\n\nmath.exp2(1.0)\n", "line 3: 'math.exp2' member needs", "Python 3.10"),
        (
            "python-source",
            "import datetime\n\nprint(max([], key=None), eval('1', globals={}))\n",
            "line 3: 'eval(globals)' needs Python 3.13",
            "Python 3.10",
        ),
        (
            "python-imports",
            "from demo_kernel.layers import Norm\n",
            "line 1: imports demo_kernel.layers by an absolute name",
            "import it relatively",
        ),
        ("python-imports", "import layers\n", "line 1: imports layers by an absolute name", "import it relatively"),
        (
            "python-imports",
            "import transformers\n",
            "line 1: imports transformers, which users need not have installed",
            "use the standard library and Torch only",
        ),
        (
            "python-imports",
            "try:\n    import transformers\nexcept ImportError as e:\n    raise RuntimeError('install it') from e\n",
            "line 2: imports transformers, which users need not have installed",
            "use the standard library and Torch only",
        ),
        (
            "python-imports",
            "from einops import rearrange\n",
            "line 1: imports einops",
            'add "einops" to `python-depends`',
        ),
        (
            "op-namespace",
            'from torch import library as lib\n\n\n@lib.custom_op("demo::scale", mutates_args=())\ndef f(): ...\n',
            "line 4: torch.library.custom_op with the fixed name 'demo::scale'",
            'add_op_namespace_prefix("scale")',
        ),
        (
            "op-namespace",
            'import torch\n\nL = torch.library.Library("demo", "DEF")\n',
            "line 3: torch.library.Library",
            "._ops",
        ),
    ],
)
def test_source_that_breaks_a_rule(make: Make, check: str, source: str, message: str, hint: str) -> None:
    files = {"__init__.py": "from . import part\n", "part.py": source, "layers.py": ""}
    (finding,) = findings(make("torch-cpu", files=files), *PYTHON_CHECKS)
    assert (finding.check, finding.path, finding.severity) == (check, "part.py", "error")
    assert message in finding.message
    assert hint in finding.hint


@pytest.mark.parametrize(
    "source",
    [
        "match 1:\n    case 1:\n        pass\n",
        "def f(x: int | None) -> int | str | float: ...\n\n\nX = int | None\n",
        "print(list(zip([1], [2], strict=True)))\n",
        "try:\n    import numpy\nexcept ImportError:\n    numpy = None\n",
        "import sys\n\nif sys.version_info >= (3, 11):\n    import tomllib\n",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import transformers\n",
        "import triton.language as tl\nfrom kernels import get_kernel_dep\n",
        "import yaml, sympy, networkx, jinja2, fsspec, filelock, typing_extensions, packaging.version, tqdm\n",
        "import huggingface_hub\nfrom cuda.bindings import driver\n",
        "from . import layers\nfrom .layers import Norm\n",
        "import tomllib  # novm\n",
        "import torch\n\nfrom ._ops import add_op_namespace_prefix\n\n\n"
        '@torch.library.register_fake(add_op_namespace_prefix("scale"))\ndef f(): ...\n',
    ],
)
def test_source_that_keeps_the_rules(make: Make, source: str) -> None:
    files = {"__init__.py": "from . import part\n", "part.py": source, "layers.py": ""}
    assert findings(make("torch-cpu", files=files), *PYTHON_CHECKS) == []


@pytest.mark.parametrize(
    ("init", "source"),
    [
        ("from . import part\n", "def f():\n    import transformers\n"),
        ("from . import part\n", "def f():\n    from demo_kernel import layers\n"),
        ("from . import part\n", "if has_it():\n    import transformers\n"),
        ("from . import part\n", "try:\n    import torch\nexcept ImportError:\n    import jax\n"),
        ("from . import part\n", "import numpy as np\n"),  # the public builder has it beside Torch
        ("import torch\n", "import transformers\n"),  # nothing imports part.py
        ("def f():\n    from . import part\n", "import transformers\n"),
        ("try:\n    from . import part\nexcept ImportError:\n    part = None\n", "import transformers\n"),
    ],
)
def test_an_import_that_need_not_succeed_is_a_warning(make: Make, init: str, source: str) -> None:
    package = make("torch-cpu", files={"__init__.py": init, "part.py": source, "layers.py": ""})
    (finding,) = findings(package, *PYTHON_CHECKS)
    assert (finding.check, finding.path, finding.severity) == ("python-imports", "part.py", "warning")


@pytest.mark.parametrize(
    "chain",
    [
        {"__init__.py": "from .a.b import thing\n", "a/__init__.py": "", "a/b.py": "from ..part import x\n"},
        {"__init__.py": "from .a import b\n", "a/__init__.py": "", "a/b.py": "from ..part import x\n"},
        {"__init__.py": "import torch\n\nwith torch.no_grad():\n    from .part import x\n"},
        {"__init__.py": "from .a import b\n", "a/__init__.py": "from .. import part\n", "a/b.py": ""},
        {"__init__.py": "from . import a\n", "a.py": "class C:\n    from .part import x\n"},
    ],
)
def test_imports_are_followed_from_the_first_file(make: Make, chain: dict[str, str]) -> None:
    reported = findings(make("torch-cpu", files={**chain, "part.py": "import transformers\n"}), "python-imports")
    assert [(finding.path, finding.severity) for finding in reported] == [("part.py", "error")]


def test_the_table_of_present_modules_is_what_torch_and_the_client_require() -> None:
    """Each direct requirement is in the table, and the table has nothing that nothing requires."""
    table = toml_file.read(ROOT / "kernel_builder" / "checks" / "present_modules.toml")
    for name, root in (("torch", "torch"), ("client", "kernels")):
        direct = {requirement for requirement in required(root) if requirement != "nvidia"}
        closure = {root, *direct}
        for _ in range(4):
            closure |= {more for distribution in closure for more in required(distribution)}
        gpu = {name for name in direct if name.startswith(("nvidia", "cuda", "triton"))}
        present = {*table["torch"], *table[name]}
        assert direct - gpu - {"tomli"} <= present
        assert set(table[name]) <= closure


def required(distribution: str) -> set[str]:
    """Return the names of what an installed package requires on this machine, without extras."""
    try:
        texts = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return set()
    requirements = [Requirement(text) for text in texts]
    return {
        canonicalize_name(requirement.name)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }


def test_an_allowed_check_only_warns(make: Make) -> None:
    package = make("torch-cpu", files={"__init__.py": "import transformers\n"})
    (report,) = run_all([package], load=False, allow=["python-imports"])
    assert [(finding.check, finding.severity) for finding in report.findings] == [("python-imports", "warning")]
    assert report.allowed == ("python-imports",)
    assert report.ok
    assert not run(package, load=False).ok


def test_a_guess_is_a_warning(make: Make) -> None:
    (finding,) = findings(make("torch-cpu", files={"part.py": "n = 1\nn.is_integer()\n"}), *PYTHON_CHECKS)
    assert (finding.severity, finding.message) == ("warning", "line 2: 'int.is_integer' member needs Python 3.12")


def test_declared_dependencies_may_be_imported(make: Make) -> None:
    package = make("torch-cpu", files={"part.py": "import einops\n"}, **{"python-depends": ["einops"]})
    assert findings(package, *PYTHON_CHECKS) == []
