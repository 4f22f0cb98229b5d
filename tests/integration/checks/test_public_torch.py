"""The built kernels run on a Torch without private names: names that begin with an underscore, apart from dunders.

Each built project is loaded in a process of its own, in which its modules cannot read such names. The process runs each
workload of its benchmarks: forward, backward and compiled.
"""

import builtins
import sys
from pathlib import Path
from types import FrameType, ModuleType

import pytest

from tests.support.torch_process import run_with_torch

KERNELS = Path(__file__).resolve().parents[3] / "kernels"
PROJECTS = sorted(path.parents[1].name for path in KERNELS.glob("*/torch-ext/torch_binding.cpp"))


@pytest.mark.parametrize(
    "line",
    ["", "torch._C", "import torch._C", "from torch import _C", "ops.default._op", "torch.ones(1)._version"],
)
def test_guard_sees_private_names(line: str, tmp_path: Path) -> None:
    """Also where the check on the syntax tree does not know that an object is Torch's."""
    source = f"import torch\n\nclass ops:\n    default = torch.ops.aten.add.default\n\n{line}\n"
    (tmp_path / "module.py").write_text(source)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "from tests.integration.checks import test_public_torch as test\n"
    code += f"test.hide_private_names({str(tmp_path)!r}); import module"
    done = run_with_torch(code)
    assert (done.returncode == 0) == (line == ""), done.stderr
    assert not line or "no private name" in done.stderr


@pytest.mark.parametrize("project", PROJECTS)
def test_kernel_runs_without_private_names(project: str) -> None:
    done = run_with_torch(
        "import sys; from tests.integration.checks import test_public_torch; test_public_torch.run(sys.argv[1])",
        KERNELS / project,
    )
    assert done.returncode == 0, done.stderr


def hide_private_names(directory: str) -> None:
    """Let no file under `directory` import private names of Torch, or read them of its modules, tensors and ops."""
    import torch
    import torch._dynamo
    import torch._inductor.config

    def refuse(name: str, frame: FrameType) -> None:
        private = name.startswith("_") and not name.endswith("__")
        if private and frame.f_code.co_filename.startswith(directory) and name in " ".join(frame.f_code.co_names):
            raise AttributeError(f"this Torch has no private name {name}")

    def guarded(base: type) -> object:
        def __getattribute__(self, name):
            refuse(name, sys._getframe(1))
            return base.__getattribute__(self, name)

        return __getattribute__

    def guarded_import(name, globals=None, locals=None, fromlist=(), level=0):
        if level == 0 and name.partition(".")[0] == "torch":
            for part in (*name.split("."), *(fromlist or ())):
                refuse(part, sys._getframe(1))
        return original_import(name, globals, locals, fromlist, level)

    original_import, builtins.__import__ = builtins.__import__, guarded_import
    module = type("Module", (ModuleType,), {"__getattribute__": guarded(ModuleType)})
    for name, loaded in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and type(loaded) is ModuleType:
            loaded.__class__ = module
    for torch_class in (torch.Tensor, torch._ops.OpOverload, torch._ops.OpOverloadPacket):
        torch_class.__getattribute__ = guarded(torch_class.__mro__[1])


def run(directory: str) -> None:
    """Load a built project and run its workloads, at the shape that each declares as small."""
    import torch
    from kernels import get_local_kernel

    from kernel_builder.measure.case import Case, tensors
    from kernel_builder.measure.workloads import load, make

    project = Path(directory)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hide_private_names(str(project / "build"))
    kernel = get_local_kernel(project, backend=device)
    for declared in load(project).values():
        workload = make(declared, kernel, device, "float32")
        case = Case(workload, "forward + backward", declared.small)
        case.prepare(tensors(workload.eager(*case.inputs)))
        for function in (workload.ours, torch.compile(workload.ours, backend="aot_eager", fullgraph=True)):
            case.results(function)
            with torch.no_grad():
                function(*case.inputs)
