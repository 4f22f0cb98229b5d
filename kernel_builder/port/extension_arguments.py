"""The arguments of an extension: its sources, headers and flags in the words of `build.toml`, and what has none."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_builder.backends.cuda import CUDA
from kernel_builder.config import compiler_flags, kernel_sources
from kernel_builder.config.project import HEADER_SUFFIXES, Kernel
from kernel_builder.port.setup_calls import Unknown
from kernel_builder.port.setup_script import ExtensionCall, Remark
from kernel_format.errors import ConfigError

SOURCES = (".cc", ".cpp", ".cxx", ".cu")
HEADERS = tuple(HEADER_SUFFIXES)
_OF_METAL = (".m", ".mm", ".metal")
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)
# What the builder sets itself, or what only concerns one machine's build.
_OWN_FLAGS = {"-O3", "-O2", "-fPIC", "--threads", "-t", "-v", "-w", "--ptxas-options=-v", "-s"}
_GENCODE = re.compile(r"(?:-gencode|--generate-code)[= ]arch=compute_(\w+),code=\[?\"?(sm|compute|lto)_(\w+)")
_ARCH = re.compile(r"-{1,2}(?:arch|gpu-architecture)=(?:sm|compute)_(\w+)")
_KNOWN = {"name", "sources", "include_dirs", "define_macros", "undef_macros", "extra_compile_args", "py_limited_api"}
_WITHOUT_EFFECT = {
    "libraries": "the builder links what docs/linking.md lists, and nothing else",
    "library_dirs": "the builder links what docs/linking.md lists, and nothing else",
    "runtime_library_dirs": "the builder links what docs/linking.md lists, and nothing else",
    "extra_link_args": "the builder has link options of its own",
    "extra_objects": "a binary is made of sources only",
    "language": "the suffix of a source says its language",
}


@dataclass(frozen=True)
class PortedExtension:
    """One `[kernel.<name>]` table: an extension for one backend."""

    name: str
    backend: str
    line: int
    src: tuple[str, ...]
    headers: tuple[str, ...]
    include: tuple[str, ...]
    cxx_flags: tuple[str, ...]
    cuda_flags: tuple[str, ...]
    capabilities: tuple[str, ...]
    stable_abi: str | None


class ArgumentReader:
    """Reads the arguments of one extension; `left_out` collects what `build.toml` cannot say."""

    def __init__(self, root: Path, call: ExtensionCall) -> None:
        self.root = root
        self.call = call
        self.left_out: list[Remark] = []

    def read(self) -> PortedExtension:
        """Return the extension as a table of `build.toml`."""
        given = self.call.arguments
        for key in sorted(given.keys() - _KNOWN):
            if given[key] not in ([], {}, None):
                self._leave_out(f"{key}: {_WITHOUT_EFFECT.get(key, 'build.toml has no such key')}")
        listed = self._paths("sources", given.get("sources"), Path.is_file)
        src = tuple(path for path in listed if path.endswith(SOURCES))
        for path in listed:
            if path.endswith(_OF_METAL):
                self._leave_out(f"sources: {path!r} is for Metal, whose compiler runs on macOS only")
            elif path not in src and not path.endswith(HEADERS):
                self._leave_out(f"sources: {path!r} is no source of C++ or CUDA")
        cxx, nvcc = self._flags(given)
        cuda = self.call.backend == "cuda"
        cxx_flags, nvcc_flags = list(self._kept(cxx, "cxx")), list(self._kept(nvcc, "nvcc")) if cuda else []
        include = self._paths("include_dirs", given.get("include_dirs"), Path.is_dir)
        include = tuple(dict.fromkeys((*include, *self._directories(cxx_flags), *self._directories(nvcc_flags))))
        name = given.get("name")
        return PortedExtension(
            name=_kernel_name(name) if isinstance(name, str) else "extension",
            backend=self.call.backend,
            line=self.call.line,
            src=src,
            headers=tuple(sorted(_headers(self.root, src, include))),
            include=include,
            cxx_flags=self._allowed(cxx_flags, "cxx"),
            cuda_flags=self._allowed(nvcc_flags, "nvcc"),
            capabilities=tuple(_capabilities(nvcc)) if cuda else (),
            stable_abi=_stable_abi([*cxx, *nvcc]),
        )

    def _leave_out(self, text: str, line: int = 0) -> None:
        self.left_out.append(Remark(line or self.call.line, text))

    def _listed(self, key: str, value: Any) -> Iterator[str]:
        for item in value if isinstance(value, (list, tuple)) else [] if value is None else [value]:
            if isinstance(item, str):
                yield item
            elif isinstance(item, Unknown):
                self._leave_out(f"{key}: `{item.text}` is only known when setup.py runs", item.line)
            else:
                self._leave_out(f"{key}: {item!r} is no text")

    def _paths(self, key: str, value: Any, exists: Any) -> tuple[str, ...]:
        """Return what exists in the project, relative to it."""
        kept: dict[str, None] = {}
        for path in self._listed(key, value):
            relative = posixpath.relpath(posixpath.normpath(self.root / path), self.root)
            if relative.startswith(".."):
                self._leave_out(f"{key}: {path!r} is outside the directory of setup.py")
            elif not exists(self.root / relative):
                self._leave_out(f"{key}: there is no {relative!r}; a git submodule, or written by setup.py?")
            else:
                kept[Path(relative).as_posix()] = None
        return tuple(kept)

    def _directories(self, flags: list[str]) -> tuple[str, ...]:
        """Take the options for directories of headers out of the flags, and return those of the project."""
        options = [*kernel_sources.options(flags)]
        flags.clear()
        named: list[str] = []
        for option in options:
            if match := re.fullmatch(r"(?:-I|-isystem|--include-path=?)(.+)", "".join(option)):
                named.append(match[1])
            else:
                flags += option
        return self._paths("include_dirs", named, Path.is_dir)

    def _allowed(self, flags: Sequence[str], key: str) -> tuple[str, ...]:
        """Return the flags that `build` takes."""
        kept: list[str] = []
        for option in kernel_sources.options(flags):
            kernel = Kernel("ported", CUDA, (), (), cuda_flags=option if key == "nvcc" else ())
            try:
                compiler_flags.check(self.root, "ported", key, option if key == "cxx" else ())
                CUDA.check_flags(self.root, "ported", kernel)
            except ConfigError as error:
                self._leave_out(f"extra_compile_args[{key!r}]: {error.message}")
            else:
                kept += option
        return tuple(kept)

    def _flags(self, given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Return the flags of the C++ compiler and of nvcc, with the definitions."""
        macros = []
        for macro in given.get("define_macros") or []:
            match macro:
                case [str() as name, None]:
                    macros.append(f"-D{name}")
                case [str() as name, str() | int() as value]:
                    macros.append(f"-D{name}={value}")
                case _:
                    self._leave_out(f"define_macros: `{_shown(macro)}` is not understood")
        macros += [f"-U{name}" for name in self._listed("undef_macros", given.get("undef_macros"))]
        flags = given.get("extra_compile_args")
        if isinstance(flags, dict):
            for key in flags.keys() - {"cxx", "nvcc"}:
                self._leave_out(f"extra_compile_args: the key {key!r} is not for a compiler that the builder has")
        else:
            flags = {"cxx": flags, "nvcc": flags}
        cxx, nvcc = (list(self._listed(f"extra_compile_args[{key!r}]", flags.get(key))) for key in ("cxx", "nvcc"))
        return [*macros, *cxx], [*macros, *nvcc]

    def _kept(self, flags: Sequence[str], key: str) -> Iterator[str]:
        """Yield the flags without those that other keys say, or that the builder sets itself."""
        for option in kernel_sources.options(flags):
            word = option[0]
            if word in ("-gencode", "--generate-code") or word in _OWN_FLAGS:
                continue
            if re.match(r"-l(?!ineinfo)\w|-L|-Wl,", word):
                self._leave_out(f"extra_compile_args[{key!r}]: {word} has no effect: see docs/linking.md")
            elif not re.match(
                r"-gencode=|--generate-code|--threads=|-{1,2}(gpu-)?arch(itecture)?=|-DTORCH_TARGET_VERSION|-DPy_LIMITED_API"
                r"|-DUSE_CUDA$|-D_GLIBCXX_USE_CXX11_ABI|-DTORCH_EXTENSION_NAME",
                word,
            ):
                yield from option


def _kernel_name(module: str) -> str:
    """Return a name for messages: `scatter` for `torch_scatter.scatter`, and `xformers_C` for `xformers._C`."""
    last = module.rpartition(".")[2].strip("_")
    return re.sub(r"\W+", "_", last if len(last) > 1 else module.replace("._", ".")).strip("_")


def _shown(value: Any) -> str:
    return value.text if isinstance(value, Unknown) else repr(value)


def _capabilities(flags: Sequence[str]) -> Iterator[str]:
    """Yield the capabilities that options of nvcc name, in the form of `build.toml`."""
    words = " ".join(flags)
    with_ptx: dict[str, bool] = {}
    for arch, kind, code in _GENCODE.findall(words):
        number = code if kind == "sm" else arch
        with_ptx[number] = with_ptx.get(number, False) or kind == "compute"
    for number in _ARCH.findall(words):
        with_ptx.setdefault(number, True)
    for number, ptx in with_ptx.items():
        if match := re.fullmatch(r"(\d+)(\d)([af]?)", number):
            yield f"{match[1]}.{match[2]}{match[3]}" + ("+PTX" if ptx and not match[3] else "")


def _stable_abi(flags: Sequence[str]) -> str | None:
    """Return the release that `TORCH_TARGET_VERSION` names, if it does."""
    for flag in flags:
        if match := re.fullmatch(r"-DTORCH_TARGET_VERSION=(0x[0-9a-fA-F]{16})(?:ULL|UL)?", flag):
            number = int(match[1], 16)
            return f"{number >> 56}.{number >> 48 & 0xFF}"
    return None


def _headers(root: Path, src: Iterable[str], include: Sequence[str]) -> set[str]:
    """Return the project's headers that sources include, directly or through others."""
    headers: set[str] = set()
    waiting = list(src)
    while waiting:
        current = waiting.pop()
        for name in _INCLUDE.findall((root / current).read_bytes()):
            for directory in (str(Path(current).parent), *include, "csrc"):
                path = posixpath.normpath(posixpath.join(directory, name.decode(errors="replace")))
                if path.startswith("..") or posixpath.isabs(path) or not (root / path).is_file():
                    continue
                if path not in headers:
                    headers.add(path)
                    waiting.append(path)
                break
    return headers - set(src)
