"""The backup that docs/hub.md describes, while clients write and git packs."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from raw_requests import commit, hub_command

from tests.support.running_hub import RunningHub

BACKUP = Path(__file__).parents[3] / "deploy" / "backup.sh"


def test_a_backup_beside_writers_is_restored(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    hub = start_hub()
    names = ["a/one", "b/two"]
    made: dict[str, list[str]] = {name: [] for name in names}
    stop = threading.Event()

    def write(name: str) -> None:
        api = hub.api()
        while not stop.is_set():
            number = len(made[name])
            content = os.urandom(1_200_000) if number % 5 == 0 else os.urandom(20).hex().encode()
            made[name].append(commit(api, name, f"f{number}.bin" if number % 5 == 0 else "f", content).oid)

    def pack() -> None:
        while not stop.wait(0.3):
            for name in names:
                where = ["git", "-c", "safe.directory=*", "-C", str(hub.root / f"repositories/{name}.git")]
                subprocess.run([*where, "repack", "-adq"], check=False, capture_output=True)
                subprocess.run([*where, "pack-refs", "--all"], check=False, capture_output=True)

    for name in names:
        hub.api().create_repo(name, repo_type="kernel", private=name == "b/two")
    workers = [threading.Thread(target=write, args=[name]) for name in names] + [threading.Thread(target=pack)]
    for worker in workers:
        worker.start()
    try:
        while min(len(oids) for oids in made.values()) < 8:
            stop.wait(0.05)
        before = {name: len(oids) for name, oids in made.items()}
        done = subprocess.run(
            [str(BACKUP), str(hub.root), str(tmp_path / "backup")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    hub.kill()
    shutil.rmtree(hub.root)

    shutil.copytree(tmp_path / "backup", tmp_path / "restored")
    done = hub_command("check", "--digests", "--root", tmp_path / "restored")
    assert done.returncode == 0, done.stdout + done.stderr
    restored = start_hub(root=tmp_path / "restored")
    for name in names:
        api = restored.api()
        head = api.repo_info(name, repo_type="kernel").sha
        assert made[name].index(head) >= before[name] - 1  # every commit that was acknowledged before
        for path in api.list_repo_files(name, repo_type="kernel"):
            assert Path(api.hf_hub_download(name, path, repo_type="kernel", cache_dir=tmp_path / "cache")).is_file()
        commit(api, name, "after")
        fsck = ["git", "-c", "safe.directory=*", "-C", str(restored.root / f"repositories/{name}.git"), "fsck"]
        subprocess.run([*fsck, "--strict"], check=True, capture_output=True)
    assert restored.api().repo_info("b/two", repo_type="kernel").private
    assert subprocess.run([str(BACKUP), str(tmp_path), str(tmp_path / "x")], check=False).returncode == 2
