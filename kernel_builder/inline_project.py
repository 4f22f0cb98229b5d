"""Creates a project from a single C++ or CUDA source, whose functions become operators."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kernel_builder.config.project import python_name
from kernel_builder.scaffold import render
from kernel_format.errors import ConfigError

_TEMPLATES = Path(__file__).parent / "templates" / "inline"


def backend_of(source: str) -> str:
    """Return the backend of a source: "cuda" if it has or launches a kernel, else "cpu"."""
    return "cuda" if re.search(r"__global__|<<<", source) else "cpu"


def files(
    repo_id: str, source: str, functions: Sequence[str], *, stem: str, license_name: str = "apache-2.0"
) -> dict[str, str]:
    """Return the files of the project: path -> content.

    Args:
        repo_id: The Hub repository; the part after the slash is the name of the kernel.
        source: The text that defines the functions.
        functions: Their names: C++ functions at file scope whose arguments and results are `Tensor`, `double`,
            `int64_t`, `bool`, `std::string`, or `std::optional` or `std::vector` of these. The function may write to
            arguments of type `Tensor&`. A function may return a `std::tuple`, or nothing.
        stem: The name of the file with the functions, without a suffix.
        license_name: The SPDX name of the license.

    Raises:
        ConfigError: If there is no function, or a name is not a C++ name.
    """
    if not functions:
        raise ConfigError("no function is named", where="functions", hint="name the functions that become operators")
    for function in functions:
        if not re.fullmatch(r"[A-Za-z]\w*", function):
            raise ConfigError(f"{function!r} is not the name of a C++ function", where="functions")
        if not re.search(rf"\b{function}\s*\(", source):
            raise ConfigError(f"the source defines no function {function!r}", where="functions")
    name = repo_id.rpartition("/")[2]
    package, backend = python_name(name), backend_of(source)
    return render(
        _TEMPLATES,
        {
            "name": name,
            "python_name": package,
            "repo_id": repo_id,
            "license": license_name,
            "backend": backend,
            "key": backend.upper(),
            "file_name": f"{stem}.{'cu' if backend == 'cuda' else 'cpp'}",
            "source": source.rstrip(),
            "define": "\n".join(f"  KERNEL_BUILDER_DEFINE(ops, {function});" for function in functions),
            "implement": "\n".join(f"  KERNEL_BUILDER_IMPLEMENT(ops, {function});" for function in functions),
            "assign": "\n".join(f"{function} = ops.{function}.default" for function in functions),
            "names": ", ".join(f'"{function}"' for function in functions),
        },
    )
