"""Whether a variant loads in an environment by the rules of the public client, and the changes that make it load.

The client decides for the environment that it runs in; this module also decides for others, and without importing
Torch, which takes seconds.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from kernel_builder.backends.cuda.releases import runs_on
from kernel_builder.config import known_backends
from kernel_builder.config.project import Backend
from kernel_builder.version import first_line, installed
from kernel_format.metadata import PackageMetadata
from kernel_format.release import Release
from kernel_format.variant import FullAbi, Noarch, StableAbi, TvmFfiAbi, Variant, this_platform

_FRAMEWORKS = (StableAbi, FullAbi, TvmFfiAbi, Noarch)  # the client's order


@dataclass(frozen=True)
class Environment:
    """The properties of an environment that decide which variants load in it.

    Attributes:
        torch: The release of Torch; None without Torch.
        backend: The back end that Torch was built for.
        release: The release of the back end, such as CUDA's.
        capability: The compute capability of the first NVIDIA GPU; None without one.
        tvm_ffi: The release of TVM FFI; None without it.
        limited_api: Whether this Python loads modules of the limited API.
        transformers: The release of transformers, and the releases of the client that it accepts; None without it.
    """

    python: str
    platform: str
    torch: Release | None
    backend: Backend
    release: Release | None
    capability: str | None
    kernels: str
    limited_api: bool = True
    tvm_ffi: Release | None = None
    transformers: tuple[str, str] | None = None

    @property
    def text(self) -> str:
        """The environment in one line."""
        torch = (
            f"Torch {self.torch} for {self.backend.title} {self.release or ''}".strip() if self.torch else "no Torch"
        )
        gpu = f"GPU of capability {self.capability}" if self.capability else "no NVIDIA GPU"
        transformers = f", transformers {self.transformers[0]}" if self.transformers else ""
        return f"Python {self.python}, {torch}, {gpu}, kernels {self.kernels}{transformers}, {self.platform}"

    @property
    def client_conflict(self) -> str | None:
        """The requirement of transformers that the installed client does not meet; None if there is none."""
        if self.transformers is None:
            return None
        _, accepted = self.transformers
        return None if Requirement(accepted).specifier.contains(self.kernels, prereleases=True) else accepted


@cache
def this_environment() -> Environment:
    """Return the environment of this process, and of the Torch that is installed beside the builder."""
    known = torch_versions()
    found = next((name for name in ("cuda", "hip", "xpu") if known.get(name)), "cpu")
    return Environment(
        python=platform.python_version(),
        platform=this_platform(),
        torch=_release(known.get("__version__")),
        backend=known_backends.get("rocm" if found == "hip" else found),
        release=_release(known.get(found)),
        capability=first_line("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"),
        kernels=importlib.metadata.version("kernels"),
        limited_api=sys.version_info >= (3, 15) or not sysconfig.get_config_var("Py_GIL_DISABLED"),
        tvm_ffi=_release(installed("apache-tvm-ffi")),
        transformers=_transformers(),
    )


@cache
def torch_versions() -> Mapping[str, object]:
    """Return the values of `torch.version`, such as `cuda`, read from its file; none without Torch."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if file is None or not file.is_file():
        return {}
    values: dict[str, object] = {}
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign([ast.Name(name)], ast.Constant(value)):
                values[name] = value
            case ast.AnnAssign(ast.Name(name), _, ast.Constant(value)):
                values[name] = value
    return values


def _release(version: object) -> Release | None:
    match = re.match(r"(\d+)\.(\d+)", str(version))
    return Release(int(match[1]), int(match[2])) if match else None


def _transformers() -> tuple[str, str] | None:
    version = installed("transformers")
    needed = map(Requirement, importlib.metadata.requires("transformers") or ()) if version else ()
    return next(((str(version), f"{e.name}{e.specifier}") for e in needed if e.name == "kernels"), None)


def choose(variants: Iterable[Variant], environment: Environment) -> Variant | None:
    """Return the variant that the client selects by its name, or None."""
    fitting = [variant for variant in variants if not list(_by_name(variant, environment))]
    return min(fitting, key=preference, default=None)


def may_load(variant: Variant) -> bool:
    """Return whether a variant is for this machine's platform and for a back end that its Torch does not lack.

    The client decides about the rest.
    """
    backend = known_backends.get(variant.backend.name)
    is_lacking = torch_versions().get(backend.torch_version, "not stated") is None
    return variant.platform in (None, this_platform()) and not is_lacking


def loads(variant: Variant, environment: Environment) -> bool:
    """Return whether the client loads a variant by its name, if it is asked for the variant's back end."""
    backend = known_backends.get(variant.backend.name)
    if backend.in_every_torch:
        environment = replace(environment, backend=backend, release=None)
    return not list(_by_name(variant, environment))


def preference(variant: Variant) -> tuple[object, ...]:
    """Return the key by which the client orders the variants that fit, best first."""
    release = Release(0, 0) if isinstance(variant.framework, Noarch) else variant.framework.release
    newest = tuple(-number for number in (*release, *(variant.release or ())))
    return _FRAMEWORKS.index(type(variant.framework)), newest, variant.name


def changes(variant: Variant, metadata: PackageMetadata, environment: Environment) -> tuple[str, ...]:
    """Return the changes of the environment that make a variant load; empty if it does."""
    return (*_by_name(variant, environment), *_by_metadata(variant, metadata, environment))


def _by_name(variant: Variant, environment: Environment) -> Iterator[str]:
    if variant.platform not in (None, environment.platform):
        yield f"a machine with {variant.platform}"
    if variant.platform and not environment.limited_api:
        yield "Python 3.15, or one that is not free-threaded"
    framework = _framework_change(variant, environment)
    backend, release = known_backends.get(variant.backend.name), variant.release
    fits = backend is environment.backend and (release is None or backend.can_load(release, environment.release))
    title = f"{backend.title} {backend.runs_with(release) if release else ''}".strip()
    if not fits and not framework and backend.name == "cpu":
        yield 'get_kernel(..., backend="cpu")'
    elif framework or not fits:
        yield f"{framework or 'Torch'}{'' if fits else f' for {title}'}"


def _framework_change(variant: Variant, environment: Environment) -> str:
    match variant.framework:
        case FullAbi(release) if release != environment.torch:
            return f"Torch {release}"
        case StableAbi(release) if environment.torch is None or environment.torch < release:
            return f"Torch {release} or later"
        case TvmFfiAbi(release) if release != environment.tvm_ffi:
            return f"TVM FFI {release}"
    return ""


def _by_metadata(variant: Variant, metadata: PackageMetadata, environment: Environment) -> Iterator[str]:
    if metadata.kernels_minver and Version(environment.kernels) < Version(metadata.kernels_minver):
        yield f"kernels {metadata.kernels_minver} or later"
    capability = environment.capability if variant.backend.name == "cuda" and metadata.archs else None
    if capability and not any(runs_on(arch, capability) for arch in metadata.archs):
        yield f"a GPU of another capability than {capability}: there is code for {', '.join(metadata.archs)}"
