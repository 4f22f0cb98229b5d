"""The C and C++ libraries and the OpenMP runtime that a kernel is linked with."""

from __future__ import annotations

import pytest

from tests.integration.build_command.conftest import Copy, NewCache, Run, run_python
from tests.support.places import CPU

# Calls a kernel, and prints the OpenMP runtimes that the process has.
CALL = """
import sys, torch
from pathlib import Path
from kernels import get_local_kernel
kernel = get_local_kernel(Path(sys.argv[1]), backend="cpu")
torch.ones(1 << 20).exp().sum()
print(kernel.ops.library(), kernel.ops.exceptions(), kernel.ops.threads(3))
maps = {line.split()[-1] for line in open("/proc/self/maps")}
print(*[Path(name).name for name in maps if "omp" in Path(name).name])
"""


@pytest.mark.slow
def test_the_runtime_libraries_of_a_kernel(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> None:
    """Symbols of newer C++ headers are linked, exceptions are freed once, and OpenMP is Torch's."""
    project = copy_project("cpu-runtime")
    done = kernel_builder(new_cache("cache"), "build", project, "--variant", CPU)
    assert done.code == 0, done
    assert run_python(CALL, project).splitlines() == ["0 0 3", "libgomp.so.1"]
