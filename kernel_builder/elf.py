"""Reads ELF files: dynamic sections, symbols and other sections."""

from __future__ import annotations

import io
import struct
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from auditwheel.elfutils import elf_find_versioned_symbols
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import StringTableSection, SymbolTableSection

_TEXTS = ("DT_NEEDED", "DT_RPATH", "DT_RUNPATH")
_EXECUTABLE = 0x1  # PF_X in a program header's flags
_TEXT_RELOCATIONS = 0x4  # DF_TEXTREL in DT_FLAGS
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym: name, binding and type, visibility, section, value, size
_UNDEFINED = 0  # SHN_UNDEF
_GLOBAL = 1 << 4  # STB_GLOBAL in st_info
_ARCHIVE = b"!<arch>\n"
_MEMBER_HEADER = 60  # bytes; the member's size is a decimal number at 48


# pyelftools names indirect functions, such as memset, by the number that their type shares with STT_LOOS.
_KINDS = {"STT_FUNC": "function", "STT_LOOS": "function", "STT_OBJECT": "object", "STT_TLS": "tls_object"}


@dataclass(frozen=True)
class Section:
    """The place of a section: its address in memory, and its offset and size in the file, in bytes."""

    name: str
    address: int
    offset: int
    size: int


class Unreadable(Exception):
    """The file is not an ELF file of the expected kind."""


@dataclass(frozen=True)
class Symbol:
    """An undefined dynamic symbol. `version` is None where any version will do."""

    name: str
    version: str | None
    weak: bool


@dataclass(frozen=True)
class DefinedSymbol:
    """A versioned dynamic symbol that a library defines.

    `kind` is `function`, `object` or `tls_object`; `size` is in bytes.
    """

    name: str
    version: str
    kind: str
    size: int


@dataclass(frozen=True)
class SharedObject:
    """The dynamic section, symbols and flags of one shared object."""

    path: Path
    machine: str  # `x86_64`, `aarch64` or ELF's own constant
    needed: tuple[str, ...]
    run_paths: tuple[tuple[str, str], ...]  # (`DT_RPATH` or `DT_RUNPATH`, its value)
    undefined: tuple[Symbol, ...]
    exported: frozenset[str]
    # All required symbol versions, also those that no symbol needs, except the dynamic linker's own.
    versions: tuple[str, ...]
    executable_stack: bool
    text_relocations: bool

    @property
    def name(self) -> str:
        return self.path.name


def read(path: Path) -> SharedObject:
    """Read the dynamic section, symbols and flags of a shared object."""
    with _opened(path) as elf:
        return _read(path, elf)


def defined_symbols(path: Path) -> list[DefinedSymbol]:
    """Return the versioned symbols that a shared library defines; none if it has no symbol versions."""
    symbols = []
    with _opened(path) as elf:
        table = elf.get_section_by_name(".dynsym")
        versions = elf.get_section_by_name(".gnu.version")
        definitions = elf.get_section_by_name(".gnu.version_d")
        if not (
            isinstance(table, SymbolTableSection)
            and isinstance(versions, GNUVerSymSection)
            and isinstance(definitions, GNUVerDefSection)
        ):
            return []
        names = {entry["vd_ndx"]: next(iter(auxiliaries)).name for entry, auxiliaries in definitions.iter_versions()}
        for index, symbol in enumerate(table.iter_symbols()):
            if symbol["st_shndx"] in {"SHN_UNDEF", "SHN_ABS"} or not symbol.name:
                continue
            number = versions.get_symbol(index)["ndx"]
            kind = _KINDS.get(symbol["st_info"]["type"])
            if kind is None or not isinstance(number, int):
                continue
            version = names.get(number & 0x7FFF)
            if version is not None:
                symbols.append(DefinedSymbol(symbol.name, version, kind, symbol["st_size"]))
    return symbols


def constants(path: Path) -> list[bytes]:
    """Return the read-only data sections (`.rodata*`) of an ELF file.

    None of them may be compressed or overlap another: all are parts of the file.
    """
    with _opened(path) as elf:
        every = [section for section in elf.iter_sections() if section.name.startswith(".rodata")]
        kept = [section for section in every if section["sh_type"] != "SHT_NOBITS"]
        places = sorted((section["sh_offset"], section["sh_offset"] + section["sh_size"]) for section in kept)
        overlap = any(end > start for (_, end), (start, _) in pairwise(places))
        if overlap or any(section.compressed for section in kept):
            raise Unreadable(f"{path.name} has sections that are compressed or overlap")
        return [bytes(section.data()) for section in kept]


def sections(path: Path) -> list[Section]:
    """Return the places of the sections that have bytes in an ELF file."""
    with _opened(path) as elf:
        return [
            Section(section.name, section["sh_addr"], section["sh_offset"], section["sh_size"])
            for section in elf.iter_sections()
            if section["sh_type"] not in ("SHT_NULL", "SHT_NOBITS")
        ]


def without_definitions(archive: bytes, dropped: Container[str]) -> bytes:
    """Return a static library whose objects refer to the symbols in `dropped` instead of defining them.

    The code of such a symbol stays in its section, which the linker removes if nothing else is in use there. The
    library's index still has the old definitions; `ar s` makes a new one.
    """
    changed = bytearray(archive)
    for start, stop in _members(archive):
        if archive[start : start + 4] != b"\x7fELF":
            continue  # the index, or the table of long names
        table = ELFFile(io.BytesIO(archive[start:stop])).get_section_by_name(".symtab")
        if not isinstance(table, SymbolTableSection):
            continue
        if table["sh_entsize"] != _SYMBOL.size:
            raise Unreadable("the static library has objects of another machine")
        strings = table.stringtable.data()
        # Local symbols come first.
        for index in range(table["sh_info"], table.num_symbols()):
            place = start + table["sh_offset"] + index * _SYMBOL.size
            name, info, _, section, _, _ = _SYMBOL.unpack_from(archive, place)
            if section == _UNDEFINED or strings[name : strings.index(b"\0", name)].decode() not in dropped:
                continue
            _SYMBOL.pack_into(changed, place, name, _GLOBAL | info & 0xF, 0, _UNDEFINED, 0, 0)
    return bytes(changed)


def _members(archive: bytes) -> Iterator[tuple[int, int]]:
    """Yield where each member of a static library starts and ends."""
    if not archive.startswith(_ARCHIVE):
        raise Unreadable("is not a static library")
    position = len(_ARCHIVE)
    while position < len(archive):
        start = position + _MEMBER_HEADER
        try:
            stop = start + int(archive[position + 48 : position + 58])
        except ValueError as error:
            raise Unreadable(f"the static library is damaged at byte {position}") from error
        yield start, stop
        position = stop + stop % 2


@contextmanager
def _opened(path: Path) -> Iterator[ELFFile]:
    try:
        with path.open("rb") as file:
            yield ELFFile(file)
    except Unreadable:
        raise
    except Exception as error:  # pyelftools raises any for a malformed file
        raise Unreadable(f"{path.name} cannot be read as an ELF file: {error}") from error


def _read(path: Path, elf: ELFFile) -> SharedObject:
    dynamic = elf.get_section_by_name(".dynamic")
    if elf["e_type"] != "ET_DYN" or not isinstance(dynamic, DynamicSection):
        raise Unreadable(f"{path.name} is an ELF file but not a shared object")
    tags = list(dynamic.iter_tags())
    undefined, exported = _symbols(elf)
    strings = elf.get_section(dynamic["sh_link"])
    assert isinstance(strings, StringTableSection)
    texts = [(tag.entry.d_tag, strings.get_string(tag.entry.d_val)) for tag in tags if tag.entry.d_tag in _TEXTS]
    stack = [segment for segment in elf.iter_segments() if segment["p_type"] == "PT_GNU_STACK"]
    return SharedObject(
        path=path,
        machine={"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}.get(elf["e_machine"], str(elf["e_machine"])),
        needed=tuple(text for tag, text in texts if tag == "DT_NEEDED"),
        run_paths=tuple((tag, text) for tag, text in texts if tag != "DT_NEEDED"),
        undefined=tuple(sorted(undefined, key=lambda symbol: (symbol.name, symbol.version or ""))),
        exported=frozenset(exported),
        versions=tuple(sorted({version for _, version in elf_find_versioned_symbols(elf)})),
        # Without the header the kernel falls back to an executable stack.
        executable_stack=not stack or any(segment["p_flags"] & _EXECUTABLE for segment in stack),
        text_relocations=any(
            tag.entry.d_tag == "DT_TEXTREL" or (tag.entry.d_tag == "DT_FLAGS" and tag.entry.d_val & _TEXT_RELOCATIONS)
            for tag in tags
        ),
    )


def _symbols(elf: ELFFile) -> tuple[list[Symbol], set[str]]:
    """Return the undefined dynamic symbols, and the names of the exported ones."""
    undefined: list[Symbol] = []
    exported: set[str] = set()
    table = elf.get_section_by_name(".dynsym")
    needs = elf.get_section_by_name(".gnu.version_r")
    names = {}
    if isinstance(needs, GNUVerNeedSection):
        names = {version["vna_other"]: version.name for _, versions in needs.iter_versions() for version in versions}
    indices = elf.get_section_by_name(".gnu.version")
    for index, symbol in enumerate(table.iter_symbols() if isinstance(table, SymbolTableSection) else ()):
        binding = symbol["st_info"]["bind"]
        if not symbol.name or binding == "STB_LOCAL":
            continue
        if symbol["st_shndx"] == "SHN_UNDEF":
            number = indices.get_symbol(index)["ndx"] if isinstance(indices, GNUVerSymSection) else None
            version = names.get(number)
            undefined.append(Symbol(symbol.name, version, weak=binding == "STB_WEAK"))
        else:
            exported.add(symbol.name)
    return undefined, exported
