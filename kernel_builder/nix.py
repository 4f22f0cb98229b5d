"""The steps of a build as Nix runs them, one derivation for each; `nix/` drives them, docs/nix.md describes them.

    python -m kernel_builder.nix fetch|unpack|sysroot|compile|package SPEC OUT
    python -m kernel_builder.nix copy BUNDLE DIRECTORY

SPEC is a JSON file that names all inputs of the step; OUT is its output. `steps/` plans the compile steps, as
for `kernel-builder build`, so both give the same bytes. `copy` takes packages from a result of `nix build`.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kernel_builder.config import build_toml
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.steps import compile_steps, ninja_run
from kernel_builder.steps.cache import object_path, put
from kernel_builder.steps.provenance import builder_origin
from kernel_builder.toolchain import Toolchains, lock, tree_files
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.wheels import CorruptDownload
from kernel_format.errors import BuildError, FetchError, KernelBuilderError, PackageError

Spec = Mapping[str, Any]


def _jobs() -> int:
    """Return the number of processors that Nix lets a derivation use."""
    return int(os.environ.get("NIX_BUILD_CORES") or 0) or ninja_run.default_jobs()


def fetch(spec: Spec, out: Path) -> None:
    """Write the needed ranges of a pinned file, one after the other, as one file.

    Raises:
        FetchError: If the index cannot be reached, or has another file of that name.
    """
    pin = lock.load_file(spec["pin"])
    index = Index()
    with out.open("wb") as stream:
        for number, (start, stop) in enumerate(pin.ranges):
            part = Path(f"{number}.part")
            index.fetch(pin, start, stop, part, lambda done: None)
            stream.write(part.read_bytes())
            part.unlink()


def unpack(spec: Spec, out: Path) -> None:
    """Unpack a toolchain's tree from the fetched bytes of its files.

    Raises:
        FetchError: If the bytes differ from the lock.
    """
    tree = next(tree for tree in _toolchains(spec).pinned() if tree.kind == spec["kind"])
    out.mkdir()
    for pin, fetched in zip(tree.files, spec["fetched"], strict=True):
        data = tree_files.map_file(Path(fetched))
        slices, position = [], 0
        for start, stop in pin.ranges:
            slices.append(data[position : position + stop - start])
            position += stop - start
        try:
            tree_files.unpack(pin, slices, out)
        except CorruptDownload as error:
            raise FetchError(f"differs from the lock: {error}", where=pin.file) from error


def sysroot(spec: Spec, out: Path) -> None:
    """Write the libraries that packages are linked against, as a store of toolchains has them.

    Raises:
        ToolchainError: As `Toolchains.sysroot`.
    """
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


def compile_source(spec: Spec, out: Path) -> None:
    """Write the object of one source as `$out/KEY.o`.

    Raises:
        KernelBuilderError: As `compile_steps.drafts` and `ninja_run.compile_alone`.
    """
    project = build_toml.from_document(spec["build"], "build.toml", Path(os.path.realpath(spec["source"])))
    steps = compile_steps.drafts(project, Variant.parse(spec["variant"]), _toolchains(spec))
    step = next(step for step in steps if step.source == spec["file"])
    out.mkdir()
    work = Path("work").absolute()
    work.mkdir()
    ninja_run.compile_alone(step, work, out / f"{step.key}.o", _jobs())
    sys.stderr.write((work / step.key / "log").read_text(errors="replace"))


def package(spec: Spec, out: Path) -> None:
    """Write the package of one variant: compile the binding, link it with the given objects, assemble and check.

    Raises:
        PackageError: If the plan has no use for a given object: the flake and the builder plan different sources.
        KernelBuilderError: As `pipeline.build`.
    """
    from kernel_builder import pipeline  # not in the part of the builder that compile derivations have

    toolchains = _toolchains(spec)
    if "sysroot" in spec:
        shutil.copytree(spec["sysroot"], toolchains.store.root / "trees")
    directory = Path(spec["source"])
    variant = Variant.parse(spec["variant"])
    _take_objects(spec, variant, toolchains)
    provenance = {"kernel-builder": builder_origin(spec["builder"])}
    if spec["commit"]:
        provenance["kernel"] = spec["commit"]
    summary = pipeline.build(
        pipeline.BuildRequest(
            directories=(directory,),
            variants=(variant.name,),
            out=Path("packages").absolute(),
            jobs=_jobs(),
            load=False,
            provenance=provenance,
            sandbox="off",  # Nix has its own
        ),
        toolchains,
    )
    summary.raise_error()
    for title, text in summary.warnings.items():
        sys.stderr.write(f"{title}:\n{text}\n")
    shutil.copytree(Path("packages") / variant.name, out)


def _take_objects(spec: Spec, variant: Variant, toolchains: Toolchains) -> None:
    """Put the objects of the compile derivations into the cache, where the build finds them."""
    given = {path.stem: path for objects in spec["objects"] for path in Path(objects).glob("*.o")}
    if not given:
        return
    steps = compile_steps.drafts(read_project(Path(spec["source"])), variant, toolchains)
    wanted = {step.key: step for step in steps if not step.uses_namespace}
    if not given.keys() <= wanted.keys():
        titles = ", ".join(step.title for key, step in wanted.items() if key not in given)
        raise PackageError(
            f"the flake compiled something else than the plan asks for; missing are the objects of: {titles or 'none'}",
            where=variant.name,
            hint="this is a fault of the builder: nix/steps.nix and compile_steps.py disagree",
        )
    for key, path in given.items():
        copied = Path(shutil.copyfile(path, Path(f"{key}.o")))
        put(copied, object_path(toolchains.cache, wanted[key]))


def copy(bundle: Path, destination: Path) -> None:
    """Put all packages of a `nix build` result into a `build` directory at once, as `kernel-builder build` does.

    Raises:
        PackageError: If the directory cannot be written.
    """
    # Neither are these.
    from kernel_builder.package.foreign_files import check_replaced
    from kernel_builder.package.swap import publish, staging

    with staging(Path(os.path.realpath(destination))) as staged:
        for result in bundle.iterdir():
            shutil.copytree(result, staged / result.name)
            for path in [staged / result.name, *(staged / result.name).rglob("*")]:
                path.chmod(path.stat().st_mode | stat.S_IWUSR)
        check_replaced(Path(os.path.realpath(destination)), [result.name for result in bundle.iterdir()])
        publish(staged, Path(os.path.realpath(destination)))


_STEPS: Mapping[str, Callable[[Spec, Path], None]] = {
    "fetch": fetch,
    "unpack": unpack,
    "sysroot": sysroot,
    "compile": compile_source,
    "package": package,
}


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
