"""A recorded extension as a `[kernel.<name>]` table of `build.toml`, and the arguments that the table cannot have."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.backends.cuda import CUDA
from kernel_builder.config import compiler_flags, known_backends
from kernel_builder.config.project import HEADER_SUFFIXES, Kernel
from kernel_builder.port.setup_runs import SetupRun
from kernel_builder.steps import include_scan
from kernel_format.errors import ConfigError

SOURCES = (".cc", ".cpp", ".cxx", ".cu")
_HEADERS = tuple(HEADER_SUFFIXES)
# Options that the builder sets itself, or that only concern one machine's build.
_OWN_FLAGS = re.compile(
    r"-O[23]|-fPIC|-t[ \d]*|--threads([= ].*)?|-v|-w|-s|--ptxas-options=-v|-DTORCH_(EXTENSION_NAME|API_INCLUDE).*"
    r"|--?std=(c|gnu)\+\+(11|14|17)|-D_GLIBCXX_USE_CXX11_ABI.*|-DPy_LIMITED_API.*|-DUSE_CUDA"
)
_GENCODE = re.compile(r"(?:-gencode|--generate-code)[= ]?arch=compute_(\w+),code=(.*)")
_ARCH = re.compile(r"-{1,2}(?:arch|gpu-architecture)=(?:sm|compute)_(\w+)")
_TARGET = re.compile(r"-DTORCH_TARGET_VERSION=(0x[0-9a-fA-F]{16})(?:ULL|UL)?")
_READ = {"name", "sources", "include_dirs", "define_macros", "undef_macros", "extra_compile_args", "py_limited_api"}
_WITHOUT_KEY = toml_file.read(Path(__file__).with_name("rewrites.toml"))["without-key"]


@dataclass(frozen=True)
class Remark:
    """A message about a line of a file, by default of setup.py."""

    line: int
    text: str
    path: str = "setup.py"

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


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
    targets: tuple[str, ...]  # Torch releases


@dataclass
class TableReader:
    """Converts one extension."""

    root: Path
    run: SetupRun
    extension: Mapping[str, Any]
    backend: str
    left_out: list[Remark]  # collects the arguments that the table does not have
    has_other: bool  # whether the extension has a table for another backend too
    _own: dict[str, None] = field(default_factory=dict)
    _capabilities: dict[str, bool] = field(default_factory=dict)
    _targets: dict[str, None] = field(default_factory=dict)

    def read(self) -> PortedExtension:
        """Return the extension as a table of `build.toml`."""
        given: Mapping[str, Any] = self.extension["arguments"]
        name = given["name"] if isinstance(given["name"], str) else "extension"
        for key in sorted(given.keys() - _READ):
            if given[key] not in ([], {}, None, ""):
                reason = _WITHOUT_KEY.get(key, "build.toml has no such key")
                self._leave_out(f"{key} = {_shown(given[key])}: {reason}")
        if given.get("py_limited_api"):
            self._own["py_limited_api"] = None
        src = self._sources(given["sources"])
        macros = [*self._macros(given["define_macros"])]
        macros += [f"-U{name}" for name in self._texts("undef_macros", given["undef_macros"])]
        flags = given["extra_compile_args"]
        flags = flags if isinstance(flags, dict) else {"cxx": flags, "nvcc": flags}
        for key in sorted(flags.keys() - {"cxx", "nvcc"}):
            self._leave_out(f"extra_compile_args[{key!r}] = {_shown(flags[key])}: the builder has no such compiler")
        include = [*self._paths("include_dirs", given["include_dirs"], Path.is_dir)]
        cxx = self._flags("cxx", [*macros, *self._texts("extra_compile_args", flags.get("cxx"))], include)
        nvcc: tuple[str, ...] = ()
        if self.backend == "cuda":
            nvcc = self._flags("nvcc", [*macros, *self._texts("extra_compile_args", flags.get("nvcc"))], include)
        elif flags is given["extra_compile_args"] and flags.get("nvcc") and not self.has_other:
            self._leave_out(f"extra_compile_args['nvcc'] = {_shown(flags['nvcc'])}: there are no CUDA sources")
        # Torch adds the capabilities of the variable only to flags without any.
        for architecture in () if self._capabilities else filter(None, re.split("[ ;,]+", self.run.architectures)):
            number, _, ptx = architecture.partition("+")
            self._capabilities.setdefault(number.replace(".", ""), bool(ptx))
        if self._own:
            self._leave_out(f"{', '.join(self._own)}: set by the builder, or without effect on the binary")
        return PortedExtension(
            name=table_name(name),
            backend=self.backend,
            line=int(self.extension["line"]),
            src=src,
            headers=tuple(sorted({path for source in src for path in self._headers(source, include)})),
            include=tuple(dict.fromkeys(include)),
            cxx_flags=cxx,
            cuda_flags=nvcc,
            capabilities=tuple(self._named_capabilities()) if self.backend == "cuda" else (),
            targets=tuple(self._targets),
        )

    def _leave_out(self, text: str) -> None:
        self.left_out.append(Remark(int(self.extension["line"]), text))

    def _texts(self, key: str, value: Any) -> Iterator[str]:
        for item in value if isinstance(value, (list, tuple)) else [value] if value else []:
            if isinstance(item, str) and "<unknown " not in item:
                yield item
            else:
                self._leave_out(f"{key}: {_shown(item)} has no value here")

    def _sources(self, value: Any) -> tuple[str, ...]:
        listed = list(self._paths("sources", value, Path.is_file))
        for path in listed:
            if path.endswith((".m", ".mm", ".metal")):
                self._leave_out(f"sources: {path!r} is for Metal, whose compiler runs on macOS only")
            elif not path.endswith((*SOURCES, *_HEADERS)):
                self._leave_out(f"sources: {path!r} is not a C++ or CUDA source")
        return tuple(path for path in listed if path.endswith(SOURCES))

    def _headers(self, source: str, include: Sequence[str]) -> Iterator[str]:
        """Yield the project's headers that a source includes, directly or through others."""
        try:
            reached = include_scan.scan(self.root, source, (*include, "csrc")).files
        except ConfigError as error:
            self._leave_out(f"sources: {error}")
            return
        yield from (path for path, _ in reached if path.endswith(_HEADERS))

    def _paths(self, key: str, value: Any, exists: Any) -> Iterator[str]:
        """Yield the existing paths of a value, relative to the project."""
        for path in dict.fromkeys(self._texts(key, value)):
            relative = posixpath.normpath(path)
            if relative.startswith(("CUDA_HOME", "TORCH")):
                self._own[f"{key} {relative}"] = None
            elif relative.startswith(("..", "/")):
                self._leave_out(f"{key}: {relative!r} is outside the directory of setup.py")
            elif not exists(self.root / relative):
                self._leave_out(f"{key}: there is no {relative!r}; a git submodule, or written by setup.py?")
            else:
                yield relative

    def _macros(self, value: Any) -> Iterator[str]:
        for macro in value if isinstance(value, list) else [value]:
            match macro:
                case [str() as name] | [str() as name, None]:
                    yield f"-D{name}"
                case [str() as name, str() | int() as defined]:
                    yield f"-D{name}={defined}"
                case _:
                    self._leave_out(f"define_macros: {_shown(macro)} is not a pair of a name and a value")

    def _flags(self, key: str, flags: Sequence[str], include: list[str]) -> tuple[str, ...]:
        """Return the flags that `build` takes. Others become capabilities, a Torch release, or include directories."""
        kept: list[str] = []
        for option in compiler_flags.options(flags):
            text = " ".join(option)
            if directory := re.fullmatch(r"(?:-I|-isystem|--include-path=?) ?(.+)", text):
                include += self._paths("include_dirs", [directory[1]], Path.is_dir)
            elif target := _TARGET.fullmatch(text):
                number = int(target[1], 16)
                self._targets[f"{number >> 56}.{number >> 48 & 0xFF}"] = None
            elif _OWN_FLAGS.fullmatch(text):
                self._own[text] = None
            elif not self._is_architecture(text) and self._is_allowed(key, option):
                kept += option
        return tuple(kept)

    def _is_architecture(self, option: str) -> bool:
        if match := _GENCODE.fullmatch(option):
            for kind, number in re.findall(r"(sm|compute|lto)_(\w+)", match[2]):
                self._capabilities[number] = self._capabilities.get(number, False) or kind == "compute"
        elif match := _ARCH.fullmatch(option):
            self._capabilities.setdefault(match[1], True)
        return match is not None

    def _is_allowed(self, key: str, option: Sequence[str]) -> bool:
        try:
            if re.match(r"-l(?!ineinfo)\w", option[0]):
                raise ConfigError(_WITHOUT_KEY["libraries"])
            compiler_flags.check(self.root, "ported", key, option if key == "cxx" else ())
            nvcc = tuple(option) if key == "nvcc" else ()
            CUDA.check_flags(self.root, "ported", Kernel("ported", known_backends.get("cuda"), (), (), cuda_flags=nvcc))
        except ConfigError as error:
            self._leave_out(f"extra_compile_args[{key!r}] {_shown(option)}: {error.message}")
            return False
        return True

    def _named_capabilities(self) -> Iterator[str]:
        for number, ptx in self._capabilities.items():
            if match := re.fullmatch(r"(\d+)(\d)([af]?)", number):
                yield f"{match[1]}.{match[2]}{match[3]}" + ("+PTX" if ptx and not match[3] else "")
            else:
                self._leave_out(f"the architecture {number} is not a CUDA capability")


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def table_name(module: str) -> str:
    """Return a name for messages: `scatter` for `torch_scatter.scatter`, and `xformers_C` for `xformers._C`."""
    last = module.rpartition(".")[2].strip("_")
    return re.sub(r"\W+", "_", last if len(last) > 1 else module.replace("._", ".")).strip("_") or "extension"
