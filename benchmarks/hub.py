"""Measures the Hub server for docs/hub-figures.md, by the public clients over loopback.

    .venv/bin/python benchmarks/hub.py --json benchmarks/results/hub.json --markdown docs/hub-figures.md

Server and clients share this machine's cores. The large files are random bytes, which do not compress.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from figures import (
    Figure,
    FiguresPage,
    Measured,
    Row,
    Values,
    children_cpu_seconds,
    machine,
    measure,
    options,
    summary,
    write_page,
)
from hub_process import HubProcess, running_hub
from kernels_data import Digest, DigestAlgorithm

MB = 1_000_000
KERNEL = "kernels-community/twice"
BINARY = 20 * MB
BINARIES = 100
BINARY_OF_MANY = 2 * MB
CLIENTS = 64
HUGE = 2000 * MB
MEMORY = 150 * MB
REPEATS = 5


def write_kernel(directory: Path, size: int) -> Path:
    """Write a Python kernel with one large file of `size` bytes, and return the directory of its variant."""
    variant = directory / "build" / "torch-cpu"
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text("def twice(x):\n    return x * 2\n\n\n__all__ = ['twice']\n")
    write_random(variant / "table.so", size)
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    described = {
        "id": "_twice",
        "name": "twice",
        "version": 1,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
        "digest": {"algorithm": "sha256", "files": dict(digest.files)},
    }
    (variant / "metadata.json").write_text(json.dumps(described))
    return variant


def write_random(path: Path, size: int) -> None:
    """Write a file of random bytes in blocks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for start in range(0, size, 1 << 24):
            file.write(os.urandom(min(1 << 24, size - start)))


OPTIONS = ("--trust", "kernels-community", "--log-level", "warning")


def client(hub: HubProcess, home: Path, code: str, **environment: str) -> dict[str, Any]:
    """Run a program that uses the clients in a fresh process, and return the JSON object that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=hub.client_environment(home, **environment),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


PUBLISH = """
import json, time
from huggingface_hub import HfApi
api = HfApi()
api.create_repo("{repo}", repo_type="kernel", exist_ok=True)
api.create_branch("{repo}", branch="v1", repo_type="kernel", exist_ok=True)
began = time.perf_counter()
api.upload_folder(repo_id="{repo}", repo_type="kernel", revision="v1", folder_path="{folder}")
print(json.dumps({{"seconds": time.perf_counter() - began}}))
"""

LOAD = """
import json, time, torch, kernels
began = time.perf_counter()
kernels.get_kernel("{repo}", version=1)
print(json.dumps({{"seconds": time.perf_counter() - began}}))
"""


def measure_first_load(directory: Path) -> Measured:
    """Measure `get_kernel` with an empty cache, and a copy of the same files."""
    variant = write_kernel(directory / "kernel", BINARY)
    loads, copies = [], []
    with running_hub(directory / "hub", *OPTIONS) as hub:
        client(hub, directory / "publisher", PUBLISH.format(repo=KERNEL, folder=directory / "kernel"))
        for number in range(REPEATS):
            loads.append(client(hub, directory / f"home-{number}", LOAD.format(repo=KERNEL))["seconds"])
            began = time.perf_counter()
            shutil.copytree(variant, directory / f"copy-{number}")
            copies.append(time.perf_counter() - began)
    return Measured(
        (f"HF_ENDPOINT=URL python -c 'get_kernel(\"{KERNEL}\", version=1)'", "cp -r build/torch-cpu COPY"),
        {"load-seconds": summary(loads), "copy-seconds": summary(copies), "bytes": BINARY},
    )


def first_load_row(values: Values) -> Row:
    load, copy = values["load-seconds"]["median"], values["copy-seconds"]["median"]
    return Row(
        f"first `get_kernel` of a {values['bytes'] // MB} MB kernel in a fresh process, and a plain copy of its files",
        "",
        f"{load * 1000:.0f} ms; copy {copy * 1000:.0f} ms",
        note=f"Median of {values['load-seconds']['n']} runs, each with an empty client cache. Importing torch and "
        "kernels is not counted.",
    )


def measure_publish(directory: Path) -> Measured:
    """Measure an upload of many binaries, and the same upload again without changes."""
    for number in range(BINARIES):
        write_random(directory / "kernel" / "build" / f"variant-{number:03}" / "kernel.abi3.so", BINARY_OF_MANY)
    taken = {}
    with running_hub(directory / "hub", *OPTIONS) as hub:
        for transfer, disabled in (("xet", "0"), ("lfs", "1")):
            code = PUBLISH.format(repo=f"{KERNEL}-{transfer}", folder=directory / "kernel")
            for when in ("first", "again"):
                taken[f"{transfer}-{when}-seconds"] = client(
                    hub, directory / transfer, code, HF_HUB_DISABLE_XET=disabled
                )["seconds"]
    values = {**taken, "bytes": BINARIES * BINARY_OF_MANY}
    return Measured(("HfApi().upload_folder(repo_type='kernel', revision='v1', …)",), values)


def publish_row(values: Values) -> Row:
    return Row(
        f"publish a package of {BINARIES} binaries, {values['bytes'] // MB} MB, in one commit",
        "",
        f"{values['xet-first-seconds']:.1f} s by Xet, {values['lfs-first-seconds']:.1f} s by LFS; unchanged, "
        f"{values['xet-again-seconds']:.2f} s and {values['lfs-again-seconds']:.2f} s",
        note="`huggingface_hub` alone, without the checks of `kernel-builder upload`.",
    )


def _load_at_once(home: str, barrier: Any, results: Any) -> None:
    from huggingface_hub import constants

    constants.HF_HUB_CACHE = home  # an empty cache for each client
    import kernels

    barrier.wait()
    began = time.perf_counter()
    try:
        kernels.get_kernel(KERNEL, version=1)
        results.put(time.perf_counter() - began)
    except Exception as error:
        results.put(repr(error))


def measure_at_once(directory: Path) -> Measured:
    """Measure many clients that load the same kernel at once, each with an empty cache."""
    write_kernel(directory / "kernel", BINARY // 10)
    with running_hub(directory / "hub", *OPTIONS) as hub:
        client(hub, directory / "publisher", PUBLISH.format(repo=KERNEL, folder=directory / "kernel"))
        # The clients are forks of a process that has imported everything, so that only the load is measured.
        os.environ.update(HF_ENDPOINT=hub.url, HF_HUB_DISABLE_PROGRESS_BARS="1")
        import kernels  # noqa: F401
        import torch  # noqa: F401

        fork = multiprocessing.get_context("fork")
        barrier, results = fork.Barrier(CLIENTS), fork.SimpleQueue()
        clients = [
            fork.Process(target=_load_at_once, args=(str(directory / f"home-{number}"), barrier, results))
            for number in range(CLIENTS)
        ]
        before, theirs = hub.cpu_seconds(), children_cpu_seconds()
        for process in clients:
            process.start()
        ended = [results.get() for _ in clients]
        used, most = hub.cpu_seconds() - before, hub.peak_bytes()
        for process in clients:
            process.join()
        theirs = children_cpu_seconds() - theirs
    seconds = sorted(result for result in ended if not isinstance(result, str))
    values = {
        "seconds": {**summary(seconds), "p99": seconds[round(0.99 * (len(seconds) - 1))]} if seconds else {"n": 0},
        "failed": [result for result in ended if isinstance(result, str)],
        "server-processor-seconds": used,
        "clients-processor-seconds": theirs,
        "server-peak-bytes": most,
    }
    return Measured((f'get_kernel("{KERNEL}", version=1) in {CLIENTS} processes, each with an empty cache',), values)


def at_once_row(values: Values) -> Row:
    taken, failed = values["seconds"], values["failed"]
    took = f"p50 {taken['median']:.2f} s, p99 {taken['p99']:.2f} s, " if taken["n"] else ""
    return Row(
        f"{taken['n'] + len(failed)} clients load a {BINARY // 10 // MB} MB kernel at the same time",
        "no failures",
        f"{took}{len(failed)} failed",
        not failed,
        f"Clients and server share the cores: the clients took {values['clients-processor-seconds']:.1f} s of CPU "
        f"time, the server {values['server-processor-seconds']:.1f} s. Peak memory of the server: "
        f"{values['server-peak-bytes'] / MB:.0f} MB.",
    )


FETCH = """
import json, hashlib, requests
digest = hashlib.sha256()
with requests.get("{url}/kernels/{repo}/resolve/v1/huge.so", stream=True) as response:
    response.raise_for_status()
    for block in response.iter_content(1 << 20):
        digest.update(block)
print(json.dumps({{"sha256": digest.hexdigest()}}))
"""


def measure_memory(directory: Path) -> Measured:
    """Measure the server's peak memory during uploads of one huge file by LFS and by Xet, and its download."""
    write_random(directory / "kernel" / "huge.so", HUGE)
    expected = subprocess.run(
        ["sha256sum", directory / "kernel" / "huge.so"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()[0]
    peaks, seconds = {}, {}
    with running_hub(directory / "hub", *OPTIONS) as hub:
        peaks["idle"] = hub.peak_bytes()
        for transfer, disabled in (("lfs", "1"), ("xet", "0")):
            repo = f"{KERNEL}-{transfer}"
            hub.reset_peak()
            code = PUBLISH.format(repo=repo, folder=directory / "kernel")
            seconds[f"{transfer}-up"] = client(hub, directory / "home", code, HF_HUB_DISABLE_XET=disabled)["seconds"]
            peaks[f"{transfer}-up"] = hub.peak_bytes()
        hub.reset_peak()
        began = time.perf_counter()
        came = client(hub, directory / "home", FETCH.format(url=hub.url, repo=repo))["sha256"]
        seconds["down"] = time.perf_counter() - began
        peaks["down"] = hub.peak_bytes()
    if came != expected:
        raise RuntimeError(f"the downloaded file has the SHA-256 {came}, not {expected}")
    values = {"peak-bytes": peaks, "seconds": seconds}
    return Measured(("HfApi().upload_folder(…)", "GET /kernels/…/resolve/v1/huge.so"), values)


def memory_row(values: Values) -> Row:
    peaks, seconds = values["peak-bytes"], values["seconds"]
    return Row(
        f"peak memory of the server while a {HUGE // MB} MB file is uploaded and downloaded",
        f"at most {MEMORY // MB} MB",
        f"upload {peaks['lfs-up'] / MB:.0f} MB by LFS, {peaks['xet-up'] / MB:.0f} MB by Xet; "
        f"download {peaks['down'] / MB:.0f} MB",
        max(peaks.values()) <= MEMORY,
        f"Peak resident memory; {peaks['idle'] / MB:.0f} MB before the first request. Upload "
        f"{seconds['lfs-up']:.1f} s by LFS and {seconds['xet-up']:.1f} s by Xet, "
        f"download {seconds['down']:.1f} s, hashing included.",
    )


FIGURES: dict[str, Figure[Path]] = {
    "first-load": Figure(measure_first_load, first_load_row),
    "publish": Figure(measure_publish, publish_row),
    "at-once": Figure(measure_at_once, at_once_row),
    "memory": Figure(measure_memory, memory_row),
}
PACKAGES = ("huggingface_hub", "hf_xet", "kernels", "torch", "fastapi", "uvicorn", "pygit2")


def describe_machine(on: Mapping[str, Any]) -> str:
    """Describe the machine of a report in one line."""
    used = ", ".join(f"{name} {on[name]}" for name in ("python", *PACKAGES))
    return (
        f"{on['cpu']}, {on['cores']} cores, {on['system']}, {used}. One server process; the clients run on the "
        "same machine, over loopback."
    )


PAGE = FiguresPage(
    title="Figures of the Hub",
    command=".venv/bin/python benchmarks/hub.py --json benchmarks/results/hub.json --markdown docs/hub-figures.md",
    figures=FIGURES,
    describe_machine=describe_machine,
)


def measure_in_directory(name: str) -> Measured:
    """Measure a figure in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="hub-figures-") as directory:
        return FIGURES[name].measure(Path(directory))


@click.command()
@options(list(FIGURES))
def main(only: tuple[str, ...], json_file: Path | None, markdown: Path | None, page_only: bool) -> None:
    """Measure the Hub, in about two minutes on two cores. Needs 12 GB of free disk space."""
    if page_only:
        write_page(PAGE, json_file, markdown)
        return
    chosen, on = only or tuple(FIGURES), machine(*PACKAGES)
    sys.exit(measure(PAGE, chosen, measure_in_directory, on, json_file=json_file, markdown=markdown))


if __name__ == "__main__":
    main()
