"""Environments of shells: one with the toolchain of a variant, one with its Torch and its package."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from kernel_builder import backends
from kernel_builder.config.project import Project, TorchNoarch
from kernel_builder.config.variant import Noarch, TvmFfiAbi, Variant
from kernel_builder.toolchain import Toolchains, components
from kernel_format.errors import ConfigError


def development(project: Project, variant: Variant, toolchains: Toolchains) -> dict[str, str]:
    """Return the environment to compile a variant manually: its nvcc or `zig clang`, its g++, and the headers."""
    changed = _local_kernels(project, project.root / "build")
    if isinstance(variant.framework, Noarch):
        return {**os.environ, **changed}
    assert not isinstance(project.framework, TorchNoarch)
    host = toolchains.host()
    if isinstance(variant.framework, TvmFfiAbi):
        include: list[object] = [toolchains.component(components.tvm_ffi_headers(variant.framework)).root / "include"]
    else:
        stable = variant.stable_abi(project.framework)
        torch = toolchains.torch(stable or variant.framework.release, "stable" if stable else "full")
        include = [Path(__file__).parents[1] / "templates", *torch.include]
    path: list[Path] = []
    backend = backends.compiled(variant.backend)
    if toolkit := backend.toolkit(toolchains, variant.release):
        include += toolkit.include
        if libraries := backend.toolkit_libraries(toolchains, toolkit):
            include += libraries.include
        programs, variables = backend.shell(toolkit, host)
        path += programs
        changed |= variables
    kernels = [kernel for kernel in project.kernels if kernel.backend is variant.backend]
    for name in dict.fromkeys(name for kernel in kernels for name in kernel.depends if name != "torch"):
        include += toolchains.dependency(name).include
    include.append(Path(sysconfig.get_path("include")))
    changed |= {
        "CXX": str(host.path),
        "PATH": _joined(path, "PATH"),
        "CPLUS_INCLUDE_PATH": _joined(include, "CPLUS_INCLUDE_PATH"),
    }
    return {**os.environ, **changed}


def testing(project: Project, variant: Variant) -> dict[str, str]:
    """Return the environment to test the package of a variant with this interpreter.

    `import` finds the package by its Python name, and `get_kernel` by the repository's.
    """
    package = project.root / "build" / variant.name
    path = _joined([Path(sys.executable).parent], "PATH")
    return {**os.environ, **_local_kernels(project, package), "PYTHONPATH": str(package), "PATH": path}


def enter(environment: Mapping[str, str], command: Sequence[str]) -> NoReturn:
    """Replace this process by a command, or by the user's shell if there is none."""
    arguments = list(command) or [os.environ.get("SHELL") or "/bin/sh"]
    program = shutil.which(arguments[0], path=environment["PATH"])
    if program is None:
        raise ConfigError("no such program on the PATH of the shell", where=arguments[0], hint="check its name")
    # Python ignores these two signals, and the program would inherit this.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execve(program, arguments, environment)


def _local_kernels(project: Project, directory: Path) -> dict[str, str]:
    """Return the variable that makes the client use a directory in place of the project's repository on the Hub."""
    if not project.hub_repo_id:
        return {}
    if ":" in str(directory):
        message = "the path has a colon, which separates the entries of LOCAL_KERNELS"
        raise ConfigError(message, where=str(directory), hint="move the project to a path without a colon")
    own = f"{project.hub_repo_id}={directory}"
    return {"LOCAL_KERNELS": ":".join([own, *filter(None, [os.environ.get("LOCAL_KERNELS")])])}


def _joined(directories: Sequence[object], variable: str) -> str:
    return os.pathsep.join([*map(str, directories), *filter(None, [os.environ.get(variable)])])
