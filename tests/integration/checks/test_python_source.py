"""The rules for a package's Python: sources that break them, and sources that look similar and do not."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kernel_builder import toml_file
from kernel_builder.checks import AbiPolicy, run, run_all
from kernel_builder.config.variant import Release
from tests.support.sample_package import Make, findings

ROOT = Path(__file__).resolve().parents[3]

PYTHON_3_9 = AbiPolicy(python=Release(3, 9))
PYTHON_CHECKS = ("python-source", "python-imports", "op-namespace")


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        ("match 1:\n    case 1:\n        pass\n", ": Pattern matching is only supported in Python 3.10", "3.9"),
        ("def f(:\n", "line 1: invalid syntax", "correct the syntax; Python 3.9 must be able to read it"),
        ("def f(x: int | None): ...\n", "line 1: `int | None` as a type needs Python 3.10", "__future__"),
        ("from __future__ import annotations\n\nX = int | None\n", "line 3: `int | None`", "typing.Optional"),
        ("print(list(zip([1], [2], strict=True)))\n", "line 1: 'zip(strict)' needs Python 3.10", "Python 3.9"),
        ("def f() -> int | str | float: ...\n", "line 1: `int | str | float`", "__future__"),
        ("X = tuple[1 | None]\n", "line 1: `1 | None`", "typing.Union"),
        ("import tomllib\n", "line 1: 'tomllib' module needs Python 3.11", "Python 3.9"),
    ],
)
def test_source_that_needs_a_newer_python_than_3_9(make: Make, source: str, message: str, hint: str) -> None:
    """Our own kernels run on Python 3.9, below the floor of the checks."""
    package = make("torch-cpu", files={"part.py": source})
    (finding,) = run(package, only=["python-source"], policy=PYTHON_3_9).findings
    assert finding.path == "part.py"
    assert message in finding.message
    assert hint in finding.hint


@pytest.mark.parametrize(
    "source",
    [
        "match 1:\n    case 1:\n        pass\n",
        "def f(x: int | None) -> int | str | float: ...\n\n\nX = int | None\n",
        "print(list(zip([1], [2], strict=True)))\n",
        "import dataclasses\n\n\n@dataclasses.dataclass(slots=True, kw_only=True)\nclass C:\n    x: int\n",
    ],
)
def test_python_3_10_is_the_floor(make: Make, source: str) -> None:
    """The public client and Torch need Python 3.10."""
    assert findings(make("torch-cpu", files={"part.py": source}), *PYTHON_CHECKS) == []


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
        ("python-source", "from typing import Self\n", "line 1: 'typing.Self' member needs Python 3.11", "3.10"),
        (
            "python-source",
            "import array\n\narray.array('w')\n",
            "line 3: array typecode 'w' needs Python 3.13",
            "Python 3.10",
        ),
        (
            "python-source",
            "import contextlib as c\n\nwith c.chdir('/'):\n    pass\n",
            "line 3: 'contextlib.chdir' member needs Python 3.11",
            "Python 3.10",
        ),
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
            "from .layers",
        ),
        ("python-imports", "import layers\n", "line 1: imports layers by an absolute name", "from .layers import"),
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
        "from __future__ import annotations\n\n\ndef f(x: int | None) -> list[int] | None: ...\n",
        "try:\n    import numpy\nexcept ImportError:\n    numpy = None\n",
        "import sys\n\nif sys.version_info >= (3, 11):\n    import tomllib\n",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import transformers\n",
        "import triton.language as tl\nfrom kernels import get_kernel_dep\n",
        "import yaml, sympy, networkx, jinja2, fsspec, filelock, typing_extensions, packaging.version, tqdm\n",
        "import huggingface_hub\nfrom cuda.bindings import driver\n",
        "from . import layers\nfrom .layers import Norm\n",
        "import math\n\n\ndef tomllib(compression):\n    'Not math.exp2.'\n    # typing.Self\n",
        "import tomllib  # novm\n",
        "import torch\n\nFLAGS = 1 | 2\nMASK = torch.ones(1) | torch.ones(1)\nSET = set(range(3)) | {4}\n",
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


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch as t\n\nwith t._C._AutoDispatchBelowAutograd():\n    pass\n", "torch._C"),
        ("import torch._dynamo\n", "torch._dynamo"),
        ("import torch.utils._pytree as pytree\n", "torch.utils._pytree"),
        ("from torch import _VF\n", "torch._VF"),
        ("from torch._subclasses import FakeTensor\n", "torch._subclasses"),
        (
            "import torch.nn.functional as F\n\nF._verify_spatial_size([1])\n",
            "torch.nn.functional._verify_spatial_size",
        ),
        ("from torch import Tensor\n\nmake = Tensor._make_subclass\n", "torch.Tensor._make_subclass"),
        ("def f():\n    import torch\n\n    return torch.autograd._in_backward\n", "torch.autograd._in_backward"),
        ("import torch\n\ngetattr(torch, '_C', None)\n", "torch._C"),
        ("import torch\n\ntry:\n    torch._C\nexcept AttributeError:\n    pass\n", "torch._C"),
        ("from ._ops import ops\n\nscale = ops.scale.default\nraw = scale._op\n", "torch.ops.<id>.scale.default._op"),
        ("import torch\n\ntorch.ops.aten._fused_rms_norm\n", "torch.ops.aten._fused_rms_norm"),
    ],
)
def test_private_names_of_torch(make: Make, source: str, name: str) -> None:
    (finding,) = findings(make("torch-cpu", files={"part.py": source}), "private-torch")
    assert (finding.path, finding.severity) == ("part.py", "warning")
    assert f": uses {name}, which" in finding.message


@pytest.mark.parametrize(
    "source",
    [
        "import torch\n\ntorch._check(True)\ntorch._foreach_add_([], 1)\n",
        "import torch\nfrom torch import Tensor as _Tensor\n\n_version = torch.__version__\n",
        "from . import _private\nfrom ._other import _name\n\n_private._thing(_name)\n",
        "import torch\n\n\nclass Norm(torch.nn.Module):\n    _eps = 1\n\n    def f(self):\n        return self._eps\n",
        "from ._ops import ops\n\nops._scale.default\n",
        "import numpy as torch_like\n\ntorch_like._private\n",
    ],
)
def test_public_names_of_torch(make: Make, source: str) -> None:
    assert findings(make("torch-cpu", files={"part.py": source}), "private-torch") == []


def test_our_kernels_use_no_private_names_of_torch() -> None:
    """The check only warns about other packages. For our kernels, this test fails."""
    projects = sorted(path.parent for path in (ROOT / "kernels").glob("*/build.toml"))
    packages = [project / "torch-ext" for project in projects]
    assert all(list(package.rglob("*.py")) for package in packages) and packages
    reported = [finding for package in packages for finding in findings(package, "private-torch")]
    # The only way to a GELU in the epilogue of a matrix multiplication. `blocks` does without where Torch has none.
    accepted = "torch.ops.aten._addmm_activation"
    assert [finding for finding in reported if accepted not in finding.message] == []
    assert len(reported) <= 1


def test_our_kernels_run_on_python_3_9() -> None:
    packages = sorted(path.parent / "torch-ext" for path in (ROOT / "kernels").glob("*/build.toml"))
    reports = [run(package, only=["python-source"], policy=PYTHON_3_9) for package in packages]
    assert [finding for report in reports for finding in report.findings] == []


def test_imports_of_the_package_are_hinted_at_the_right_depth(make: Make) -> None:
    """An import that a file has several times is one finding."""
    absolute = "import demo_kernel.sub.b\nfrom demo_kernel.top import f\nimport demo_kernel\n"
    files = {
        "top.py": absolute,
        "sub/__init__.py": "",
        "sub/b.py": "",
        "sub/a.py": f"{absolute}def f():\n    import demo_kernel\n    import demo_kernel\n",
        "sub/deep/c.py": absolute,
    }
    reported = findings(make("torch-cpu", files=files), "python-imports")
    hints = {name: [f.hint.split("`")[1][5:-11] for f in reported if f.path == name] for name in files}
    assert hints["top.py"] == [".sub.b", ".top", "."]
    assert hints["sub/a.py"] == [".b", "..top", ".."]
    assert hints["sub/deep/c.py"] == ["..b", "...top", "..."]
    assert sum("and 2 more lines" in finding.message for finding in reported) == 1
