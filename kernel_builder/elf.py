"""What the dynamic linker sees of a shared object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

_TEXTS = ("DT_NEEDED", "DT_RPATH", "DT_RUNPATH")
_EXECUTABLE = 0x1  # PF_X in a program header's flags
_TEXT_RELOCATIONS = 0x4  # DF_TEXTREL in DT_FLAGS


class Unreadable(Exception):
    """A file is not an ELF shared object."""


@dataclass(frozen=True)
class Symbol:
    """A name that the shared object leaves for others to define. `version` is None where it takes any."""

    name: str
    version: str | None
    weak: bool


@dataclass(frozen=True)
class SharedObject:
    """The dynamic section, symbols and flags of one shared object.

    `machine` is `x86_64`, `aarch64` or ELF's own constant. `versions` are all symbol versions asked for, also those
    that no symbol needs, apart from the dynamic linker's own.
    """

    path: Path
    machine: str
    needed: tuple[str, ...]
    run_paths: tuple[tuple[str, str], ...]
    undefined: tuple[Symbol, ...]
    exported: frozenset[str]
    versions: tuple[str, ...]
    executable_stack: bool
    text_relocations: bool

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name


def read(path: Path) -> SharedObject:
    """Read a shared object.

    Raises:
        Unreadable: If `path` is not one.
    """
    from elftools.common.exceptions import ELFError
    from elftools.construct import ConstructError
    from elftools.elf.elffile import ELFFile

    try:
        with path.open("rb") as file:
            return _read(path, ELFFile(file))
    except (OSError, ELFError, ConstructError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path.name} cannot be read as an ELF file: {error}") from error


def _read(path: Path, elf: ELFFile) -> SharedObject:
    from auditwheel.elfutils import elf_find_versioned_symbols
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.sections import StringTableSection

    dynamic = elf.get_section_by_name(".dynamic")
    if elf["e_type"] != "ET_DYN" or not isinstance(dynamic, DynamicSection):
        raise Unreadable(f"{path.name} is an ELF file but not a shared object")
    tags = list(dynamic.iter_tags())
    undefined: list[Symbol] = []
    exported: set[str] = set()
    for symbol in _symbols(elf):
        if isinstance(symbol, Symbol):
            undefined.append(symbol)
        else:
            exported.add(symbol)
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


def _symbols(elf: ELFFile) -> Iterator[Symbol | str]:
    """The undefined dynamic symbols as `Symbol`, the exported ones by name."""
    from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
    from elftools.elf.sections import SymbolTableSection

    table = elf.get_section_by_name(".dynsym")
    if not isinstance(table, SymbolTableSection):
        return
    needs = elf.get_section_by_name(".gnu.version_r")
    names = {}
    if isinstance(needs, GNUVerNeedSection):
        names = {version["vna_other"]: version.name for _, versions in needs.iter_versions() for version in versions}
    indices = elf.get_section_by_name(".gnu.version")
    for index, symbol in enumerate(table.iter_symbols()):
        binding = symbol["st_info"]["bind"]
        if not symbol.name or binding == "STB_LOCAL":
            continue
        if symbol["st_shndx"] != "SHN_UNDEF":
            yield symbol.name
            continue
        version = None
        if isinstance(indices, GNUVerSymSection):
            version = names.get(indices.get_symbol(index)["ndx"])
        yield Symbol(symbol.name, version, weak=binding == "STB_WEAK")
