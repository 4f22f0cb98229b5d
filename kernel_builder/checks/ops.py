"""Check that ops are registered as their schemas, the backend and `torch.compile` need them.

Torch's own parser reads what the author wrote, through `torch.library`: before a build compiles anything, and in the
check of the package. The registered ops are those of the loaded package.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

from kernel_builder.checks import fakes, implementations, registrations
from kernel_builder.checks.findings import CheckedPackage, Finding, NotApplicable
from kernel_builder.checks.probe_process import ProbeProcess
from kernel_builder.checks.registrations import PLAIN_SCHEMA, WrittenText
from kernel_builder.config.project import Project
from kernel_builder.config.variant import Variant

NAME = "ops"
_BINARY = "the binary"
_SECONDS = 60  # for the parser, which takes milliseconds
_KEYS = ("CPU", "CUDA", "Meta", "Autograd", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


def check_ops(package: CheckedPackage) -> Iterator[Finding]:
    answer = package.load_answers().get(str(package.directory), {}) if package.load_answers else {}
    texts = registrations.sources(package.project, package.variant) if package.project and package.variant else {}
    written = registrations.read(texts)
    python = {source.name: source.text for source in package.sources if "define" in source.text}
    findings = list(_in_texts(texts, python, package.probe))
    if not findings:  # what is missing in the loaded package would be missing because of these
        findings = [
            *_in_libraries(written),
            *_in_loaded(package, answer, written),
            *fakes.compare(NAME, package.sources, written),
        ]
    yield from findings
    if not findings and answer.get("outcome") != "loaded":
        raise NotApplicable(f"the package is not loaded: {answer.get('text') or 'it is not for this machine'}")


def check_op_sources(project: Project, variant: Variant, probe: ProbeProcess) -> list[Finding]:
    """Return what `check_ops` finds in a project's sources alone, before they are compiled.

    Registrations that macros write are not covered, nor is what needs Torch on a machine without it.
    """
    texts = registrations.sources(project, variant)
    if not any(map(registrations.registers, texts.values())):
        return []
    files = {name: path.read_text(encoding="utf-8", errors="replace") for name, path in project.python_files}
    python = {name: text for name, text in files.items() if "define" in text}
    findings = list(_in_libraries(registrations.read(texts)))
    if not registrations.has_initialiser(texts):
        registering = next(name for name, text in texts.items() if registrations.registers(text))
        problem = "no source makes the binary a module of Python, so it cannot be imported"
        hint = "put `REGISTER_EXTENSION(TORCH_EXTENSION_NAME)`, of registration.h, into one source"
        findings.append(Finding(NAME, registering, problem, hint))
    with suppress(NotApplicable):  # of the parser; the comparison with functions comes before it
        for finding in _in_texts(texts, python, probe):
            findings.append(finding)
    return findings


def _in_texts(texts: Mapping[str, str], python: Mapping[str, str], probe: ProbeProcess | None) -> Iterator[Finding]:
    """Yield the functions that fit no schema, what is defined twice, and what Torch cannot parse."""
    written = registrations.read(texts)
    yield from implementations.compare(NAME, texts, written, python)
    yield from _repeated(written)
    parsed = _parsed(probe, [entry for entry in written if entry.kind in ("schema", "key")])
    yield from (_wrong(entry, said) for entry, said in parsed.items())


def _repeated(written: Sequence[WrittenText]) -> Iterator[Finding]:
    """Yield the schemas of a name that has one already, if nothing but the file decides that both are compiled."""
    firsts: dict[tuple[str, ...], WrittenText] = {}
    for schema in (schema for schema in written if schema.kind == "schema"):
        where = (schema.source, *map(str, schema.branch)) if schema.branch else ()
        first = firsts.setdefault((schema.library, schema.name, *where), schema)
        if first is not schema:
            yield Finding(
                NAME,
                schema.source,
                f"line {schema.places[0][0]}: {schema.name} is defined again, after line {first.places[0][0]}"
                + (f" of {first.source}" if first.source != schema.source else ""),
                f"remove one, or make it an overload, such as {schema.name.partition('.')[0]}.other(...): Torch "
                "refuses it, or keeps the first and says nothing",
            )


def _in_libraries(written: Sequence[WrittenText]) -> Iterator[Finding]:
    """Yield what is wrong with the libraries that ops are registered in, and with how."""
    libraries = [entry for entry in written if entry.kind == "library" and not entry.branch]
    for entry in libraries[1:]:
        first = libraries[0]
        yield Finding(
            NAME,
            entry.source,
            f"line {entry.places[0][0]}: defines the library again, after line {first.places[0][0]} of {first.source}: "
            "Python aborts when the package is loaded",
            f"use TORCH_LIBRARY_FRAGMENT({entry.text}, ops), or STABLE_TORCH_LIBRARY_FRAGMENT, here",
        )
    for entry in written:
        if entry.kind == "namespace":
            yield _fixed(entry.source, f"line {entry.places[0][0]}: ", "a library", entry.text)
        elif entry.kind == "qualified":
            yield Finding(
                NAME,
                entry.source,
                f"line {entry.places[0][0]}: a name begins with {entry.text}::, and its library has another namespace: "
                "Python aborts when the package is loaded",
                f"leave out `{entry.text}::`: the library gives its ops the namespace",
            )
        elif entry.kind == "registry":
            yield Finding(
                NAME,
                entry.source,
                f"line {entry.places[0][0]}: {entry.text} registers ops by fixed names while the library is loaded: "
                "Python aborts when a second version of the kernel is",
                "write TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) with ops.def(schema, &function) in its body, "
                "and take `ops` from `._ops` in Python",
            )


def _in_loaded(package: CheckedPackage, answer: Mapping[str, Any], written: Sequence[WrittenText]) -> Iterator[Finding]:
    """Yield what is wrong with the ops that a loaded package has registered."""
    lines = {entry.name: (entry.source, f"line {entry.places[0][0]}: ") for entry in written if entry.kind == "schema"}
    fixed = {entry.text for entry in written if entry.kind == "namespace"}
    ops = answer.get("ops", ())
    if registered := {op["name"].partition(".")[0] for op in ops if not op["namespace"]}:
        yield from _misnamed(package, registered, answer["text"])
    for op in ops:
        # What a failed load has left out is not missing.
        if op["namespace"] not in fixed and (op["namespace"] or answer["outcome"] == "loaded"):
            path, line = lines.get(op["name"], (_path(op), _line(op)))
            forgotten = package.project is not None and not registrations.implemented_somewhere(
                package.project, op["name"]
            )
            yield from _registered(
                op, path, line, forgotten=forgotten or not any(other["implemented"] for other in ops)
            )


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
                    "error" if re.search(rf"::{name} does not exist|_OpNamespace' .*'{name}'$", said) else "warning",
                )


def _parsed(probe: ProbeProcess | None, written: Sequence[WrittenText]) -> Mapping[WrittenText, str]:
    """Return what Torch's parser says of the texts that it does not accept.

    It is not asked about common schemas and keys: a build would have to import Torch before it compiles.

    Raises:
        NotApplicable: If there is no Torch here.
    """
    written = [entry for entry in written if not _is_plain(entry)]
    if not written or probe is None:
        return {}
    answer = probe.ask("parse", json.dumps([(entry.kind, entry.text) for entry in written]))(_SECONDS)
    if not isinstance(answer, list) or len(answer) != len(written):
        raise NotApplicable(f"Torch cannot parse the schemas here: {answer}")
    return {entry: said for entry, said in zip(written, answer, strict=True) if said}


def _is_plain(written: WrittenText) -> bool:
    """Return whether Torch certainly accepts a schema or a dispatch key."""
    return written.text in _KEYS if written.kind == "key" else bool(PLAIN_SCHEMA.fullmatch(written.text))


def _wrong(written: WrittenText, said: str) -> Finding:
    """Return the finding for a text that Torch cannot parse."""
    if written.kind == "schema":
        line, column = written.places[min(_column(said), len(written.places) - 1)]
        return Finding(
            NAME,
            written.source,
            f"line {line}, column {column}: the schema of {written.name} is wrong: {_reason(said)}",
            "a schema is like `name(Tensor x, int[] sizes, float eps=1e-6, Tensor? bias=None) -> Tensor`",
        )
    line, column = written.places[0]
    close = difflib.get_close_matches(written.text, _KEYS, n=1, cutoff=0.5)
    return Finding(
        NAME,
        written.source,
        f"line {line}, column {column}: Torch has no dispatch key {written.text}",
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


def _registered(op: Mapping[str, Any], path: str, line: str, *, forgotten: bool) -> Iterator[Finding]:
    """Yield what is wrong with an op; `forgotten` if no source of the project implements it, or no op of the package.

    Public projects define all their ops for every backend and implement some for one alone, so that is a warning.
    """
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
            "error" if op["keys"] or forgotten else "warning",
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
