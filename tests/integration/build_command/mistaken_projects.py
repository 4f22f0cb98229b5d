"""Projects with a mistake each: texts of bindings and Python files, and how they are written."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.places import PROJECTS

HEAD = '#include <torch/csrc/stable/library.h>\n#include <torch/csrc/stable/tensor.h>\n\n#include "registration.h"\n\n'
SCALED = "torch::stable::Tensor scaled(torch::stable::Tensor in, double factor) { return in; }\n"
MODULE = "REGISTER_EXTENSION(TORCH_EXTENSION_NAME)\n"
FAKE = '@torch.library.register_fake(add_op_namespace_prefix("{}"))\ndef _{}(input, factor):\n    return input\n\n\n'
PYTHON = "import torch\n\nfrom ._ops import add_op_namespace_prefix, ops\n\n\n" + FAKE.format("scaled", "scaled")
BINDING = "torch-ext/torch_binding.cpp"

# Every op is another mistake.
REGISTERED = (
    HEAD
    + SCALED
    + """STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("scaled(Tensor input, float factor) -> Tensor");
  ops.def("lost(Tensor input, float factor) -> Tensor");
  ops.def("elsewhere(Tensor input, float factor) -> Tensor");
  // Two literals, one schema.
  ops.def("untraced(Tensor input, "
          "float factor) -> Tensor");
  ops.def("on_gpus(Tensor input, float factor) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("scaled", TORCH_BOX(&scaled));
  ops.impl("untraced", TORCH_BOX(&scaled));
}
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { ops.impl("elsewhere", TORCH_BOX(&scaled)); }
#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { ops.impl("on_gpus", TORCH_BOX(&scaled)); }
#endif
"""
    + MODULE
)
USING = (
    PYTHON
    + "".join(FAKE.format(name, name) for name in ("lost", "elsewhere"))
    + """

def scaled(input, factor):
    return torch.ops.registered.scaled(input, factor)
"""
)
# Functions that do not fit the schemas of the ops.
WRITTEN = (
    HEAD
    + SCALED
    + """STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("numbers(Tensor input, float factor) -> Tensor");
  ops.def("taken(Tensor input, int factor) -> Tensor");
  ops.def("more(Tensor input, "
          "float factor, bool exact) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("taken", TORCH_BOX(&scaled));
  ops.impl("more", TORCH_BOX(&scaled));
  ops.impl("numberz", TORCH_BOX(&scaled));
}
"""
    + MODULE
)
SOUND = """STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("scaled(Tensor input, float factor) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { ops.impl("scaled", TORCH_BOX(&scaled)); }
"""
# An op that returns nothing needs no fake.
INTO = """void into(torch::stable::Tensor out) {}
STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, ops) { ops.def("into(Tensor(a!) out) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("into", TORCH_BOX(&into));
}
"""
THROWER = 'static int table = [] { throw std::runtime_error("no table"); return 1; }();\n'
THROWING = f"{HEAD}{SCALED}{SOUND}{MODULE}{THROWER}"
# Registrations that the load of the package reports.
REFUSED = {
    "pinned": SOUND.replace("_EXPAND(TORCH_EXTENSION_NAME,", "(pinned_ops,"),
    "miskeyed": SOUND.replace("CPU,", "CPUU,"),
}
# Torch does not compare these on the stable ABI.
TYPED = (
    HEAD
    + """using torch::stable::Tensor;

Tensor scaled(Tensor in, float factor) { return in; }
Tensor counted(Tensor in, const std::optional<double>& by, int32_t count) { return in; }
float mean(const Tensor& in) { return 0; }
Tensor both(Tensor in, int64_t count) { return in; }
STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("scaled(Tensor input, float factor) -> Tensor");
  ops.def("counted(Tensor input, int? by, int count=1) -> Tensor");
  ops.def("mean(Tensor input) -> float");
  ops.def("both(Tensor input, int count) -> Tensor");
  ops.def("both.by(Tensor input, float factor) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("scaled", TORCH_BOX(&scaled));
  ops.impl("counted", TORCH_BOX(&counted));
  ops.impl("mean", TORCH_BOX(&mean));
  ops.impl("both", TORCH_BOX(&both));
  ops.impl("both.by", TORCH_BOX(&both));
}
"""
    + MODULE
)
WITHOUT_HEADER = f"{HEAD}{SCALED}{SOUND}{MODULE}".replace('#include "registration.h"\n', "")

COMPILED = {
    "registered": (REGISTERED, USING),
    **{name: (f"{HEAD}{SCALED}{text}{MODULE}", "from ._ops import ops\n") for name, text in REFUSED.items()},
    "written": (WRITTEN, PYTHON),
    "typed": (TYPED, PYTHON),
    "unincluded": (WITHOUT_HEADER, PYTHON),
    "sound": (
        f"{HEAD}{SCALED}{INTO}{SOUND}{MODULE}",
        PYTHON.replace("(input, factor)", "(input, factor=1.0, device=None)"),
    ),
    "throwing": (THROWING, PYTHON),
    "ported-full": ("#include <pybind11/pybind11.h>\n#include <torch/all.h>\n", PYTHON),
    "ported": ("#include <torch/extension.h>\n\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}\n", PYTHON),
}
WITHOUT_PYTHON = (
    "without PYBIND11_MODULE, torch/extension.h and pybind.h, which need Python.h: one binary serves every Python"
)
MISNAMED = """import torch

from ._ops import add_op_namespace_prefix

torch.library.define(add_op_namespace_prefix("doubled"), "(Tensor x) -> Tensor")
torch.library.register_fake(add_op_namespace_prefix("doubld"))(lambda x: x)
"""
IN_PYTHON = {
    "data": {"__init__.py": "from pathlib import Path\n\nPath(__file__).with_name('table.json').read_text()\n"},
    "device": {"__init__.py": "import torch\n\ntorch.cuda.get_device_capability()\n"},
    "misnamed": {"__init__.py": MISNAMED},
}


def compiled(root: Path, name: str, binding: str, init: str) -> None:
    project = root / name
    example = "full-scale" if name.endswith("-full") else "stable-scale"
    shutil.copytree(PROJECTS / example, project, ignore=shutil.ignore_patterns("build"))
    config = (project / "build.toml").read_text().replace(example, name)
    (project / "build.toml").write_text(config[: config.index("[kernel.")].replace('["cpu", "cuda"]', '["cpu"]'))
    (project / BINDING).write_text(binding)
    (project / "torch-ext" / example.replace("-", "_")).rename(project / "torch-ext" / name.replace("-", "_"))
    (project / "torch-ext" / name.replace("-", "_") / "__init__.py").write_text(init)


def in_python(root: Path, name: str, files: dict[str, str]) -> None:
    package = root / name / "torch-ext" / name.replace("-", "_")
    package.mkdir(parents=True)
    config = (PROJECTS / "python-only/build.toml").read_text().replace("python-only", name)
    (root / name / "build.toml").write_text(config)
    for file, text in files.items():
        (package / file).write_text(text)
