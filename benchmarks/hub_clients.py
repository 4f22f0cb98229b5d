"""Loads a kernel from a Hub by older and newer clients, each installed beside this machine's Torch.

    .venv/bin/python benchmarks/hub_clients.py --json benchmarks/results/hub-clients.json

The clients are kept in `--cache`. The index says which releases of `huggingface_hub` a release of `kernels` takes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import result_files
from hub_process import HubProcess, running_hub

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

KERNELS = ("0.9.0", "0.12.3", "0.13.0", "0.14.1", "0.16.2", "0.17.2")
HUGGINGFACE_HUB = ("0.36.2", "1.20.0", "1.33.0", "2.4.0")
KERNEL = "kernels-community/twice"

LOAD = """
import torch, kernels
if {without_cpu}:
    kernels.utils.build_variant = lambda: "torch-cpu"
print(kernels.get_kernel("{kernel}", {chosen}).twice(torch.ones(1)).item())
"""
WITHOUT_CPU = ("0.9.0",)  # knows kernels for GPUs only, packages in a directory of theirs, and versions as tags
OLD_LAYOUT = "old"


def install(cache: Path, kernels: str, hub: str) -> Path | str:
    """Return a directory with two clients, or why the index does not have them together."""
    target = cache / f"{kernels}-{hub}"
    if target.exists():
        return target
    staging = target.with_name(f"new-{target.name}")
    packages = [f"kernels=={kernels}", f"huggingface_hub=={hub}"]
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(staging)]
    done = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(staging, ignore_errors=True)
        return "do not go together" if "conflict" in done.stderr else done.stderr.strip().splitlines()[-1]
    staging.rename(target)
    return target


def load(hub: HubProcess, client: Path, home: Path, chosen: str, *, without_cpu: bool) -> str:
    """Load the kernel by a client, and return what is wrong, or ""."""
    code = LOAD.format(kernel=KERNEL, chosen=chosen, without_cpu=without_cpu)
    variables = hub.client_environment(home, PYTHONPATH=str(client))
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    return "" if done.stdout == "2.0\n" else (done.stderr.strip() or "no answer").splitlines()[-1]


def publish(hub: HubProcess, folder: Path) -> None:
    """Publish a kernel that needs no compiler, as its version 1."""
    from huggingface_hub import HfApi

    from tests.support.small_kernel import write_kernel

    hub.create(KERNEL)
    api = HfApi(endpoint=hub.url, token="any")
    write_kernel(folder)
    for branch in ("v1", OLD_LAYOUT):
        api.create_branch(KERNEL, branch=branch, repo_type="kernel")
        api.upload_folder(repo_id=KERNEL, folder_path=folder, repo_type="kernel", revision=branch)
        (folder / "build/torch-cpu/twice").mkdir(exist_ok=True)
        (folder / "build/torch-cpu/twice/__init__.py").write_text("def twice(x):\n    return x * 2\n")


@click.command()
@click.option("--cache", type=click.Path(path_type=Path), default=Path(tempfile.gettempdir()) / "hub-clients")
@click.option("--json", "to", type=click.Path(path_type=Path), help="Write the results to a file.")
def main(cache: Path, to: Path | None) -> None:
    """Load a kernel by every pair of clients that the index has."""
    cache.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        with running_hub(work / "hub", "--trust", "kernels-community", "--log-level", "error") as hub:
            publish(hub, work / "kernel")
            for kernels in KERNELS:
                for hub_client in HUGGINGFACE_HUB:
                    client = install(cache, kernels, hub_client)
                    row = {"kernels": kernels, "huggingface_hub": hub_client}
                    if isinstance(client, str):
                        rows.append({**row, "result": client})
                        continue
                    old = kernels in WITHOUT_CPU
                    wrong = {
                        chosen: load(hub, client, work / f"home-{len(rows)}-{chosen}", chosen, without_cpu=old)
                        for chosen in ([f'revision="{OLD_LAYOUT}"'] if old else ['revision="v1"', "version=1"])
                    }
                    rows.append({**row, "result": "loads" if not any(wrong.values()) else wrong})
                    click.echo(f"kernels {kernels}, huggingface_hub {hub_client}: {rows[-1]['result']}")
    if to is not None:
        result_files.write(to, rows)


if __name__ == "__main__":
    main()
