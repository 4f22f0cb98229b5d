"""Rewrites a `build.toml` of an older edition to edition 5, and keeps its comments and formatting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_builder import toml_file
from kernel_builder.config import build_toml, editions, known_backends, license_texts
from kernel_builder.config.toml_schema import TomlPlace
from kernel_format.errors import ConfigError

if TYPE_CHECKING:
    from tomlkit.items import Item, Key
    from tomlkit.toml_document import TOMLDocument

    Body = list[tuple[Key | None, Item]]

# What `universal = true` meant. Edition 3 and older had no backend tpu.
_UNIVERSAL = [backend for backend in known_backends.NAMES if backend != "tpu"]


def rewritten(path: Path, licence: str | None = None) -> tuple[str, str]:
    """Return the text of a `build.toml`, and the same text in edition 5.

    Files that the text names are not looked at.

    Args:
        licence: The SPDX name of the licence of a file that names none.

    Raises:
        ConfigError: If the file cannot be read, or would not be valid in edition 5.
    """
    old = build_toml.read_text(path)
    general = toml_file.parse(old, str(path)).get("general")
    edition = general.get("edition") if isinstance(general, dict) else None
    if edition == editions.EDITION:
        return old, old
    editions.refuse_newer(edition, TomlPlace(str(path), "general", "edition"))
    new = _Rewrite(old.replace("\r\n", "\n"), TomlPlace(str(path)), licence).text()
    if licence is None and isinstance(general, dict) and "license" not in general:
        raise _no_licence(path)
    build_toml.from_document(toml_file.parse(new, str(path)), str(path), path.parent)
    return old, new.replace("\n", "\r\n") if "\r\n" in old else new


def _no_licence(path: Path) -> ConfigError:
    suggestion = license_texts.suggested(path.parent.resolve())
    name, file = suggestion or ("NAME", None)
    return ConfigError(
        "is missing, and edition 5 needs it" + (f"; {file} looks like {name}" if file else ""),
        where=str(TomlPlace(str(path), "general", "license")),
        hint=f"run `kernel-builder update-build {path.parent} --license {name}`, with the licence's SPDX name",
    )


class _Rewrite:
    """One document on its way to edition 5.

    tomlkit's documents have no method that renames a key or inserts one at a place, so the entries of their bodies
    are edited.
    """

    def __init__(self, old: str, place: TomlPlace, licence: str | None) -> None:
        import tomlkit

        self._place = place
        self._licence = licence
        try:
            self._document: TOMLDocument = tomlkit.parse(old)
        except ValueError as error:  # what Python's parser accepts and tomlkit does not
            raise ConfigError(
                f"cannot be rewritten: {error}", where=place.file, hint="write this part in another way"
            ) from error
        self._added = ""  # tables, as text

    def text(self) -> str:
        """Return the document in edition 5. What cannot be in it is left for the reader to report."""
        general = self._body("general")
        if general is None:
            raise ConfigError(
                "expected a table with a header of its own",
                where=str(self._place.at("general")),
                hint="write `[general]` above its keys, or add `edition = 5` by hand",
            )
        torch = self._body("torch") or []
        universal = [_taken(body, "universal") for body in (general, torch)]
        self._framework(general, torch, universal=any(universal))
        self._cuda_range(general)
        backends = [backend for name, body in self._kernels() for backend in self._kernel(name, body)]
        if any(universal):
            backends = _UNIVERSAL
        name = _at(general, "name")
        if name is not None and "_" in str(given := general[name][1].unwrap()):
            # The Python package, whose name has underscores, stays where it is.
            general[name] = (general[name][0], _entry("name", str(given).replace("_", "-"))[1])
        if _at(general, "version") is None:
            _insert(general, "name", "version", 1)
        _taken(general, "edition")
        _insert(general, "version", "edition", editions.EDITION)
        if self._licence and _at(general, "license") is None:
            _insert(general, "edition", "license", self._licence)
        if _at(general, "backends") is None:
            _insert(general, "license", "backends", sorted(set(backends)))
        text = self._document.as_string()
        return f"{text.rstrip()}\n{self._added}" if self._added else text

    def _body(self, name: str) -> Body | None:
        """Return the entries of the table [name]; None if the document does not have it in this form."""
        from tomlkit.items import Table

        for key, item in self._document.body:
            if key and key.key == name and isinstance(item, Table) and not item.is_super_table():
                return item.value.body
        return None

    def _kernels(self) -> Iterator[tuple[str, Body]]:
        from tomlkit.items import Table

        for key, item in self._document.body:
            if key and key.key == "kernel" and isinstance(item, Table):
                for name, kernel in item.value.body:
                    if name and isinstance(kernel, Table):
                        yield name.key, kernel.value.body

    def _framework(self, general: Body, torch: Body, *, universal: bool) -> None:
        """Rewrite [torch], and add [torch-noarch] if there is no framework."""
        if not any(name in self._document for name in editions.FRAMEWORKS):
            self._added += "\n[torch-noarch]\n"
        name = _taken(torch, "name")
        if name is not None and _at(general, "name") is None:
            general.insert(0, _entry("name", name))
        if _taken(torch, "pyroot") is not None:
            raise ConfigError(
                "edition 5 has no such key",
                where=str(TomlPlace(self._place.file, "torch", "pyroot")),
                hint="move the Python package to torch-ext/<name with _ for ->, remove the key, and run this again",
            )
        if universal:
            self._make_noarch(torch)

    def _make_noarch(self, torch: Body) -> None:
        """Turn [torch] into [torch-noarch]."""
        import tomlkit

        for key in ("src", "include"):
            if _taken(torch, key):
                raise ConfigError(
                    "a universal kernel is Python only, and compiles nothing",
                    where=str(TomlPlace(self._place.file, "torch", key)),
                    hint=f"remove `{key}`, or `universal = true`",
                )
        for number, (table, item) in enumerate(self._document.body):
            if table and table.key == "torch":
                self._document.body[number] = (tomlkit.key("torch-noarch"), item)
                item.display_name = None  # type: ignore[attr-defined]

    def _cuda_range(self, general: Body) -> None:
        """Move `cuda-minver` and `cuda-maxver` of [general] to a table of their own."""
        import tomlkit

        taken = {key: _taken(general, f"cuda-{key}") for key in ("minver", "maxver")}
        if bounds := {key: value for key, value in taken.items() if value is not None}:
            self._added += "\n" + tomlkit.dumps({"general": {"cuda": bounds}})

    def _kernel(self, name: str, body: Body) -> list[str]:
        """Rewrite one kernel, and return its backends."""
        language = _taken(body, "language")
        at = _at(body, "backend")
        if at is not None:
            return [str(body[at][1].unwrap())]
        if language == "cuda-hipify":
            self._added += self._hipified(name, body)
        _taken(body, "rocm-archs")
        backend = "cuda" if language in (None, "cuda-hipify") else str(language)
        body.insert(0, _entry("backend", backend))
        return [backend, "rocm"] if language == "cuda-hipify" else [backend]

    def _hipified(self, name: str, body: Body) -> str:
        """Return a kernel that is compiled for ROCm as well, as the text of a table of its own."""
        import tomlkit

        kept = {key.key: item.unwrap() for key, item in body if key and not key.key.startswith("cuda-")}
        return "\n" + tomlkit.dumps({"kernel": {f"{name}_rocm": {"backend": "rocm", **kept}}})


def _entry(name: str, value: Any) -> tuple[Key, Item]:
    import tomlkit

    item = tomlkit.item(value)
    item.trivia.trail = "\n"
    return tomlkit.key(name), item


def _at(body: Body, name: str) -> int | None:
    return next((number for number, (key, _) in enumerate(body) if key and key.key == name), None)


def _taken(body: Body, name: str) -> Any:
    """Remove a key and return its value, or None if it is not there."""
    at = _at(body, name)
    return None if at is None else body.pop(at)[1].unwrap()


def _insert(body: Body, after: str, name: str, value: Any) -> None:
    """Insert a key after another one, or at the start."""
    at = _at(body, after)
    body.insert(0 if at is None else at + 1, _entry(name, value))
