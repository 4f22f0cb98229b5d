"""Runs `setup.py build_ext` with setuptools and Torch as on several machines, with compilers that record arguments.

    python recorded_setup.py RUNS

RUNS is a file with a list in JSON: `script`, of a copy of the project; `cuda`, `gpu` and `home` as in
`kernel_builder/port/recorder.py`, but with the recording compilers in `home`; `variables`; and `output`, a file for
its output. Each run is a fork, because an import of Torch takes longer than most scripts.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from setuptools.command.build_ext import build_ext
from torch.utils import cpp_extension

H100 = SimpleNamespace(major=9, minor=0, name="NVIDIA H100", multi_processor_count=132, total_memory=80 << 30)
compile_extension = build_ext.build_extension


def set_machine(cuda: str | None, gpu: bool, home: str) -> None:
    """Let Torch describe a machine."""

    def of_gpu(value: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            if not gpu:
                raise RuntimeError("Found no NVIDIA driver on your system")
            return value

        return read

    architectures = (80, 90, 100, 120) if cuda else ()
    torch.version.cuda = cuda
    torch.backends.cuda.is_built = lambda: bool(cuda)
    torch.cuda.is_available = lambda: gpu
    torch.cuda.device_count = lambda: int(gpu)
    torch.cuda.current_device = of_gpu(0)
    torch.cuda.get_device_capability = of_gpu((9, 0))
    torch.cuda.get_device_properties = of_gpu(H100)
    torch.cuda.get_device_name = of_gpu(H100.name)
    torch.cuda.get_arch_list = lambda: [f"sm_{number}" for number in architectures]
    torch.cuda.get_gencode_flags = lambda: " ".join(f"-gencode compute=compute_{n},code=sm_{n}" for n in architectures)
    cpp_extension.CUDA_HOME = home if cuda else None
    cpp_extension._find_cuda_home = lambda: cpp_extension.CUDA_HOME
    flags_of = cpp_extension._get_cuda_arch_flags
    # Without the variable, Torch compiles for the machine's GPU, which is no decision of the project.
    cpp_extension._get_cuda_arch_flags = lambda flags=None: (
        flags_of(flags) if os.environ.get("TORCH_CUDA_ARCH_LIST") else []
    )


def build_extension(self: Any, extension: Any) -> None:
    """Compile an extension, whose missing sources are empty, and give the compilers its name; others follow errors."""
    for path in map(Path, extension.sources):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    is_cuda = "cudart" in extension.libraries or any(str(path).endswith(".cu") for path in extension.sources)
    os.environ["RECORDED_EXTENSION"] = f"{'cuda' if is_cuda else 'cpu'} {extension.name}"
    try:
        compile_extension(self, extension)
    except Exception:  # such as a source for Cython, which is not installed
        traceback.print_exc()


def run(script: str, cuda: str | None, gpu: bool, home: str, variables: dict[str, str], output: str) -> int:
    """Run one script in this process, and return its exit status."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.environ.clear()
    os.environ.update({"RECORDED_EXTENSION": "cpu of setup.py", **variables})
    os.chdir(Path(script).parent)
    set_machine(cuda, gpu, home)
    build_ext.build_extension = build_extension
    sys.argv = [Path(script).name, "build_ext"]
    sys.path.insert(0, str(Path.cwd()))
    try:
        code = compile(Path(script).read_bytes(), script, "exec")
        exec(code, {"__name__": "__main__", "__file__": script})
    except SystemExit as error:
        if error.code:
            print(error.code)
        return 1 if error.code else 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


for request in json.loads(Path(sys.argv[1]).read_text()):
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        status = run(**request)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
