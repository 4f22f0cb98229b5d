"""Creates a kernel project from the templates in `templates/init`.

A project combines several template directories: `common`, and either `relu` and one for each backend, or `kit`. A
project on the kit also gets the files of the kit that its `build.toml` lists.
"""

from __future__ import annotations

import keyword
import os
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kernel_builder.config import known_backends
from kernel_builder.config.build_toml import NAME, REPO_ID
from kernel_builder.config.project import python_name
from kernel_builder.config.toml_schema import nearest
from kernel_format.errors import ConfigError
from kernel_format.files import write_atomically

_TEMPLATES = Path(__file__).parent / "templates" / "init"
_KIT = Path(__file__).parent / "templates" / "kit"
# Names that the new project itself defines.
_RESERVED = ("layers", "metadata", "op", "ops", "torch")
# Marks text that only the author can write.
NOT_WRITTEN = "Not written yet:"
_PASSES = "forward and backward, for float32, float16 and bfloat16"


class _Template(NamedTuple):
    """The operator of a template.

    Attributes:
        module: Torch's module.
        computed: The formula as text.
        formula: The formula in Torch, with the same gradients.
        saved: The tensor that the backward pass needs: the argument `x` or the result `y`.
    """

    module: str
    computed: str
    formula: str
    saved: str


_TEMPLATE = _Template("ReLU", "max(x, 0)", "torch.where(x <= 0, 0.0, x)", "y")
_TEMPLATE_ON_KIT = _Template("SiLU", "x * sigmoid(x)", "x * torch.sigmoid(x)", "x")


def backends() -> tuple[str, ...]:
    """Return the backends that have templates."""
    return tuple(sorted(directory.name for directory in _TEMPLATES.iterdir() if directory.name in known_backends.NAMES))


def create(
    directory: Path | None,
    repo_id: str,
    wanted: Sequence[str],
    *,
    license_name: str,
    operator: str | None = None,
    on_kit: bool = False,
    overwrite: bool = False,
) -> Path:
    """Create a project.

    Args:
        directory: Where to create it; None for a directory with the name of the kernel. Other files in it are kept.
        repo_id: The Hub repository, such as `org/my-kernel`; the part after the slash is the name of the kernel.
        wanted: The backends.
        license_name: The SPDX name of the license.
        operator: The name of the operator and of its function. None: the name of the template's operator.
        on_kit: Whether to start from an operator on the kit, which needs all backends of the kit.
        overwrite: Whether to replace existing files.

    Returns:
        The directory of the project.

    Raises:
        ConfigError: If an argument is invalid, a file exists already, or the directory cannot be written.
    """
    name = kernel_name(repo_id)
    _check_backends(wanted, on_kit)
    _check_operator(operator)
    if not re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9.+]*", license_name):
        raise ConfigError(
            f"{license_name!r} is not an SPDX license name",
            where="--license",
            hint="use for example apache-2.0, mit or bsd-3-clause",
        )
    directory = directory or Path(name)
    chosen = [backend for backend in backends() if backend in wanted]
    files = _render(repo_id, name, chosen, license_name, operator, on_kit)
    if on_kit:
        files |= {name: (_KIT.parent / name).read_text() for name in re.findall(r'"(kit/[^"]+)"', files["build.toml"])}
    write({name: text.encode() for name, text in files.items()}, directory, overwrite=overwrite)
    return directory


def write(files: Mapping[str, bytes], directory: Path, *, overwrite: bool) -> None:
    """Write the files of a project into a directory."""
    present = [path for path in files if os.path.lexists(directory / path)]
    if present and not overwrite:
        raise ConfigError(
            f"the directory already has {', '.join(present)}",
            where=str(directory),
            hint="use another PATH, or --overwrite",
        )
    try:
        for name, content in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(directory / name, content)
    except OSError as error:
        raise ConfigError(
            f"cannot write the project: {error.strerror}",
            where=str(error.filename2 or error.filename or directory),
            hint="use another PATH",
        ) from error


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
    return name


def _check_backends(wanted: Sequence[str], on_kit: bool) -> None:
    known = backends()
    for backend in wanted:
        if backend not in known:
            meant = nearest(backend, known)
            raise ConfigError(
                f"there is no template for the backend {backend!r}, only for {' and '.join(known)}",
                where="--backends",
                hint=f"did you mean {meant}?"
                if meant
                else f"start with {known[0]}, and add the backend to build.toml (docs/build-toml.md)",
            )
    if not wanted:
        raise ConfigError("no backend is named", where="--backends", hint=f"use {' or '.join(known)}")
    if on_kit and set(known) - set(wanted):
        raise ConfigError(
            f"a project on the kit needs the backends {' and '.join(known)}",
            where="--kit",
            hint="remove --backends; delete a backend from the new project afterwards",
        )


def _check_operator(operator: str | None) -> None:
    if operator is None:
        return
    if not re.fullmatch(r"[a-z][a-z0-9_]*", operator) or keyword.iskeyword(operator) or operator in _RESERVED:
        raise ConfigError(
            f"{operator!r} cannot be the name of an operator: expected lowercase letters, digits and underscores, a "
            f"letter first, and neither a Python keyword nor {', '.join(_RESERVED)}",
            where="--op",
            hint="use a name such as swiglu or fused_add",
        )


def _render(
    repo_id: str, name: str, wanted: Sequence[str], license_name: str, operator: str | None, on_kit: bool
) -> dict[str, str]:
    """Return the files of the project, without those of the kit: path -> content."""
    computes = _TEMPLATE_ON_KIT if on_kit else _TEMPLATE
    values = {
        "name": name,
        "python_name": python_name(name),
        "repo_id": repo_id,
        "license": license_name,
        "saved": computes.saved,
        "backends": "[" + ", ".join(f'"{backend}"' for backend in wanted) + "]",
        "device": max(wanted, key=lambda name: known_backends.get(name).preference),
        "directories": ", ".join(f"`{python_name(name)}_{backend}/`" for backend in wanted),
        **(
            _placeholder_values(operator, computes)
            if operator not in (None, computes.module.lower())
            else _template_values(computes)
        ),
    }
    parts = ("common", "kit") if on_kit else ("common", "relu", *wanted)
    return render([_TEMPLATES / part for part in parts], values)


def render(trees: Sequence[Path], values: Mapping[str, str]) -> dict[str, str]:
    """Return the files of template directories with values in place of their variables: path -> content.

    A file that several directories have is the concatenation of all.
    """
    # Variables in paths are written without `${}`, which would confuse formatters and linters.
    in_paths = {name: values[name] for name in ("python_name", "operator", "suffix") if name in values}
    in_paths["gitignore"] = ".gitignore"
    files: dict[str, str] = {}
    for tree in trees:
        for template in sorted(path for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
            path = re.sub("|".join(in_paths), lambda match: in_paths[match[0]], template.relative_to(tree).as_posix())
            content = string.Template(template.read_text(encoding="utf-8")).substitute(values)
            files[path] = files.get(path, "") + content
    return files


def _template_values(template: _Template) -> dict[str, str]:
    """Return the values for a project with the template's own operator."""
    operator, layer = template.module.lower(), template.module
    return {
        "operator": operator,
        "layer": layer,
        "title": layer,
        "computed": layer,
        "formula": f"torch.nn.functional.{operator}(x)",
        "returns": f"Return `{template.computed}` as a contiguous tensor.",
        "summary": f"{layer}, {_PASSES}.",
        "replaces": f"Replaces `torch.nn.{layer}`.",
        "card_of_layer": f"`kernels.kernelize` can replace `torch.nn.{layer}` in a model with `kernel.layers.{layer}`.",
        "replaced": f"torch.nn.{layer}()",
    }


def _placeholder_values(operator: str, template: _Template) -> dict[str, str]:
    """Return the values for a project with another operator, whose description the author has to write."""
    layer = "".join(map(str.capitalize, operator.split("_")))
    return {
        "operator": operator,
        "layer": layer,
        "title": f"`{operator}`",
        "computed": template.computed,
        "formula": template.formula,
        "returns": f"{NOT_WRITTEN} the result; so far `{template.computed}`, as a contiguous tensor.",
        "summary": f"{NOT_WRITTEN} the computation of `{operator}`, {_PASSES}.",
        "replaces": f"{NOT_WRITTEN} the module that it replaces.",
        "card_of_layer": f"{NOT_WRITTEN} the module that `kernels.kernelize` can replace with `kernel.layers.{layer}`.",
        "replaced": f"eager  # {NOT_WRITTEN} the module that the layer replaces",
    }
