"""The devices that judge, and their locks."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path

import pytest

from kernel_judge.search.local_judge import free_device, judging_devices
from tests.support.files import write_program

FIRST, SECOND = "GPU-aaaa", "GPU-bbbb"


@pytest.fixture(autouse=True)
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, as the driver's tool lists them."""
    tool = write_program(tmp_path / "bin" / "nvidia-smi", f"echo '0, {FIRST}'\necho '1, {SECOND}'")
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("KERNEL_BUILDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, [FIRST, SECOND]), ("1", [SECOND]), (f"{FIRST}", [FIRST]), ("1,0", [SECOND, FIRST]), ("", ["cpu"])],
)
def test_the_visible_gpus_judge(visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert list(judging_devices()) == expected


def test_each_gpu_judges_one_candidate_at_a_time() -> None:
    devices = judging_devices()

    def held() -> str:
        with free_device(devices) as environment:
            return environment["CUDA_VISIBLE_DEVICES"]

    with ThreadPoolExecutor(1) as pool, free_device(devices) as mine:
        assert mine["CUDA_VISIBLE_DEVICES"] == FIRST
        assert pool.submit(held).result(60) == SECOND
        with free_device(devices):
            third = pool.submit(held)
            with pytest.raises(TimeoutError):
                third.result(0.3)
        assert third.result(60) == SECOND
