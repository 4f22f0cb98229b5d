"""The API of a package: the public names of its module with their parameters, and its operators' schemas.

The files are parsed and not loaded, so this works for packages of other machines and of other tools.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import griffe

from kernel_builder import elf
from kernel_format.errors import PackageError
from kernel_format.files import temporary_directory

_NEW = " is new"
_TEXT = re.compile(rb"[^\0]+")
_SCHEMA = re.compile(r"(?:\w+::)?(?P<name>[A-Za-z_]\w*(?:\.\w+)?)\(.*\) -> (?:\(.*\)|[A-Za-z]\S*)")
# griffe would run git in the package, by the package's own configuration.
griffe.GitInfo.from_package = classmethod(lambda *_: None)  # type: ignore[method-assign, assignment]
Kind = Literal["function", "class", "module", "attribute"]


@dataclass(frozen=True)
class ApiMember:
    """A public name.

    Attributes:
        call: A function's parameters with their names, kinds and defaults, without types: a type can have several
            spellings.
        signature: A function's name, parameters and result for people, with types.
    """

    kind: Kind
    call: str = ""
    signature: str = field(default="", compare=False)
    documentation: str = field(default="", compare=False)


@dataclass(frozen=True)
class Api:
    """The public members of a package's module by dotted name, and its operators' schemas by name."""

    members: Mapping[str, ApiMember]
    ops: Mapping[str, str]

    def differences(self, newer: Api) -> tuple[str, ...]:
        """Describe the changes in `newer`, one line for each name; empty if callers see no difference."""
        return (
            *_differences({name: _described(name, member) for name, member in self.members.items()},
                          {name: _described(name, member) for name, member in newer.members.items()}),
            *_differences(self.ops, newer.ops, "operator "),
        )  # fmt: skip


def breaks_callers(difference: str) -> bool:
    """Return whether a line of `Api.differences` describes more than a new name."""
    return not difference.endswith(_NEW)


def _described(name: str, member: ApiMember) -> str:
    return f"{name}{member.call}" if member.kind == "function" else f"{member.kind} {name}"


def _differences(older: Mapping[str, str], newer: Mapping[str, str], kind: str = "") -> Iterator[str]:
    for name in sorted({*older, *newer}):
        if name not in newer:
            yield f"{kind}{older[name]} is gone"
        elif name not in older:
            yield f"{kind}{newer[name]}{_NEW}"
        elif older[name] != newer[name]:
            yield f"{kind}{older[name]} becomes {newer[name]}"


def read(package: Path) -> Api:
    """Read the API of a package from its Python files and binaries, without running code."""
    logging.getLogger("griffe").disabled = True  # it also raises the errors that it logs
    # Older builders put the whole package into an inner directory.
    inner = next((path.parent for path in sorted(package.glob("*/__init__.py"))), package)
    top = package if (package / "__init__.py").is_file() else inner
    members: dict[str, ApiMember] = {}
    if (top / "__init__.py").is_file():
        with temporary_directory() as directory:
            # The name of a variant is not a valid module name.
            kernel = directory / "kernel"
            kernel.mkdir()
            for path in top.resolve().iterdir():
                if not path.name.startswith(".") and not _is_compatibility_folder(path):
                    (kernel / path.name).symlink_to(path)
            loader = griffe.GriffeLoader(search_paths=[str(directory)], allow_inspection=False)
            try:
                module = loader.load("kernel", try_relative_path=False)
                loader.resolve_aliases(implicit=False, external=False)
                assert isinstance(module, griffe.Module)
                members = dict(_members(module, ""))
            except (griffe.GriffeError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise PackageError(
                    f"the package's Python files cannot be parsed: {str(error) or 'they are nested too deeply'}",
                    where=str(package),
                    hint="correct the sources and rebuild; a broken package on a Hub can be deleted there",
                ) from error
    return Api(members, dict(_schemas(package)))


def _is_compatibility_folder(path: Path) -> bool:
    """Return whether a directory only redirects old clients to the package around it.

    It has the kernel's name. It is not a submodule, and must not hide a function of the same name.
    """
    init = path / "__init__.py"
    if not init.is_file() or [entry for entry in path.iterdir() if entry.name not in (init.name, "__pycache__")]:
        return False
    return ".parent.parent" in init.read_text(encoding="utf-8", errors="replace")


def _members(owner: griffe.Module | griffe.Class, prefix: str) -> Iterator[tuple[str, ApiMember]]:
    for name in sorted({*_exported(owner)}):
        try:
            member = owner[name]
            target = member.final_target if member.is_alias else member
        except (KeyError, griffe.GriffeError):
            # Imported from another package, or created at run time: only the name is known.
            yield f"{prefix}{name}", ApiMember("attribute")
            continue
        docs = target.docstring.value.strip() if target.docstring else ""
        if isinstance(target, griffe.Function):
            bare = griffe.Parameters(
                *(griffe.Parameter(p.name, kind=p.kind, default=p.default) for p in target.parameters)
            )
            call = griffe.Function("", parameters=bare).signature()
            signature = target.signature(return_type=True, name=f"{prefix}{name}")
            yield f"{prefix}{name}", ApiMember("function", call, signature, docs)
        elif isinstance(target, (griffe.Module, griffe.Class)):
            yield f"{prefix}{name}", ApiMember("module" if isinstance(target, griffe.Module) else "class", "", "", docs)
            yield from _members(target, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", ApiMember("attribute")


def _exported(owner: griffe.Module | griffe.Class) -> list[str]:
    """Return the names in `__all__`, or else the public names."""
    if owner.is_class or owner.exports is None:
        return _public(owner)
    return [*map(str, owner.exports)] or _public(owner)


def _public(owner: griffe.Module | griffe.Class) -> list[str]:
    """Return the names without a leading underscore that a class defines, or a module without `__all__`.

    They include the names that a module imports from its own submodules.
    """
    return [name for name, member in owner.members.items() if not name.startswith("_") and _is_own(owner, member)]


def _is_own(owner: griffe.Module | griffe.Class, member: griffe.Object | griffe.Alias) -> bool:
    if isinstance(member, griffe.Alias) and not member.target_path.startswith(f"{owner.path}."):
        return False
    try:
        return owner.is_class or not member.is_module
    except griffe.GriffeError:  # the submodule does not define it: it is made at run time
        return True


def _schemas(package: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and schemas of the operators in a package's binaries, without their namespace.

    They are string constants, because Torch parses them at run time. Torch infers others from C++ functions.
    """
    for binary in sorted(package.rglob("*.so")):
        try:
            constants = elf.constants(binary)
        except elf.Unreadable:
            continue
        for text in (text[0] for data in constants for text in _TEXT.finditer(data) if b") -> " in text[0]):
            schema = " ".join(text.decode("utf-8", "replace").split())
            if match := _SCHEMA.fullmatch(schema):
                yield match["name"], schema[match.start("name") :]
