"""Check that ops are registered as their schemas, the backend and `torch.compile` need them.

Torch's own parser reads what the author wrote, through `torch.library`. The registered ops are those of the loaded
package.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from kernel_builder.checks import implementations, registrations
from kernel_builder.checks.findings import CheckedPackage, Finding, NotApplicable
from kernel_builder.checks.registrations import WrittenText
from kernel_builder.config.variant import StableAbi

NAME = "ops"
_BINARY = "the binary"
_KEYS = ("CPU", "CUDA", "Meta", "Autograd", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


def check_ops(package: CheckedPackage) -> Iterator[Finding]:
    answer = package.load_answers().get(str(package.directory), {}) if package.load_answers else {}
    texts = registrations.sources(package.project, package.variant) if package.project and package.variant else {}
    written = registrations.read(texts)
    if not written and "ops" not in answer:
        raise NotApplicable(answer.get("text") or "the package is not loaded, and its sources are not here")
    wrong = list(_wrong(package, written))
    if _is_stable(package):
        wrong += implementations.compare(NAME, texts, written)
    yield from wrong
    if wrong:
        return  # what is missing in the loaded package is missing because of them
    fixed = [one for one in written if one.kind == "namespace"]
    for one in fixed:
        yield _fixed(one.source, f"line {one.places[0][0]}: ", "a library", one.text)
    lines = {one.name: (one.source, f"line {one.places[0][0]}: ") for one in written if one.kind == "schema"}
    is_loaded = answer.get("outcome") == "loaded"
    registered = {op["name"].partition(".")[0] for op in answer.get("ops", ()) if not op["namespace"]}
    if registered:
        yield from _misnamed(package, registered, answer["text"])
    for op in answer.get("ops", ()):
        # What a failed load has left out is not missing.
        if op["namespace"] not in {one.text for one in fixed} and (is_loaded or op["namespace"]):
            path, line = lines.get(op["name"].partition(".")[0], (_path(op), _line(op)))
            yield from _registered(op, path, line)


def _is_stable(package: CheckedPackage) -> bool:
    return package.variant is not None and isinstance(package.variant.framework, StableAbi)


def _misnamed(package: CheckedPackage, registered: AbstractSet[str], said: str) -> Iterator[Finding]:
    """Yield the names in the package's Python that are no registered op.

    They are errors if the load fails for them. Otherwise the code may be for another backend.
    """
    for source in package.sources:
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and source.dotted(node.value) == "torch.ops.<id>":
                name, use = node.attr, "calls"
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "add_op_namespace_prefix":
                name, use = getattr(node.args[0], "value", "") if node.args else "", "names"
            else:
                continue
            if isinstance(name, str) and name and name not in registered:
                close = difflib.get_close_matches(name, registered, n=1)
                yield Finding(
                    NAME,
                    source.name,
                    f"line {node.lineno}: {use} the op {name}, which the package does not register",
                    f"did you mean {close[0]}?" if close else f"the ops are {', '.join(sorted(registered))}",
                    "error" if f"::{name} does not exist" in said else "warning",
                )


def _wrong(package: CheckedPackage, written: Sequence[WrittenText]) -> Iterator[Finding]:
    """Yield what Torch cannot parse."""
    written = [one for one in written if one.kind != "namespace"]
    if not written or package.probe is None:
        return
    texts = json.dumps([(one.kind, one.text) for one in written])
    answer = package.probe.ask("parse", texts)(60)
    if not isinstance(answer, list) or len(answer) != len(written):
        return  # no Torch here, which the check `load` says
    for one, said in zip(written, answer, strict=True):
        if said and one.kind == "schema":
            line, column = one.places[min(_column(said), len(one.places) - 1)] if said else one.places[0]
            yield Finding(
                NAME,
                one.source,
                f"line {line}, column {column}: the schema of {one.name} is wrong: {_reason(said)}",
                "a schema is like `name(Tensor x, int[] sizes, float eps=1e-6, Tensor? bias=None) -> Tensor`",
            )
        elif said:
            line, column = one.places[0]
            close = difflib.get_close_matches(one.text, _KEYS, n=1, cutoff=0.5)
            yield Finding(
                NAME,
                one.source,
                f"line {line}, column {column}: Torch has no dispatch key {one.text}",
                f"did you mean {close[0]}?" if close else f"use one of {', '.join(_KEYS)}",
            )


def _column(said: str) -> int:
    """Return the offset of the place that Torch's parser marks with `~~~ <--- HERE`; the end if it marks none."""
    marked = re.search(r"^( *)~+ <--- HERE", said, re.M)
    return len(marked[1]) if marked else 1 << 30


def _reason(said: str) -> str:
    """Return what the parser says in one line, without advice for Torch's own developers."""
    first = said.strip().split("\n")[0].rpartition("please report a bug to PyTorch. ")[2]
    return re.sub(r"; for a full list.*|( here)?\s*:\s*$|\.\s*:?$", "", first).rstrip(" .:")


def _registered(op: Mapping[str, Any], path: str, line: str) -> Iterator[Finding]:
    name = op["name"]
    if op["namespace"]:
        yield _fixed(path, line, name, op["namespace"])
        return
    if op["key"] and not op["implemented"]:
        others = f"only for {', '.join(op['keys'])}" if op["keys"] else "nor for another backend"
        yield Finding(
            NAME,
            path,
            f"{line}{name} has no implementation for {op['key']}, {others}",
            f"register one under {op['key']}, by the same name; or define the op only where it is implemented: "
            f"#if defined({op['key']}_KERNEL)",
        )
    elif not op["fake"]:
        yield Finding(
            NAME,
            path,
            f"{line}{name} has no fake, so torch.compile fails at it",
            f'add one in Python: @torch.library.register_fake(add_op_namespace_prefix("{name}"))',
            "warning",
        )


def _fixed(path: str, line: str, what: str, namespace: str) -> Finding:
    return Finding(
        NAME,
        path,
        f"{line}{what} is registered in the fixed namespace {namespace!r}: two versions of the kernel could not be "
        "loaded in one process",
        "write TORCH_EXTENSION_NAME instead: TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops)",
    )


def _path(op: Mapping[str, Any]) -> str:
    return str(op["place"]).rpartition(":")[0] or _BINARY


def _line(op: Mapping[str, Any]) -> str:
    return f"line {number}: " if (number := str(op["place"]).rpartition(":")[2]) else ""
