"""Check that the package loads with the public client, in a fresh process, on this machine."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kernel_builder.checks.findings import CheckedPackage, Finding, NotApplicable
from kernel_builder.checks.probe_process import SECONDS, ProbeProcess
from kernel_builder.checks.python_rules import always_present, imported_roots
from kernel_builder.checks.torch_build import may_load
from kernel_builder.config import known_backends
from kernel_builder.config.variant import Variant, this_platform
from kernel_format.errors import VariantError
from kernel_format.metadata import PackageMetadata


@dataclass(frozen=True)
class Loaders:
    """The processes that load packages, and the kernels that packages may depend on.

    Attributes:
        probe: The process for this machine's platform; None for a new one.
        cross_probe: A process of the other platform, by emulation, that loads its packages; None to skip these.
        others: Packages of kernels that these may depend on, by repository, beside those that the client finds.
    """

    probe: ProbeProcess | None = None
    cross_probe: ProbeProcess | None = None
    others: Mapping[str, Sequence[Path]] = field(default_factory=dict)


def check_load(package: CheckedPackage) -> Iterator[Finding]:
    variant = package.variant
    if variant is None:
        raise NotApplicable(f"{package.directory.name!r} is not a variant's name")
    if not _is_complete(package.directory):
        raise NotApplicable("the package is not complete")
    assert package.load_answers is not None
    answer = package.load_answers().get(str(package.directory))
    if answer is None:
        if variant.platform in (None, this_platform()):
            raise NotApplicable(f"this machine's Torch has no {variant.backend.title}")
        raise NotApplicable(
            f"the variant is for {variant.platform}, this machine is {this_platform()}: "
            "`check-builds --cross-python` loads it"
        )
    text = answer["text"]
    if answer["outcome"] == "skipped":
        raise NotApplicable(text)
    if answer["outcome"] == "failed":
        foreign = _foreign(package, answer.get("missing", ()))
        if foreign:
            raise NotApplicable(f"this machine has no {', '.join(foreign)}, which the package imports")
        yield Finding(f"the client cannot load the package: {text}", _hint(text), path="__init__.py")


def _foreign(package: CheckedPackage, missing: Sequence[str]) -> list[str]:
    """Return the missing modules that are not the package's own.

    Whether users have them is a question for the check `python-imports`.
    """
    others = always_present() | imported_roots(package)
    roots = {name.partition(".")[0] for name in missing}
    return sorted(roots & others)


def _is_complete(directory: Path) -> bool:
    return PackageMetadata.read(directory) is not None and (directory / "__init__.py").is_file()


@contextmanager
def loading(directories: Sequence[Path], loaders: Loaders) -> Iterator[Callable[[], Mapping[str, Mapping[str, Any]]]]:
    """Start to load packages that are complete and for a machine that may load them, each in a process of its own.

    One process imports Torch for all of a platform. That takes seconds, in which the other checks run.

    Yields:
        A function that waits for the answers. An answer has, by directory, the `outcome` (`loaded`, `skipped` or
        `failed`), a `text`, and where they apply the modules that this machine lacks (`missing`).
    """
    started = []
    variants = {path: variant for path in directories if (variant := _variant(path)) and _is_complete(path)}
    here = [path for path, variant in variants.items() if may_load(variant)]
    elsewhere = [path for path, variant in variants.items() if variant.platform not in (None, this_platform())]
    for process, group in ((loaders.probe, here), (loaders.cross_probe, elsewhere)):
        if process and group:
            seen = {directory: process.show([directory]) / directory.name for directory in group}
            local = {repo_id: str(process.show(packages)) for repo_id, packages in loaders.others.items() if packages}
            wanted = json.dumps({str(copy): asked_for(directory.name) for directory, copy in seen.items()})
            started.append((process.ask("load", str(SECONDS), json.dumps(local), wanted), seen))

    @cache
    def answers() -> Mapping[str, Mapping[str, Any]]:
        outcomes: dict[str, Mapping[str, Any]] = {}
        for wait, seen in started:
            answer = wait(SECONDS * (len(seen) + 1))
            for directory, copy in seen.items():
                if isinstance(answer, dict):
                    text = answer[str(copy)]["text"].replace(str(copy), str(directory))
                    outcomes[str(directory)] = {**answer[str(copy)], "text": text}
                else:
                    outcomes[str(directory)] = {"outcome": answer[0], "text": answer[1]}
        return outcomes

    yield answers


def asked_for(variant: str) -> tuple[str | None, str]:
    """Return the back end to ask the client for, None for the one that it selects itself, and the ops' dispatch key."""
    backend = known_backends.named(variant)
    if backend is None:
        return None, ""
    return backend.name if backend.in_every_torch else None, backend.dispatch_key


def _variant(directory: Path) -> Variant | None:
    """Return the variant that a directory is named after; None if it is none."""
    try:
        return Variant.parse(directory.name)
    except VariantError:
        return None


def rejections(variants: Sequence[str], python: str = sys.executable) -> Mapping[str, str | None]:
    """Return why the client would reject each variant on this machine, or None if it would not.

    One process answers for all variants, since importing Torch takes seconds. Answers are kept.

    Args:
        python: The interpreter whose client and Torch are asked.
    """
    known = _known_rejections(python)
    if unknown := {variant: asked_for(variant)[0] for variant in variants if variant not in known}:
        with ProbeProcess(python) as process:
            answer = process.ask("fits", json.dumps(unknown))(SECONDS)
        failed = dict.fromkeys(unknown, f"the client cannot be asked: {answer[1]}") if isinstance(answer, tuple) else {}
        known |= failed or answer
    return known


@cache
def _known_rejections(python: str) -> dict[str, str | None]:
    """Return the answers of an interpreter so far."""
    return {}


# The message of a failed load -> the hint.
_HINTS = (
    ("undefined symbol", "add the source that defines the symbol to `src` in build.toml"),
    ("FileNotFoundError", "add the ending of the file to `pyext` in build.toml: the package has only these files"),
    (r"not compiled with CUDA|No CUDA GPUs|NVIDIA driver", "ask for the device in the function that needs it"),
    (r"Tried to register an operator \(", "define the op once, in C++ or in Python, and give it one fake"),
    ("no answer after", "look at code that runs when the package is imported: it waits, or computes for too long"),
    ("was killed by", "look at code that runs at load: static initializers, and schemas and keys of registered ops"),
    ("", "run `python -m kernel_builder.checks.probe load DIR` on the package to see the full message"),
)


def _hint(text: str) -> str:
    return next(hint for pattern, hint in _HINTS if re.search(pattern, text))
