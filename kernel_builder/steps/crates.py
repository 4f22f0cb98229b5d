"""The step of a `rust-cpu` kernel: cargo builds the crate's static library, and the linker makes one object of it.

cargo sees the crate's files and those downloaded crates that Cargo.lock names, and has no network. Build scripts and
procedural macros run like compilers, in the sandbox.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from kernel_builder import toml_file
from kernel_builder.backends.host_code import Compiler, token
from kernel_builder.backends.tools import HostCompiler, Obstacle
from kernel_builder.config import build_toml
from kernel_builder.config.project import Kernel, Project
from kernel_builder.config.project_files import check_link
from kernel_builder.config.toml_schema import TomlPlace
from kernel_builder.config.variant import Variant, this_platform
from kernel_builder.probe_cache import output_of
from kernel_builder.steps.graph import RECIPE, CompileStep, digest
from kernel_format.errors import ConfigError
from kernel_sandbox.programs import find_program

CARGO = Compiler(
    "cargo",
    to_assembler=None,
    portable=False,  # build scripts and procedural macros may read the system's files
    hint="correct the crate; a build has no network, so if a dependency is missing, run `cargo fetch` in the project, "
    "or vendor the crates: docs/build-toml.md, Rust",
)
_MANIFEST, _LOCK, _CONFIG = "Cargo.toml", "Cargo.lock", ".cargo/config.toml"
_INSTALL = (
    "install Rust 1.64 or newer, with `cargo` and `rustc` on PATH (https://rustup.rs; Debian 13, Ubuntu 24.04: "
    "`apt-get install cargo`)"
)
_TOOLCHAIN = token("rust")
_LOCKED = r'name = "([\w-]+)"\nversion = "([\w.+-]+)"\nsource = "[^"]*"\nchecksum = "(\w+)"'  # a registry's crate
# Arguments of `crate`: the toolchain, the manifest, the library's name, g++, the directory of cargo's cache or nothing,
# and the directory of Python's programs, in which the build script of the crate `tvm-ffi` looks for one. The wrapper
# `rustc` maps the step's directory out of the crates' paths; in RUSTFLAGS, it would change the names of symbols.
_TEMPLATES = Path(__file__).parents[1] / "templates/rust"


@dataclass(frozen=True)
class Rust:
    """The user's Rust toolchain."""

    root: Path  # the directory with its programs and its standard library
    version: str  # of rustc, for example `rustc 1.95.0 (59807616e 2026-04-14)`
    identity: str  # the versions of its programs


def obstacle(variant: Variant) -> Obstacle | None:
    """Return why crates cannot be built here for a variant, or None. Uses no network."""
    if variant.platform != this_platform():
        return Obstacle(
            f"its Rust crate is built for this machine's platform only, and this is {this_platform()}",
            f"build this variant on {variant.platform}",
        )
    return None if toolchain() else Obstacle("its kernel is a Rust crate, and there is no Rust on PATH", _INSTALL)


def step(project: Project, kernel: Kernel, host: HostCompiler, title: str) -> CompileStep:
    """Return the step that makes an object of a crate."""
    rust = toolchain()
    assert rust is not None, "`obstacle` reports it"
    assert kernel.cargo_manifest is not None
    hashed = {name: hashlib.sha256((project.root / name).read_bytes()).hexdigest() for name in files(project, kernel)}
    home = Path(os.environ.get("CARGO_HOME", "~/.cargo")).expanduser()
    caches = {token(f"cargo-{number}"): path for number, path in enumerate(_cached(project, kernel, home))}
    generated = {f"{name}.sh": (_TEMPLATES / name).read_text() for name in ("crate", "rustc")}
    own = [_library(project, kernel), kernel.cargo_manifest]
    return CompileStep(
        key=digest("crate", RECIPE, own, rust.identity, host.identity, hashed, generated),
        project=project.root,
        source=kernel.cargo_manifest,
        compiler=CARGO,
        argv=(
            "./crate.sh",
            _TOOLCHAIN,
            *reversed(own),
            str(host.path),
            str(home) if caches else "",
            str(Path(sys.executable).parent),
        ),
        roots={_TOOLCHAIN: rust.root, **caches},
        files=tuple(hashed.items()),
        generated=generated,
        headers=(),
        uses_namespace=False,
        title=f"{project.name}/{kernel.cargo_manifest} ({title})",
    )


@cache
def toolchain() -> Rust | None:
    """Return the toolchain of the `rustc` on PATH, which may be rustup's, or None."""
    program = find_program("rustc")
    if program is None:
        return None
    root = Path(output_of(Path(program), "--print", "sysroot", hint=_INSTALL) or "/none")
    programs = [root / "bin" / name for name in ("rustc", "cargo")]
    if not all(path.is_file() for path in programs):
        return None
    versions = [output_of(path, "-vV", hint=_INSTALL) for path in programs]
    return Rust(root, versions[0].partition("\n")[0], digest(versions))


def _library(project: Project, kernel: Kernel) -> str:
    """Return the name of a crate's library, as rustc spells it."""
    where = project.root / str(kernel.cargo_manifest)
    manifest: dict[str, Any] = toml_file.read(where)
    try:
        name = str(manifest["package"]["name"])
        return str(manifest.get("lib", {}).get("name", name)).replace("-", "_")
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(
            "has no [package] with a `name`, so there is no crate to build",
            where=str(where),
            hint="name the crate's own Cargo.toml as `cargo-manifest`, not the workspace's",
        ) from None


def files(project: Project, kernel: Kernel) -> list[str]:
    """Return the files of a step: `src`, the files that configure cargo, and vendored crates.

    Raises:
        ConfigError: If cargo cannot build the crate without a network, by the look of its files.
    """
    _library(project, kernel)
    manifest = PurePosixPath(str(kernel.cargo_manifest))
    found = [manifest.as_posix(), *kernel.src]
    configuring = [parent / name for parent in manifest.parents for name in (_MANIFEST, _LOCK)]
    # cargo runs in the project's directory, and reads the configuration there.
    found += [name for name in (*map(str, configuring), _CONFIG) if (project.root / name).is_file()]
    if not any(PurePosixPath(name).name == _LOCK for name in found):
        raise ConfigError(
            f"there is no {_LOCK} beside it or above it in the project",
            where=str(project.root / manifest),
            hint=f"run `cargo generate-lockfile --manifest-path {manifest}`, and commit the file",
        )
    if _CONFIG in found:
        found += _vendored(project.root)
    for name in found:
        check_link(project.root, project.root / name, name, str(project.root / name))
    return sorted(set(found))


def _cached(project: Project, kernel: Kernel, home: Path) -> list[Path]:
    """Return the parts of cargo's cache for the crates whose contents Cargo.lock names: others may be private."""
    found: set[Path] = set()
    for lock in (project.root / above / _LOCK for above in PurePosixPath(str(kernel.cargo_manifest)).parents):
        text = lock.read_text(errors="replace") if lock.is_file() else ""
        for name, version, checksum in re.findall(_LOCKED, text):
            for crate in home.glob(f"registry/cache/*/{name}-{version}.crate"):
                if hashlib.sha256(crate.read_bytes()).hexdigest() == checksum:
                    registry = crate.parent.name
                    parts = f"cache/{registry}/{crate.name}", f"src/{registry}/{crate.stem}", f"index/{registry}"
                    found |= {home / "registry" / part for part in parts}
    return sorted(path for path in found if path.exists())


def _vendored(root: Path) -> Iterator[str]:
    """Yield the files of the directories of crates that the project's configuration of cargo names."""
    sources = toml_file.read(root / _CONFIG).get("source")
    for name, source in sources.items() if isinstance(sources, dict) else ():
        if isinstance(source, dict) and "directory" in source:
            place = TomlPlace(str(root / _CONFIG), f"source.{name}", "directory")
            directory = root / build_toml.inner_path(source["directory"], place)
            yield from (path.relative_to(root).as_posix() for path in directory.rglob("*") if path.is_file())
