"""Writes the GPU guides of the skill from `gpus.toml`, so that no number is in two places.

`python -m kernel_judge.skills.gpu_guides` writes all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_builder import toml_file

_HERE = Path(__file__).parent
REFERENCES = _HERE / "cuda-kernels" / "references"


def gpus() -> dict[str, dict[str, Any]]:
    """Return the GPUs of `gpus.toml` by their short names."""
    return toml_file.read(_HERE / "gpus.toml")


def guide(gpu: Mapping[str, Any]) -> str:
    """Return the guide for one GPU, as Markdown."""
    bandwidth = gpu["bandwidth_tb_s"]
    rows = [
        ("capability", f"{gpu['capability']}"),
        ("memory", gpu["memory"]),
        ("memory bandwidth, data sheet", f"{bandwidth} TB/s"),
        *([("copy speed, measured", f"{gpu['copy_tb_s']} TB/s")] if "copy_tb_s" in gpu else []),
        ("L2 cache", f"{gpu['l2_mb']} MB"),
        ("SMs", f"{gpu['sms']}"),
        ("shared memory of an SM", f"{gpu['shared_kb_sm']} KB"),
        ("shared memory of a block at most", f"{gpu['shared_kb_block']} KB, beyond 48 KB after `cudaFuncSetAttribute`"),
        ("threads and blocks of an SM at most", f"{gpu['threads_sm']} and {gpu['blocks_sm']}"),
        ("registers of an SM", f"{gpu['registers_sm']} of 32 bits; {gpu['registers_thread']} a thread at most"),
        ("registers a thread with all threads", f"{gpu['registers_sm'] // gpu['threads_sm']}"),
        ("peak float32", f"{gpu['peak_float32_tflop_s']} TFLOP/s"),
        ("peak 16-bit tensor cores, dense", f"{gpu['peak_16_bit_tflop_s']} TFLOP/s"),
        ("float32 operations for each byte of memory", f"{gpu['peak_float32_tflop_s'] / bandwidth:.0f}"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    changes = "\n".join(f"- {sentence.format_map(gpu)}" for sentence in gpu["changes"])
    return (
        f"# {gpu['title']} ({gpu['architecture']})\n\n"
        f"| | |\n| --- | --- |\n{table}\n\n"
        f"Source: {gpu['source']}.\n\n"
        "A kernel with fewer operations for each byte than the last row is limited by memory: compare it with copy "
        "speed, not with the data sheet.\n\n"
        f"## What changes\n\n{changes}\n"
    )


def write_guides(directory: Path = REFERENCES) -> None:
    """Write the guides of all GPUs into a directory."""
    for name, gpu in gpus().items():
        (directory / f"gpu-{name}.md").write_text(guide(gpu), encoding="utf-8")


if __name__ == "__main__":
    write_guides()
