"""The rules for a package's Python: sources that break them, and sources that look similar and do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from .sample import Make, findings

ROOT = Path(__file__).resolve().parents[2]

PYTHON_CHECKS = ("python-source", "python-imports", "op-namespace")


@pytest.mark.parametrize(
    ("check", "source", "message", "hint"),
    [
        (
            "python-source",
            "match 1:\n    case 1:\n        pass\n",
            ": Pattern matching is only supported in Python 3.10",
            "3.9",
        ),
        ("python-source", "def f(:\n", "line 1: invalid syntax", "write it for Python 3.9"),
        (
            "python-source",
            "def f(x: int | None): ...\n",
            "line 1: `int | None` as a type needs Python 3.10",
            "__future__",
        ),
        (
            "python-source",
            "from __future__ import annotations\n\nX = int | None\n",
            "line 3: `int | None`",
            "typing.Optional",
        ),
        (
            "python-source",
            "print(list(zip([1], [2], strict=True)))\n",
            "line 1: 'zip(strict)' needs Python 3.10",
            "Python 3.9",
        ),
        ("python-source", "def f() -> int | str | float: ...\n", "line 1: `int | str | float`", "__future__"),
        ("python-source", "X = tuple[1 | None]\n", "line 1: `1 | None`", "typing.Union"),
        ("python-source", "import tomllib\n", "line 1: 'tomllib' module needs Python 3.11", "Python 3.9"),
        (
            "python-imports",
            "from demo_kernel.layers import Norm\n",
            "line 1: imports demo_kernel.layers by an absolute name",
            "from .layers",
        ),
        ("python-imports", "import layers\n", "line 1: imports layers by an absolute name", "from .layers import"),
        (
            "python-imports",
            "import numpy\n",
            "line 1: imports numpy, which users need not have installed",
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
    (finding,) = findings(make("torch-cpu", files={"part.py": source, "layers.py": ""}), *PYTHON_CHECKS)
    assert (finding.check, finding.path) == (check, "part.py")
    assert message in finding.message
    assert hint in finding.hint


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations\n\n\ndef f(x: int | None) -> list[int] | None: ...\n",
        "try:\n    import numpy\nexcept ImportError:\n    numpy = None\n",
        "import sys\n\nif sys.version_info >= (3, 11):\n    import tomllib\n",
        "import triton.language as tl\nfrom kernels import get_kernel_dep\n",
        "from . import layers\nfrom .layers import Norm\n",
        "import torch\n\nFLAGS = 1 | 2\nMASK = torch.ones(1) | torch.ones(1)\nSET = set(range(3)) | {4}\n",
        "import torch\n\nfrom ._ops import add_op_namespace_prefix\n\n\n"
        '@torch.library.register_fake(add_op_namespace_prefix("scale"))\ndef f(): ...\n',
    ],
)
def test_source_that_keeps_the_rules(make: Make, source: str) -> None:
    assert findings(make("torch-cpu", files={"part.py": source, "layers.py": ""}), *PYTHON_CHECKS) == []


def test_a_guess_is_a_warning(make: Make) -> None:
    (finding,) = findings(make("torch-cpu", files={"part.py": "n = 1\nn.is_integer()\n"}), *PYTHON_CHECKS)
    assert (finding.severity, finding.message) == ("warning", "line 2: 'int.is_integer' member needs Python 3.12")


def test_declared_dependencies_may_be_imported(make: Make) -> None:
    package = make("torch-cpu", files={"part.py": "import einops\n"}, **{"python-depends": ["einops"]})
    assert findings(package, *PYTHON_CHECKS) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\n\ntorch._check(True)\n", "torch._check"),
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
    assert [finding for package in packages for finding in findings(package, "private-torch")] == []
