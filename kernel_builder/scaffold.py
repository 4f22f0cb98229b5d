"""Creates a kernel project from the template in `templates/init` and the files of the kit that its build.toml lists."""

from __future__ import annotations

import keyword
import os
import re
import string
from collections.abc import Container, Mapping, Sequence
from pathlib import Path, PurePath

from kernel_builder import toml_file
from kernel_builder.config import known_backends
from kernel_builder.config.build_toml import NAME, REPO_ID, check_name
from kernel_builder.config.project import python_name
from kernel_format.errors import ConfigError
from kernel_format.files import write_atomically

_HINT = "use another PATH, or --overwrite"
_TEMPLATES = Path(__file__).parent / "templates"
BACKENDS = {"cuda": ("cpu", "cuda"), "triton": ("cuda",)}
"""The languages of the templates: name -> backends."""
# Names that the new project itself defines.
_RESERVED = ("layers", "metadata", "op", "ops", "torch")


def create(
    directory: Path | None,
    repo_id: str,
    wanted: Sequence[str],
    *,
    license_name: str,
    language: str = "cuda",
    operator: str = "relu",
    overwrite: bool = False,
) -> Path:
    """Create a project.

    Args:
        directory: Where to create it; None for a directory with the name of the kernel. Other files in it are kept.
        repo_id: The Hub repository, such as `org/my-kernel`; the part after the slash is the name of the kernel.
        license_name: The SPDX name of the license.
        language: The language of the device code, a key of `BACKENDS`.

    Raises:
        ConfigError: If an argument is invalid, or a file exists already.
        OSError: If the directory cannot be written.
    """
    name = kernel_name(repo_id)
    _check_backends(wanted, language)
    _check_operator(operator)
    if not re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9.+]*", license_name):
        raise ConfigError(
            f"{license_name!r} is not an SPDX license name",
            where="--license",
            hint="use for example apache-2.0, mit or bsd-3-clause",
        )
    directory = directory or Path(name)
    ordered = [backend for backend in BACKENDS[language] if backend in wanted]
    files = _render(repo_id, name, ordered, license_name, language, operator)
    write(files, directory, overwrite=overwrite)
    return directory


def write(files: Mapping[str, str | bytes], directory: Path, *, overwrite: bool = False, hint: str = _HINT) -> None:
    """Write the files of a project into a directory, and nothing through symbolic links in it."""
    present = [path for path in files if os.path.lexists(directory / path)]
    if present and not overwrite:
        raise ConfigError(f"the directory already has {', '.join(present)}", where=str(directory), hint=hint)
    for parent in (directory / parent for path in files for parent in PurePath(path).parents[:-1]):
        if parent.is_symlink():
            raise ConfigError(
                "is a symbolic link: files would be written to its target", where=str(parent), hint="delete it"
            )
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / name, content)


def kernel_name(repo_id: str) -> str:
    """Return the kernel's part of the name of a Hub repository."""
    name = repo_id.rpartition("/")[2]
    if not re.fullmatch(REPO_ID, repo_id):
        raise ConfigError(
            f"{repo_id!r} is not the name of a Hub repository", where="--name", hint="the form is org/my-kernel"
        )
    if not re.fullmatch(NAME, name):
        raise ConfigError(
            f"{name!r} is not a kernel's name: expected 2 or more lowercase letters, digits and dashes, a letter first",
            where="--name",
            hint="the form is org/my-kernel",
        )
    check_name(name, "--name")
    return name


def _check_backends(wanted: Sequence[str], language: str) -> None:
    offered = BACKENDS[language]
    others = [backend for backend in wanted if backend not in offered]
    if not wanted or others:
        raise ConfigError(
            f"there are templates for the backends {' and '.join(offered)}, and not for {', '.join(others) or 'none'}",
            where="--backends",
            hint=f"start with {' or '.join(offered)}, and add others to build.toml (docs/build-toml.md)",
        )


def _check_operator(operator: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", operator) or keyword.iskeyword(operator) or operator in _RESERVED:
        raise ConfigError(
            f"{operator!r} cannot be the name of an operator: expected lowercase letters, digits and underscores, a "
            f"letter first, and neither a Python keyword nor {', '.join(_RESERVED)}",
            where="--op",
            hint="use a name such as swiglu or fused_add",
        )


def _render(
    repo_id: str, name: str, wanted: Sequence[str], license_name: str, language: str, operator: str
) -> dict[str, str]:
    """Return the files of the project: path -> content."""
    package = python_name(name)
    device = max(wanted, key=lambda name: known_backends.get(name).preference)
    values = {
        "name": name,
        "python_name": package,
        "repo_id": repo_id,
        "license": license_name,
        "backends": "[" + ", ".join(f'"{backend}"' for backend in wanted) + "]",
        "directories": ", ".join(f"`{package}_{backend}/`" for backend in wanted),
        "operator": operator,
        "passes": '["forward", "backward"]',
        "benchmark_arguments": "x",
        "example_of_card": f'x = torch.randn(4, 8, device="{device}")\ny = kernel.{operator}(x)',
        **_description(operator),
    }
    if language == "triton":
        shared = render(_TEMPLATES / "init", values)
        files = {path: text for path, text in shared.items() if not path.endswith((".h", ".cpp"))}
        files |= render(_TEMPLATES / "init_triton", values)
    else:
        files = render(_TEMPLATES / "init", values, wanted)
    for path in re.findall(r'"(kit/[^"]+)"', files["build.toml"]):
        files[path] = (_TEMPLATES / path).read_text(encoding="utf-8")
    files["benchmarks/workload.py"] = (_TEMPLATES / "kit" / "workload.py").read_text(encoding="utf-8")
    return files


def render(
    tree: Path, values: Mapping[str, str], wanted: Sequence[str] = (), only: Container[str] | None = None
) -> dict[str, str]:
    """Return the files of a template directory with values in place of their variables: path -> content.

    Args:
        wanted: The back ends; files for others are left out.
        only: The paths to return; None for all.
    """
    # Variables in paths are written without `${}`, which would confuse formatters and linters.
    in_paths = {name: values[name] for name in ("python_name", "operator", "file_name") if name in values}
    in_paths["gitignore"] = ".gitignore"
    files: dict[str, str] = {}
    for template in sorted(tree.rglob("*")):
        path = template.relative_to(tree).as_posix()
        of_backend = re.search(r"_(cpu|cuda)[/.]", path)
        if template.is_dir() or "__pycache__" in path or (of_backend and of_backend[1] not in wanted):
            continue
        path = re.sub(r"^build_\w+", "build", path)  # a back end's table of build.toml
        path = re.sub("|".join(in_paths), lambda match: in_paths[match[0]], path)
        if only is not None and path not in only:
            continue
        content = string.Template(template.read_text(encoding="utf-8")).substitute(values)
        files[path] = files.get(path, "") + content
    return files


def _description(operator: str) -> dict[str, str]:
    """Return the texts about the operator; the author of another operator than the template's has to write them."""
    texts = toml_file.read(_TEMPLATES / "init_texts.toml")
    layer = "".join(map(str.capitalize, operator.split("_")))
    return {
        name: string.Template(text).substitute(operator=operator, layer=layer)
        for name, text in texts.get(operator, texts["other"]).items()
    }
