"""The back ends that `build.toml` and the names of variants may say, found by name.

A back end is a value in a file of its own, in `kernel_builder/backends/` or in a package that registers it under the
entry point group `kernel_builder.backends`. Both are named here as `module:value` and imported when they are first
asked for, so this module depends on none of them.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from kernel_format.errors import ToolchainError
from kernel_format.release import Release

if TYPE_CHECKING:
    from kernel_builder.config.project import Kernel, Project, TorchNoarch
    from kernel_builder.config.toml_schema import Key

GROUP = "kernel_builder.backends"

_RECOGNISED = "kernel_builder.backends.recognised"
_BUILT_IN: Mapping[str, str] = {
    "cann": f"{_RECOGNISED}:CANN",
    "cpu": "kernel_builder.backends.cpu:CPU",
    "cuda": "kernel_builder.backends.cuda:CUDA",
    "metal": f"{_RECOGNISED}:METAL",
    "neuron": f"{_RECOGNISED}:NEURON",
    "rocm": "kernel_builder.backends.rocm:ROCM",
    "tpu": f"{_RECOGNISED}:TPU",
    "xpu": f"{_RECOGNISED}:XPU",
}
# Back ends that the builder compiles for. Entry points are not looked up for these: that takes 60 ms.
COMPILED = ("cpu", "cuda", "rocm")
NAMES = tuple(_BUILT_IN)


@dataclass(frozen=True, kw_only=True, eq=False)
class Backend:
    """What `build.toml` and the names of variants say of a back end.

    A value of this class alone is a back end that the builder recognises and does not compile for. Those that it
    compiles for are of `backends.CompiledBackend`.

    Attributes:
        name: As `build.toml` writes it.
        title: What messages and tables call it, such as `CUDA`.
        prefix: How names of variants begin to write it, before the digits of its release: `cu`, for `cu130`. None for
            a back end without releases, which its name stands for.
        suffixes: Endings of sources that its own compiler compiles, besides those of C++.
        kernel_keys: The keys of a `[kernel.<name>]` table besides those of all back ends; None if it can have none.
        noarch_keys: The keys of `[torch-noarch]` that are its own, which the public parser spells with underscores.
        general_keys: The keys of `[general.<name>]` besides `python-depends`.
        python_depends: Packages that a kernel may import besides those of all back ends; None if `[general]` has no
            table for it.
        kernel_depends: Whether `[general.<name>]` may list other kernels.
        has_archs: Whether the metadata of its binaries lists architectures.
        dispatch_key: With which Torch dispatches to its ops, such as `CUDA`; empty if the checks know of none.
        in_every_torch: Whether each build of Torch has it. Where Torch has another one too, the client loads packages
            for it on request only.
        torch_version: The name in `torch.version` whose value is None in builds of Torch without it; empty for none.
        preference: Of the variants that a machine can load, which to develop and test: those of the highest.
        platforms: The platforms that it is on, as names of variants write them; empty for all.
        why_not: Why the builder does not compile for it.
    """

    compiles: ClassVar[bool] = False

    name: str
    title: str
    prefix: str | None = None
    suffixes: frozenset[str] = frozenset()
    kernel_keys: Mapping[str, Key] | None = None
    noarch_keys: Mapping[str, Key] = field(default_factory=dict)
    general_keys: Mapping[str, Key] = field(default_factory=dict)
    python_depends: tuple[str, ...] | None = None
    kernel_depends: bool = False
    has_archs: bool = False
    dispatch_key: str = ""
    in_every_torch: bool = False
    torch_version: str = ""
    preference: int = 0
    platforms: tuple[str, ...] = ()
    why_not: str = ""

    def why_not_compiled(self, project: Project) -> str:
        """Return why the builder does not compile a project for it, or nothing if it does."""
        return self.why_not

    def spelled(self, release: Release | None) -> str:
        """Return the back end and its release as names of variants write them."""
        return f"{self.prefix}{release.digits}" if release else self.name

    def torch_index(self, release: Release | None) -> str:
        """Return what PyTorch's own package index calls its builds of Torch for a release."""
        return self.spelled(release)

    def is_spelled(self, text: str) -> bool:
        """Return whether names of variants write the back end as `text`."""
        return re.fullmatch(rf"{self.prefix}\d\d+", text) is not None if self.prefix else text == self.name

    def release_of(self, text: str) -> Release | None:
        """Return the release in a text that `is_spelled`: the last digit is the minor."""
        digits = text.removeprefix(self.prefix or text)
        return Release(int(digits[:-1]), int(digits[-1])) if digits else None

    def published(self) -> Mapping[Release, Sequence[Release | None]]:
        """Return Torch release -> the releases of the back end that it is published for; None for one without."""
        return {}

    def releases(self) -> Sequence[Release | None]:
        """Return every release of the back end that it can be compiled for, ascending."""
        return ()

    def allowed(self, project: Project, releases: Sequence[Release | None]) -> Sequence[Release | None]:
        """Return the releases that the project's own settings allow."""
        return releases

    def forbids(self, release: Release | None) -> str:
        """Return what says that the settings of a project do not allow a release."""
        return f"the project rules out {self.title} {release}"

    def representative(self, releases: Sequence[Release | None]) -> Sequence[Release | None]:
        """Return the releases whose binaries on the stable ABI serve all of these, by default each of them."""
        return releases

    def can_load(self, built: Release | None, release: Release | None) -> bool:
        """Return whether a Torch for a release loads a binary for another one; None is a package for any."""
        return built is None or built == release

    def runs_with(self, release: Release) -> str:
        """Return the releases that a client may have to load a binary for this one, for tables."""
        return str(release)

    def serves(self, kernel: Kernel, release: Release | None) -> bool:
        """Return whether a kernel is for a release."""
        return True

    def notes(self, kernel: Kernel) -> Iterator[str]:
        """Yield what the author of a `[kernel.<name>]` table should know of it."""
        return iter(())

    def limited(self, kernel: Kernel, only: tuple[str, ...]) -> Kernel:
        """Return a kernel that is compiled for some architectures only, or as it is if it has no others.

        Args:
            only: Architectures of any back end.
        """
        return replace(kernel, only_capabilities=tuple(arch for arch in only if arch in self.known_archs()))

    def known_archs(self) -> Sequence[str]:
        """Return the architectures that a build can be limited to, ascending."""
        return ()

    def current_archs(self) -> tuple[str, ...]:
        """Return the architecture of the device that Torch uses, to compile for it alone; empty to compile for all."""
        return ()

    def is_present(self) -> bool:
        """Return whether this machine has the hardware, as far as the builder can tell."""
        return self.compiles

    def noarch_archs(self, framework: TorchNoarch) -> tuple[str, ...] | None:
        """Return the architectures that a Python-only project declares, or None."""
        return None


def find(name: str) -> Backend | None:
    """Return the back end of this name, or None.

    One that is registered replaces one that is recognised only.

    Raises:
        ToolchainError: If a registered back end cannot be imported.
    """
    place = (None if name in COMPILED else _registered().get(name)) or _BUILT_IN.get(name)
    return _load(place) if place else None


def get(name: str) -> Backend:
    """Return the back end of a name that has been checked."""
    backend = find(name)
    assert backend, name
    return backend


def named(variant: str) -> Backend | None:
    """Return the back end that the name of a variant says, also one that the builder does not compile for."""
    parts = variant.split("-")
    known = next(
        (known for known in of_format() if known.name in parts or any(map(known.is_spelled, parts))),
        None,
    )
    return get(known.name) if known else None


def names(mentioned: Iterable[object] = ()) -> tuple[str, ...]:
    """Return the names of all back ends, sorted; registered ones only if a name is mentioned that is not built in."""
    has_others = any(isinstance(name, str) and name not in _BUILT_IN for name in mentioned)
    return tuple(sorted({*NAMES, *_registered()})) if has_others else NAMES


def of_format(mentioned: Collection[object] = ()) -> tuple[Backend, ...]:
    """Return the back ends of these `names`. One that replaces a built-in one is among them only if it is mentioned."""
    return tuple(
        get(name) if name in mentioned or name not in _BUILT_IN else _load(_BUILT_IN[name]) for name in names(mentioned)
    )


def compiled_for() -> Iterator[Backend]:
    """Yield the back ends that the builder compiles for, registered ones last: they are looked up only if reached."""
    yield from map(get, COMPILED)
    yield from (backend for name in sorted(_registered()) if name not in COMPILED and (backend := get(name)).compiles)


@cache
def _registered() -> Mapping[str, str]:
    from importlib.metadata import entry_points  # takes 25 ms, and most projects name no such back end

    return {point.name: point.value for point in entry_points(group=GROUP)}


@cache
def _load(place: str) -> Backend:
    module, _, value = place.partition(":")
    try:
        backend = getattr(importlib.import_module(module), value)
        if not isinstance(backend, Backend):
            raise TypeError(f"{value} is {backend!r}, and not a Backend")
        return backend
    except Exception as error:  # of whatever package
        raise ToolchainError(
            f"this back end cannot be imported: {error}",
            where=f"entry point {place} of {GROUP}",
            hint="install the package that registers it again, or uninstall it",
        ) from error
