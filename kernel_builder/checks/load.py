"""Check that the package loads with the public client, in a fresh process, on this machine."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.checks.findings import CheckedPackage, Finding, NotApplicable
from kernel_builder.checks.fit import may_load
from kernel_builder.checks.python_rules import always_present, imported_roots
from kernel_builder.config import known_backends
from kernel_builder.config.variant import Variant, this_platform
from kernel_builder.steps.confinement import Confinement
from kernel_format.files import temporary_directory
from kernel_format.metadata import PackageMetadata
from kernel_format.tree_digest import contents, is_unchanged
from kernel_sandbox import sandbox
from kernel_sandbox.answers import has_form, read_answer


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
        raise NotApplicable(f"the variant is for {variant.platform}, this machine is {this_platform()}")
    text = answer["text"]
    if answer["outcome"] == "skipped":
        raise NotApplicable(text)
    if answer["outcome"] == "failed":
        foreign = _foreign(package, answer.get("missing", ()))
        if foreign:
            raise NotApplicable(f"this machine has no {', '.join(foreign)}, which the package imports")
        hints = toml_file.read(Path(__file__).with_name("load_hints.toml"))["hint"]
        hint = next(of["hint"] for of in hints if re.search(of["message"], text))
        yield Finding(f"the client cannot load the package: {text}", hint, path="__init__.py")


def _foreign(package: CheckedPackage, missing: Sequence[str]) -> list[str]:
    """Return the missing modules that are not the package's own.

    Whether users have them is a question for the check `python-imports`.
    """
    others = always_present() | imported_roots(package)
    roots = {name.partition(".")[0] for name in missing}
    return sorted(roots & others)


def _is_complete(directory: Path) -> bool:
    return PackageMetadata.read(directory) is not None and (directory / "__init__.py").is_file()


def start_loading(
    directories: Sequence[Path], process: ProbeProcess, others: Mapping[str, Sequence[Path]]
) -> Callable[[], Mapping[str, Mapping[str, Any]]]:
    """Start to load packages that are complete and for this machine, each in a process of its own.

    One process imports Torch for all of them. That takes seconds, in which the other checks run.

    Args:
        others: Packages of kernels that these may depend on, by repository, beside those that the client finds.

    Returns:
        A function that waits for the answers. An answer has, by directory, the `outcome` (`loaded`, `skipped` or
        `failed`), a `text`, and where they apply the modules that this machine lacks (`missing`).
    """
    variants = {path: variant for path in directories if (variant := Variant.find(path.name)) and _is_complete(path)}
    seen = {path: process.show([path]) / path.name for path, variant in variants.items() if may_load(variant)}
    if not seen:
        return dict
    local = {repo_id: str(process.show(packages)) for repo_id, packages in others.items() if packages}
    wanted = json.dumps({str(copy): asked_for(directory.name) for directory, copy in seen.items()})
    wait = process.ask(str(SECONDS), json.dumps(local), wanted)

    @cache
    def answers() -> Mapping[str, Mapping[str, Any]]:
        every = wait(SECONDS * (len(seen) + 1))
        found = {}
        for directory, copy in seen.items():
            answer: Any = every.get(str(copy)) if isinstance(every, dict) else None
            if not _is_answer(answer):
                answer = {"outcome": "failed", "text": every[1] if isinstance(every, tuple) else _FORGED}
            text = answer["text"][:_LONGEST_TEXT].replace(str(copy), str(directory))
            found[str(directory)] = {**answer, "text": text}
        return found

    return answers


_FORGED = "the process answers in another form: code of the package has changed it"
_OP = {"name": str, "namespace": str, "key": str, "implemented": bool, "keys": [str], "fake": bool, "place": str}
_ANSWER = {"outcome": str, "text": str, "missing": [str], "ops": [_OP]}


def _is_answer(answer: Any) -> bool:
    """Return whether an answer about a package has its form, which code of the package could change."""
    if isinstance(answer, dict):
        answer = {**answer, "missing": answer.get("missing") or [], "ops": answer.get("ops") or []}
    return has_form(answer, _ANSWER) and answer["outcome"] in ("loaded", "skipped", "failed")


def asked_for(variant: str) -> tuple[str | None, str]:
    """Return the back end to ask the client for, None for the one that it selects itself, and the ops' dispatch key."""
    backend = known_backends.named(variant)
    if backend is None:
        return None, ""
    return backend.name if backend.in_every_torch else None, backend.dispatch_key


SECONDS = 300  # for the answer to a question, by default
LONGEST_ANSWER, _LONGEST_TEXT = 16 << 20, 2000
_PROBE = Path(__file__).with_name("probe")


class ProbeProcess:
    """Runs `probe` in an interpreter of its own, outside the current directory and without network.

    Importing Torch takes seconds, so one process answers all questions of a command, and `start` begins the import
    before the first of them. A process that has died, or has not answered the question before, is replaced.

    In a sandbox, the process sees copies of packages in a directory that it may write, and of the user's files only
    Python's, those in the Hub's cache and those of LOCAL_KERNELS.

    Args:
        python: The interpreter whose client and Torch are asked.
        confinement: The sandbox of the process; None for none.
    """

    def __init__(self, python: str = sys.executable, confinement: Confinement | None = None) -> None:
        self._python = python
        self.confinement = confinement or Confinement()
        self._opened = ExitStack()
        self._home = self._opened.enter_context(temporary_directory())
        self._running = ExitStack()  # the process, its log and our end of its connection
        self._process: subprocess.Popen[bytes] | None = None
        self._is_asked = False
        self._shown: dict[Path, Path] = {}

    def __enter__(self) -> ProbeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._opened.close()

    def show(self, packages: Sequence[Path]) -> Path:
        """Return a directory in which the process sees packages: in a sandbox, they are copies."""
        if self.confinement.kind is None:
            return packages[0].parent
        directory = Path(tempfile.mkdtemp(dir=self._home))
        for package in packages:
            self._shown[package] = directory / package.name
            shutil.copytree(package, directory / package.name, symlinks=True)
        return directory

    def has_changed(self, package: Path) -> bool:
        """Return whether the process has changed its copy of a package."""
        copy = self._shown.get(package)
        return copy is not None and not is_unchanged(copy, contents(package))

    def ask(self, *arguments: str) -> Callable[[float], Any]:
        """Send a question to `probe`, and return a function that waits some seconds for its answer.

        The function returns `("failed", reason)` if the process died or did not answer in time. It waits for the last
        question only.
        """
        self.start()
        self._is_asked, token = True, secrets.token_hex(8)
        with suppress(OSError):  # it has died, which `wait` reports
            self._connection.sendall(f"{json.dumps([token, *arguments])}\n".encode())

        def wait(seconds: float) -> Any:
            try:
                end, answer = time.monotonic() + seconds, None
                while answer is None:  # code of a package may have answered an earlier question twice
                    sent = read_answer(self._connection, end - time.monotonic(), LONGEST_ANSWER)
                    answer = sent.get(token) if isinstance(sent, dict) else None
            except TimeoutError:
                return "failed", f"no answer after {seconds:.0f} s"
            except ValueError:
                return "failed", _FORGED
            except (EOFError, OSError):
                return "failed", self._death(seconds)
            self._is_asked = False
            return answer

        return wait

    def start(self) -> None:
        """Start the process, unless one runs that is not busy with a question."""
        if self._process and (self._is_asked or self._process.poll() is not None):
            self._stop()
        if self._process:
            return
        empty = Path(tempfile.mkdtemp(dir=self._home))
        self._log = self._running.enter_context((empty / "stderr").open("w+", errors="replace"))
        self._connection, other = socket.socketpair()
        self._connection.settimeout(SECONDS)
        self._running.enter_context(self._connection)
        with other:
            command = [self._python, "-X", "faulthandler", str(_PROBE), str(other.fileno())]
            self._process = subprocess.Popen(
                _confined(command, self.confinement, self._home, empty) if self.confinement.kind else command,
                cwd=empty,
                env=_environment(empty),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                pass_fds=[other.fileno()],
            )

    def _stop(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
        self._process, self._is_asked = None, False
        self._running.close()

    def _death(self, seconds: float) -> str:
        """Return how the process ended, after it has closed the connection."""
        assert self._process is not None
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"no answer after {seconds:.0f} s"
        # A sandbox passes on the end of the process as shells do.
        number = -status if status < 0 else status - 128
        if number in signal.valid_signals():
            return f"the process was killed by {signal.Signals(number).name}"
        self._log.seek(max(0, os.fstat(self._log.fileno()).st_size - _LONGEST_TEXT))
        lines = self._log.read().strip().splitlines()
        return f"the process ended with status {status}" + (f": {lines[-1]}" if lines else "")


def _confined(command: list[str], confinement: Confinement, home: Path, directory: Path) -> list[str]:
    """Return the command in its sandbox, in a directory below `home`."""
    # A package may look for a GPU when it is imported.
    device = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    started = ["sh", "-c", 'cd "$0" && exec "$@"', str(directory), *command]
    local = [Path(entry.partition("=")[2]) for entry in "".join(_kernels().values()).split(":") if "=" in entry]
    paths = sandbox.readable([Path(command[0]).parent.parent, _PROBE, _hub_cache(), *local])
    return confinement.around(started, home, map(Path, paths), device)


def _environment(home: Path) -> dict[str, str]:
    python = {name: value for name, value in os.environ.items() if name in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**sandbox.environment(home), **python, **_kernels(), "HF_HUB_CACHE": str(_hub_cache())}


def _kernels() -> dict[str, str]:
    """Return the client's LOCAL_KERNELS with absolute paths, since the process runs in another directory."""
    entries = [entry.partition("=") for entry in os.environ.get("LOCAL_KERNELS", "").split(":") if entry]
    absolute = [f"{repo_id}{sign}{Path(path).absolute() if sign else ''}" for repo_id, sign, path in entries]
    return {"LOCAL_KERNELS": ":".join(absolute)} if absolute else {}


def _hub_cache() -> Path:
    """Return the client's cache, where the kernels that a package depends on are."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).absolute()
