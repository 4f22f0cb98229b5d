"""Runs programs in forks of a process that has imported their modules.

Importing Torch takes two seconds of CPU time, and the builder 0.7 s. A fork server imports once for all programs of a
test process. Each program runs in a fork of its own.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

from kernel_format.files import debugging
from tests.support.places import ROOT


class ForkServer:
    """A process that has imported modules, started with the first program that it runs."""

    def __init__(self, *modules: str, **environment: str) -> None:
        """`environment` is added to the environment in which the modules are imported."""
        self._modules, self._environment = modules, environment
        self._server: subprocess.Popen[str] | None = None

    def run(self, code: str, arguments: Sequence[str], environment: Mapping[str, str]) -> CompletedProcess[str]:
        """Run a program as `python -c` does, without input, and return its output. When debugging, keep its file."""
        if debugging():
            script = Path(tempfile.mkdtemp(), "program.py")
            script.write_text(code)
            command = [sys.executable, str(script), *arguments]
            print(f"kept: {shlex.join(command)}", file=sys.stderr)
            return subprocess.run(command, capture_output=True, text=True, check=False, env=dict(environment))
        with tempfile.TemporaryDirectory() as directory:
            printed = [str(Path(directory, name)) for name in ("stdout", "stderr")]
            request = [code, [*arguments], dict(environment), str(Path.cwd()), ["/dev/null", *printed]]
            status = self._answer(json.dumps(request))
            return CompletedProcess([*arguments], status, *(Path(path).read_text() for path in printed))

    def _answer(self, request: str) -> int:
        server = self._server
        if server is None:
            program = "from tests.support import fork_server; fork_server.serve()"
            server = self._server = subprocess.Popen(
                [sys.executable, "-c", program, *self._modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, **self._environment},
            )
        assert server.stdin is not None and server.stdout is not None
        try:
            server.stdin.write(f"{request}\n")
            server.stdin.flush()
            return int(server.stdout.readline())
        except BaseException:  # a timeout of the test: the next program gets another server
            server.kill()
            self._server = None
            raise


def serve() -> None:
    """Import the modules that the command line names, and run each request of stdin in a fork."""
    gc.disable()
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()  # the garbage collector of a fork would copy the memory of the modules
    gc.enable()
    for request in sys.stdin:
        # Such a process ends without clearing its modules, which takes a second of CPU time after an import of Torch.
        process = multiprocessing.get_context("fork").Process(target=_run, args=(request,))
        process.start()
        process.join()
        print(process.exitcode, flush=True)


def _run(request: str) -> None:
    code, arguments, environment, directory, files = json.loads(request)
    for descriptor, path in enumerate(files):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()
