"""The process that runs a candidate or a peer: `python -m kernel_judge.judge.worker SETTINGS`.

It confines itself, imports the candidate, and answers commands of the judge. It never has a result of the reference,
and the judge believes nothing that it says except that it failed: results are read from shared memory, and time is
the judge's.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import socket
import sys
from pathlib import Path

from kernel_judge.judge.process_tree import guarded_fork
from kernel_sandbox.confine import BUBBLEWRAP, confine
from kernel_sandbox.system_calls import seccomp_filters


def main() -> None:
    """Serve the commands that come over the connection, until the judge closes it."""
    settings = json.loads(sys.argv[1])
    scratch = Path(settings["scratch"])
    device = settings["device"]
    if settings["sandbox"] != BUBBLEWRAP or device != "cpu":  # there may be no pid namespace, with which all would end
        guarded_fork(os.getppid())
    confine(settings["sandbox"], str(scratch), settings["paths"], device, seccomp_filters(device))
    if device == "cpu":  # CUDA's driver maps more than it uses
        resource.setrlimit(resource.RLIMIT_DATA, (settings["memory"], settings["memory"]))
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (16, 16))  # timers, which expire while it is suspended
    os.chdir(scratch)
    with socket.socket(fileno=settings["connection"]) as connection, connection.makefile("rb") as commands:
        cores = os.sched_getaffinity(0)  # OpenMP, which Torch loads, binds this thread to one of them
        # Torch starts threads, and a process with threads cannot confine itself.
        from kernel_judge.judge.model_runner import ModelRunner, answer

        runner = ModelRunner(settings, cores)
        connection.sendall(b'{"value": "ready"}\n')
        while True:
            try:
                token, command, arguments = pickle.load(commands)
            except EOFError:
                break
            reply = {"token": token, **answer(runner, command, arguments)}
            connection.sendall(f"{json.dumps(reply)}\n".encode())
    os._exit(0)  # threads of the candidate, and its exit handlers, end here


if __name__ == "__main__":
    main()
