"""The steps of a build as Nix runs them: one derivation for each, driven by `nix/` and described in docs/nix.md.

    python -m kernel_builder.nix fetch|unpack|compile|package SPEC OUT

    python -m kernel_builder.nix copy BUNDLE DIRECTORY

SPEC is a JSON file that names everything that the step may use; OUT is what it makes. What to compile and how is
decided by `plan`, as for `kernel-builder build`, so that both give the same bytes. `copy` is for what has been built.
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

from kernel_builder.build import ninja_run, plan
from kernel_builder.config import build_toml
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.errors import BuildError, FetchError, KernelBuilderError, PackageError
from kernel_builder.toolchain import Toolchains, lock, wheel_trees
from kernel_builder.toolchain.wheels import CorruptWheel

Spec = Mapping[str, Any]


def _jobs() -> int:
    """Processors that Nix lets a derivation use."""
    return int(os.environ.get("NIX_BUILD_CORES") or 0) or ninja_run.default_jobs()


def fetch(spec: Spec, out: Path) -> None:
    """The bytes of a pinned wheel that are needed, one range after the other, as one file.

    Raises:
        FetchError: If the index cannot be reached, or has another file under the wheel's name.
    """
    from kernel_builder.toolchain.index import Index

    wheel = lock.load_wheel(spec["wheel"])
    index = Index()
    with out.open("wb") as stream:
        for number, (start, stop) in enumerate(wheel.ranges):
            part = Path(f"{number}.part")
            index.fetch(wheel, start, stop, part, lambda done: None)
            stream.write(part.read_bytes())
            part.unlink()


def unpack(spec: Spec, out: Path) -> None:
    """A toolchain's tree, from the fetched bytes of its wheels.

    Raises:
        FetchError: If they are not what the lock pins.
    """
    tree = next(tree for tree in _toolchains(spec).pinned() if tree.kind == spec["kind"])
    out.mkdir()
    for wheel, fetched in zip(tree.wheels, spec["fetched"], strict=True):
        data = wheel_trees.map_file(Path(fetched))
        slices, position = [], 0
        for start, stop in wheel.ranges:
            slices.append(data[position : position + stop - start])
            position += stop - start
        try:
            wheel_trees.unpack(tree, wheel, slices, out)
        except CorruptWheel as error:
            raise FetchError(f"is not what the lock pins: {error}", where=wheel.file) from error


def _toolchains(spec: Spec) -> Toolchains:
    """Exactly the toolchains that a step is given."""
    return Toolchains(
        cache=Path("cache").absolute(),
        cuda_home=Path(spec["cudaHome"]) if spec.get("cudaHome") else None,
        offline=True,
        pinned=lock.loads(json.dumps(spec["lock"]), "the flake's lock"),
        given={kind: Path(path) for kind, path in spec.get("trees", {}).items()},
    )


def compile_source(spec: Spec, out: Path) -> None:
    """The object of one source, as `$out/KEY.o`, or none where it cannot be made before the op namespace is known.

    Raises:
        KernelBuilderError: As `plan.compiles` and `ninja_run.compile_alone`.
    """
    project = build_toml.from_document(spec["build"], "build.toml", Path(os.path.realpath(spec["source"])))
    steps = plan.compiles(project, Variant.parse(spec["variant"]), _toolchains(spec))
    step = next(step for step in steps if step.source == spec["file"])
    out.mkdir()
    if not plan.needs_namespace(step):
        work = Path("work").absolute()
        work.mkdir()
        ninja_run.compile_alone(step, work, out / f"{step.key}.o", _jobs())
        sys.stderr.write((work / step.key / "log").read_text(errors="replace"))


def package(spec: Spec, out: Path) -> None:
    """One variant: its binary linked from the objects of the compile steps, its package assembled and checked.

    Objects that hold the op namespace where the link cannot replace it are compiled here.

    Raises:
        PackageError: If an object given is none of the plan's: flake and builder disagree on what to compile.
        KernelBuilderError: As `pipeline.build`.
    """
    from kernel_builder import pipeline
    from kernel_builder.package.assembly import builder_origin

    toolchains = _toolchains(spec)
    directory = Path(spec["source"])
    variant = Variant.parse(spec["variant"])
    wanted: dict[str, plan.Compile] = {}
    if variant.platform is not None:
        drafts = plan.compiles(read_project(directory), variant, toolchains)
        wanted = {step.key: step for step in drafts if not plan.needs_namespace(step)}
    given = {path.stem: path for objects in spec["objects"] for path in Path(objects).glob("*.o")}
    if given.keys() != wanted.keys():
        titles = ", ".join(step.title for key, step in wanted.items() if key not in given)
        raise PackageError(
            f"the flake gives other objects than the plan asks for; it lacks those of: {titles or 'none'}",
            where=variant.name,
            hint="this is a fault of the builder: nix/sources.nix does not see what sources.py sees",
        )
    for key, path in given.items():
        target = ninja_run.object_path(toolchains.cache, wanted[key])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    provenance = {"kernel-builder": builder_origin(spec["builder"])}
    if spec["commit"]:
        provenance["kernel"] = spec["commit"]
    summary = pipeline.build(
        pipeline.Request(
            directories=(directory,),
            variants=(variant.name,),
            out=Path("packages").absolute(),
            jobs=_jobs(),
            load=False,
            provenance=provenance,
        ),
        toolchains,
    )
    for title, text in summary.warnings.items():
        sys.stderr.write(f"{title}:\n{text}\n")
    shutil.copytree(Path("packages") / variant.name, out)


def copy(bundle: Path, destination: Path) -> None:
    """Put all packages of a result of `nix build` into a `build` directory, at once, as `kernel-builder build` does.

    Raises:
        PackageError: If the directory cannot be written.
    """
    from kernel_builder.package.assembly import publish, staging

    with staging(Path(os.path.realpath(destination))) as staged:
        for result in bundle.iterdir():
            shutil.copytree(result, staged / result.name)
            for path in [staged / result.name, *(staged / result.name).rglob("*")]:
                path.chmod(path.stat().st_mode | stat.S_IWUSR)
        publish(staged, Path(os.path.realpath(destination)), replace_all=[])


_STEPS: Mapping[str, Callable[[Spec, Path], None]] = {
    "fetch": fetch,
    "unpack": unpack,
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
