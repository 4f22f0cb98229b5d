"""The steps of a build as Nix runs them, one derivation for each; `nix/` drives them, docs/nix.md describes them.

    python -m kernel_builder.nix fetch|unpack|sysroot|package SPEC OUT
    python -m kernel_builder.nix copy BUNDLE DIRECTORY

SPEC is a JSON file that names all inputs of the step; OUT is its output. `copy` takes packages from a result of
`nix build`.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_builder import pipeline
from kernel_builder.package.swap import check_replaced, publish, staging
from kernel_builder.steps.ninja_run import default_jobs
from kernel_builder.steps.provenance import builder_origin
from kernel_builder.toolchain import Toolchains, archives, lock
from kernel_builder.toolchain.index import Index
from kernel_format.errors import BuildError, KernelBuilderError

Spec = Mapping[str, Any]


def fetch(spec: Spec, out: Path) -> None:
    """Write the needed ranges of a pinned file, one after the other, as one file."""
    Index().fetch(lock.load_file(spec["pin"]), out)


def unpack(spec: Spec, out: Path) -> None:
    """Unpack a toolchain's tree from the fetched bytes of its files."""
    tree = next(tree for tree in _toolchains(spec).pinned() if tree.kind == spec["kind"])
    out.mkdir()
    for pin, fetched in zip(tree.files, spec["fetched"], strict=True):
        archives.unpack(pin, Path(fetched), out)


def sysroot(spec: Spec, out: Path) -> None:
    """Write the libraries that packages are linked against, as a store of toolchains has them."""
    toolchains = _toolchains(spec)
    toolchains.sysroot()
    shutil.copytree(toolchains.store.root / "trees", out, symlinks=True)


def _toolchains(spec: Spec) -> Toolchains:
    """Return the toolchains that a step is given, and no others."""
    return Toolchains(
        cache=Path("cache").absolute(),
        offline=True,
        pinned=lock.loads(json.dumps(spec["lock"]), "the flake's lock"),
        given={kind: Path(path) for kind, path in spec.get("trees", {}).items()},
    )


def package(spec: Spec, out: Path) -> None:
    """Write the package of one variant."""
    toolchains = _toolchains(spec)
    if "sysroot" in spec:
        shutil.copytree(spec["sysroot"], toolchains.store.root / "trees")
    provenance = {"kernel-builder": builder_origin(spec["builder"])}
    if spec["commit"]:
        provenance["kernel"] = spec["commit"]
    summary = pipeline.build(
        pipeline.BuildRequest(
            directories=(Path(spec["source"]),),
            variants=(spec["variant"],),
            out=Path("packages").absolute(),
            jobs=int(os.environ.get("NIX_BUILD_CORES") or 0) or default_jobs(),
            load=False,
            provenance=provenance,
            sandbox="off",  # Nix has its own
        ),
        toolchains,
    )
    summary.raise_error()
    for title, text in summary.warnings.items():
        sys.stderr.write(f"{title}:\n{text}\n")
    shutil.copytree(Path("packages") / spec["variant"], out)


def copy(bundle: Path, destination: Path) -> None:
    """Put all packages of a `nix build` result into a `build` directory at once, as `kernel-builder build` does."""
    build = Path(os.path.realpath(destination))
    with staging(build) as staged:
        for result in bundle.iterdir():
            shutil.copytree(result, staged / result.name)
            for path in [staged / result.name, *(staged / result.name).rglob("*")]:
                path.chmod(path.stat().st_mode | stat.S_IWUSR)
        check_replaced(build, [result.name for result in bundle.iterdir()])
        publish(staged, build)


_STEPS = {step.__name__: step for step in (fetch, unpack, sysroot, package)}


def main() -> int:
    """Run the step that the arguments name."""
    _, name, given, out = sys.argv
    try:
        if name == "copy":
            copy(Path(given), Path(out))
        else:
            _STEPS[name](json.loads(Path(given).read_text()), Path(out))
    except KernelBuilderError as error:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, BuildError):
            print(f"  command: {error.command}\n{error.output}", file=sys.stderr)
        if error.hint:
            print(f"  hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
