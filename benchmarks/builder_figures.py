"""The builder's figures: downloads, steps, caches, reproducible bytes and load time.

Each figure is a function that measures values, and after it a function that computes the figure's row from them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from builder_runs import JOBS, CompletedRun, Workspace
from counting_index import CountingIndex
from figures import Figure, Measured, Row, Values, summary
from torch_extension_build import compare_with_torch_extension, sources_of, torch_extension_row

from kernel_builder.backends.cuda import CUDA, toolkits
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.toolchain import Toolchains
from kernel_format.tree_digest import hash_tree

REPEATS = 10


def measure_downloads(workspace: Workspace) -> Measured:
    """Count the bytes from the package index for a build with an empty cache."""
    cache = workspace.root / "caches" / "bare"
    project = workspace.project("bare")
    with CountingIndex() as index:
        done = workspace.build(cache, project, environment={"PIP_INDEX_URL": index.url})
        received = dict(index.received)
        workspace.run(cache, "toolchain", "fetch", "--cuda", "13.2", "--index-url", index.url)
        total = sum(received.values())
        more = sum(index.received.values()) - total
    values = {"bytes": total, "received": received, "more-with-all": more}
    return Measured((done.command.replace(index.url, "URL"),), values)


def downloads_row(values: Values) -> Row:
    return Row(
        "downloaded for all `cuda`, `cpu` and `rocm` variants of a stable-ABI project, with an empty cache",
        "at most 160 MB",
        f"{values['bytes'] / 1e6:.1f} MB",
        values["bytes"] <= 160e6,
        f"Counted by an index on loopback that forwards to the configured one; index pages are included. `--all` "
        f"downloads the compiler of CUDA 13.2 as well, another {values['more-with-all'] / 1e6:.1f} MB.",
    )


def measure_compile_steps(workspace: Workspace) -> Measured:
    """Count the compile steps of the whole matrix."""
    root, done = workspace.matrix_build
    project = read_project(root)
    names = [package["variant"] for package in done.result["packages"]]
    toolchains = Toolchains()
    compilers = {
        (variant.platform, variant.backend.name, *_cuda_kinds(toolchains, variant))
        for variant in map(Variant.parse, names)
    }
    expected = sum(len(sources_of(project, backend)) for _, backend, *_ in compilers)
    values = {
        "compiles": done.result["compiles"],
        "expected": expected,
        "variants": names,
        "platforms": len({platform for platform, *_ in compilers}),
        "pairs": sum(map(len, CUDA.published().values())),
        "cpu-seconds": done.cpu_seconds,
    }
    return Measured((done.command,), values)


def _cuda_kinds(toolchains: Toolchains, variant: Variant) -> tuple[str, ...]:
    if variant.backend is not CUDA:
        return ()
    assert variant.release
    return toolkits.components(toolchains, variant.release)


def compile_steps_row(values: Values) -> Row:
    return Row(
        "compile steps for rmsnorm over the whole matrix, CUDA 12 and Arm included",
        f"{values['expected']}: one for each source file, platform, backend and CUDA compiler",
        f"{values['compiles']}, for {len(values['variants'])} variants; {values['cpu-seconds']:.0f} s of CPU time",
        values["compiles"] == values["expected"],
        f"`torch.utils.cpp_extension` builds once for each of the {values['pairs']} pairs of a Torch and a CUDA "
        f"release, on each of the {values['platforms']} platforms; **cpp-extension** says how long one takes.",
    )


def measure_further_torch(workspace: Workspace) -> Measured:
    """Build a full-ABI project for one Torch release, then for another one with the same cache."""
    project, cache = workspace.project("further", "full-scale"), workspace.cache("further")

    def build(torch: str) -> CompletedRun:
        variants = (f"--variant=torch{torch}-cxx11-{backend}-x86_64-linux" for backend in ("cpu", "cu130"))
        return workspace.build(cache, project, *variants, "--no-load")

    first, further = build("213"), build("215")
    return Measured((first.command, further.command), {"first": first.steps, "further": further.steps})


def further_torch_row(values: Values) -> Row:
    links, compiles = _links_and_compiles(values["further"])
    return Row(
        "steps for one more Torch release, project on the full C++ ABI",
        "for each backend: the binding's compile and the link",
        f"{len(compiles)} compiles, {len(links)} links",
        len(compiles) == 2 and all(map(_is_binding, compiles)),
        "The project is tests/projects/full-scale. Its device code does not include Torch's headers.",
    )


def _links_and_compiles(steps: list[str]) -> tuple[list[str], list[str]]:
    links = [step for step in steps if step.startswith("link ")]
    return links, [step for step in steps if step not in links]


def _is_binding(step: str) -> bool:
    return "/torch_binding.cpp " in step


def measure_nothing_changed(workspace: Workspace) -> Measured:
    """Build an up-to-date project again."""
    project, cache, _ = workspace.first_build
    runs = [workspace.run(cache, "build", project) for _ in range(REPEATS)]
    values = {
        "seconds": summary([run.seconds for run in runs]),
        "cpu-seconds": summary([run.cpu_seconds for run in runs]),
    }
    return Measured((runs[0].command,), values)


def nothing_changed_row(values: Values) -> Row:
    seconds = values["seconds"]["median"]
    return Row(
        "wall time of `kernel-builder build`, nothing changed",
        "at most 0.25 s",
        f"{seconds:.2f} s",
        seconds <= 0.25,
        f"Median of {values['seconds']['n']} processes, startup included.",
    )


def measure_one_source(workspace: Workspace) -> Measured:
    """Change one source of several, and build again."""
    built, cache, _ = workspace.first_build
    project = Path(shutil.copytree(built, workspace.root / "changed" / built.name))
    source = sources_of(read_project(project), "cuda")[-1]
    with (project / source).open("a") as stream:
        stream.write("// Changed.\n")
    # Each compiler of device code compiles the source; the figure is that of one.
    done = workspace.build(cache, project, "--backend", "cuda", "--cuda-compiler", "nvcc")
    if not any(f"/{source} " in step for step in done.steps):
        raise RuntimeError(f"{source} changed and was not compiled: {done.steps}")
    return Measured((done.command,), {"steps": done.steps, "cpu-seconds": done.cpu_seconds})


def one_source_row(values: Values) -> Row:
    """Return the row. The binding is compiled again if it names the op namespace, which is a hash of all sources."""
    links, compiles = _links_and_compiles(values["steps"])
    bindings = [step for step in compiles if _is_binding(step)]
    return Row(
        "steps after a change to one source",
        "its compile, the binding's compile, and the link",
        f"{len(values['steps'])} steps: {', '.join(values['steps'])}",
        len(links) == 1 and len(bindings) <= 1 and len(compiles) - len(bindings) == 1,
        "A comment is added to the last CUDA source of rmsnorm.",
    )


def measure_warm_cache(workspace: Workspace) -> Measured:
    """Build another checkout with the cache of the first build."""
    _, cache, cold = workspace.first_build
    warm = workspace.build(cache, workspace.project("checkout"))
    values = {"cold-cpu-seconds": cold.cpu_seconds, "warm-cpu-seconds": warm.cpu_seconds, "steps": warm.steps}
    return Measured((cold.command, warm.command), values)


def warm_cache_row(values: Values) -> Row:
    return _share_row(
        "clean checkout, warm builder cache",
        values,
        "The remaining time assembles, checks and loads the packages.",
    )


def _share_row(title: str, values: Values, note: str) -> Row:
    warm, cold = values["warm-cpu-seconds"], values["cold-cpu-seconds"]
    return Row(
        f"{title}: share of the cold build's CPU time",
        "at most 10%",
        f"{warm / cold:.1%}: {warm:.1f} s of {cold:.1f} s",
        warm <= 0.1 * cold,
        note,
    )


def differing_bytes(first: Path, second: Path) -> int:
    """Count the bytes at which two files differ, including bytes that only the longer one has."""
    left, right = first.read_bytes(), second.read_bytes()
    if left == right:
        return 0
    return abs(len(left) - len(right)) + sum(a != b for a, b in zip(left, right, strict=False))


def measure_equal_bytes(workspace: Workspace) -> Measured:
    """Build every variant twice under different conditions, and compare all files."""
    first, done = workspace.matrix_build
    second = workspace.project("elsewhere/and deeper")
    again = workspace.build(
        workspace.cache("another"),
        second,
        "--all",
        "--platform",
        "all",
        "--no-load",
        jobs=4 * JOBS,
        environment={"TZ": "Asia/Tokyo", "LC_ALL": "C"},
    )
    trees = [hash_tree(root / "build").files for root in (first, second)]
    names = sorted(trees[0].keys() & trees[1].keys())
    pairs = {name: (first / "build" / name, second / "build" / name) for name in names}
    values = {
        "files": len(names),
        "bytes": sum(built.stat().st_size for built, _ in pairs.values()),
        "differ": {name: count for name, pair in pairs.items() if (count := differing_bytes(*pair))},
        "only-in-one": sorted(trees[0].keys() ^ trees[1].keys()),
    }
    return Measured((done.command, again.command), values)


def equal_bytes_row(values: Values) -> Row:
    return Row(
        "two builds of every variant: different directory, cache, job count and locale",
        "0 bytes differ",
        f"{sum(values['differ'].values())} of {values['bytes'] / 1e6:.1f} MB differ",
        not values["differ"] and not values["only-in-one"],
        f"{values['files']} files.",
    )


_LOAD = """
import sys, time
from pathlib import Path
import torch
import kernels
times = [time.perf_counter()]
for _ in range(2):
    kernels.get_local_kernel(Path(sys.argv[1]), backend="cpu")
    times.append(time.perf_counter())
print(*(end - start for start, end in zip(times, times[1:])))
"""


def measure_load_time(workspace: Workspace) -> Measured:
    """Load a built kernel twice in each of several fresh processes."""
    project = workspace.first_build[0]
    first_loads, second_loads = [], []
    for _ in range(REPEATS):
        command = [sys.executable, "-c", _LOAD, str(project)]
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            raise RuntimeError(done.stderr)
        first, second = (float(word) * 1e3 for word in done.stdout.split())
        first_loads.append(first)
        second_loads.append(second)
    values = {"milliseconds": summary(first_loads), "second-milliseconds": summary(second_loads)}
    return Measured(('get_local_kernel(Path("kernels/rmsnorm"), backend="cpu")',), values)


def load_time_row(values: Values) -> Row:
    median = values["milliseconds"]["median"]
    return Row(
        "wall time of `get_local_kernel` after `import torch` and `import kernels` (CPU variant)",
        "at most 50 ms",
        f"{median:.0f} ms; {values['second-milliseconds']['median']:.1f} ms for the second call",
        median <= 50,
        f"Median of {values['milliseconds']['n']} processes.",
    )


FIGURES: dict[str, Figure[Workspace]] = {
    "downloads": Figure(measure_downloads, downloads_row),
    "compile-steps": Figure(measure_compile_steps, compile_steps_row),
    "further-torch": Figure(measure_further_torch, further_torch_row),
    "nothing-changed": Figure(measure_nothing_changed, nothing_changed_row),
    "one-source": Figure(measure_one_source, one_source_row),
    "warm-cache": Figure(measure_warm_cache, warm_cache_row),
    "cpp-extension": Figure(compare_with_torch_extension, torch_extension_row),
    "equal-bytes": Figure(measure_equal_bytes, equal_bytes_row),
    "load-time": Figure(measure_load_time, load_time_row),
}
