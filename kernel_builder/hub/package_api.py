"""What a package offers its users: the names of its module with how they are called, and its operators' schemas.

`read` reads it from the files, without loading anything, so that it can be asked of every package: one for another
machine, and one that another tool has built and published. Two packages are compared by that. `loaded` asks the module
itself, where this machine can load it; a card shows its words.
"""

from __future__ import annotations

import ast
import inspect
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kernel_builder.hub import op_schemas

if TYPE_CHECKING:
    import griffe

Kind = Literal["function", "class", "module", "attribute"]


@dataclass(frozen=True)
class Member:
    """A public name.

    Attributes:
        kind: What it is.
        call: How it is called, for a function: its parameters' names, kinds and defaults, without their types, which
            can be written in many ways.
        signature: The same as people read it, with types.
        summary: The first line of its documentation.
    """

    kind: Kind
    call: str = ""
    signature: str = field(default="", compare=False)
    summary: str = field(default="", compare=False)


@dataclass(frozen=True)
class Api:
    """The members of a package's module by their dotted names, and its operators' schemas by name."""

    members: Mapping[str, Member]
    ops: Mapping[str, str]

    def differences(self, newer: Api) -> tuple[str, ...]:
        """What `newer` changes, one line for each name, or nothing where users cannot tell the two apart."""
        return (
            *_differences({name: _spelled(name, member) for name, member in self.members.items()},
                          {name: _spelled(name, member) for name, member in newer.members.items()}),
            *_differences(self.ops, newer.ops, "operator "),
        )  # fmt: skip


def _spelled(name: str, member: Member) -> str:
    return f"{name}{member.call}" if member.kind == "function" else f"{member.kind} {name}"


def _differences(older: Mapping[str, str], newer: Mapping[str, str], what: str = "") -> Iterator[str]:
    for name in sorted({*older, *newer}):
        if name not in newer:
            yield f"{what}{older[name]} is gone"
        elif name not in older:
            yield f"{what}{newer[name]} is new"
        elif older[name] != newer[name]:
            yield f"{what}{older[name]} becomes {newer[name]}"


def read(package: Path) -> Api:
    """The API of the package in `package`, read from its Python files and its binaries; nothing is run.

    Of the operators, those that `kernel_builder.hub.schemas` finds.
    """
    import griffe

    # Packages of builders before flat ones have a directory with everything in it.
    inner = next((path.parent for path in sorted(package.glob("*/__init__.py"))), package)
    top = package if (package / "__init__.py").is_file() else inner
    members: dict[str, Member] = {}
    if (top / "__init__.py").is_file():
        with tempfile.TemporaryDirectory() as directory:
            # A variant's name is no module's name.
            Path(directory, "kernel").symlink_to(top.resolve(), target_is_directory=True)
            loader = griffe.GriffeLoader(search_paths=[directory], allow_inspection=False)
            module = loader.load("kernel", try_relative_path=False)
            loader.resolve_aliases(implicit=False, external=False)
            assert isinstance(module, griffe.Module)
            members = dict(_members(module, ""))
    return Api(members, op_schemas.read(package))


def loaded(package: Path) -> Api | None:
    """The API of the package in `package` as the module itself tells it, or None where this machine cannot load it.

    The module is loaded by the public client in a process of its own.
    """
    from kernel_builder.checks.load import probe

    outcome, told = probe("describe", str(package.resolve()))
    if outcome != "loaded":
        return None
    return Api({name: Member(call="", **member) for name, member in told["members"].items()}, told["ops"])


def _members(owner: griffe.Module | griffe.Class, prefix: str) -> Iterator[tuple[str, Member]]:
    import griffe

    exports = getattr(owner, "exports", None)
    names = [str(name) for name in exports] if exports is not None else _public(owner)
    for name in sorted(names):
        try:
            found = owner[name]
            target = found.final_target if found.is_alias else found
        except (KeyError, griffe.GriffeError):
            # Taken from another package, or made at run time: all that is known is the name.
            yield f"{prefix}{name}", Member("attribute")
            continue
        docs = target.docstring.value.strip().partition("\n")[0] if target.docstring else ""
        if isinstance(target, griffe.Function):
            yield f"{prefix}{name}", Member("function", _call(target), _signature(target), docs)
        elif isinstance(target, (griffe.Module, griffe.Class)):
            yield f"{prefix}{name}", Member("module" if isinstance(target, griffe.Module) else "class", "", "", docs)
            yield from _members(target, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", Member("attribute")


def _public(owner: griffe.Module | griffe.Class) -> list[str]:
    """The names of a class, or of a module without `__all__`, that are its own and have no leading underscore."""
    return [
        name
        for name, member in owner.members.items()
        if not name.startswith("_") and not member.is_alias and not (owner.is_module and member.is_module)
    ]


_KINDS = {
    kind.description: kind
    for kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    )
}


def _call(function: griffe.Function) -> str:
    parameters = []
    for parameter in function.parameters:
        kind = _KINDS[parameter.kind.value if parameter.kind else "positional or keyword"]
        starred = kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        default = inspect.Parameter.empty if starred or parameter.default is None else _Source(str(parameter.default))
        parameters.append(inspect.Parameter(parameter.name, kind, default=default))
    return str(inspect.Signature(parameters))


class _Source:
    """An expression, in one way of writing quotes, spaces and numbers."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        try:
            return ast.unparse(ast.parse(self._text, mode="eval"))
        except SyntaxError:
            return self._text


def _signature(function: griffe.Function) -> str:
    result = f" -> {function.returns}" if function.returns is not None else ""
    parameters = function.signature(return_type=False).partition("(")[2]
    return f"({parameters}{result}"
