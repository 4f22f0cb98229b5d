"""The program that `ProbeProcess` of `checks.load` runs in a new process. It must not import the builder.

    python kernel_builder/checks/probe CONNECTION
    python -m pdb -m kernel_builder.checks.probe load DIRECTORY

It imports Torch and the client, and answers questions from the connection, a file descriptor, until that is closed. The
second form loads one package without a fork and prints the answer, so that a debugger reaches it. A question is a
line with a JSON list, `[TOKEN, SECONDS, OTHERS, PACKAGES]`. Its answer is a line with a JSON object: by TOKEN, and then
by directory, an outcome (`loaded`, `skipped` or `failed`), a text, and lists of names and of registered ops. The
arguments are JSON. OTHERS has the directories of built kernels by repository. PACKAGES has by directory the back end to
ask the client for, or null for the one that it selects, and the dispatch key of the ops, or nothing if it is not known.

Importing Torch takes seconds, so one process imports it for all packages of a command. Each package is loaded in a
fork of that process: it may crash, and two packages must not meet in one process. The parent does no more than import,
since a process that has used CUDA cannot be forked.

One name is not public: `_op_schemas` asks `torch._C` for all registered ops, which no public function lists. Torch 2.6
to 2.15 have it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_LONGEST_RESULT = 1 << 20  # bytes of JSON about one package


@cache
def _import_error() -> str | None:
    """Import Torch and the client, and return why that fails, or None."""
    try:
        import kernels  # noqa: F401
        import torch  # noqa: F401
    except Exception as error:
        return str(error)
    finally:
        # The bytecode of Torch saves seconds; a package is checked as it is, without files that loading it adds.
        sys.dont_write_bytecode = True
    return None


def _rejections(variants: dict[str, str | None]) -> dict[str, str | None]:
    """Return why the client would reject each variant, or None, by the back end to ask the client for."""
    from kernels.variants import VariantRejected, parse_variant, resolve_variants

    answers: dict[str, str | None] = {}
    for name, backend in variants.items():
        _, decisions = resolve_variants([parse_variant(name)], backend)
        if not decisions:
            answers[name] = "this Python cannot load modules built for the limited API"
        else:
            answers[name] = decisions[0].reason if isinstance(decisions[0], VariantRejected) else None
    return answers


def _load_others(directory: Path, backend: str | None) -> str | None:
    """Load the kernels that a package depends on before its own ops are listed; return why one cannot be loaded.

    The client looks for them in LOCAL_KERNELS and in the Hub's cache, and loads a package once.
    """
    from kernels import Metadata, get_kernel
    from kernels.python_deps import validate_variant_dependencies

    try:
        validate_variant_dependencies(directory)
    except ImportError as error:
        return str(error)
    for dependency in Metadata.read_from_file(directory / "metadata.json").kernel_depends:
        repo_id, wanted = dependency.repo_id, dependency.version
        key = "version" if hasattr(wanted, "version") else "revision"
        try:
            get_kernel(repo_id, **{key: getattr(wanted, key)}, backend=backend, trust_remote_code=True)
        except Exception as error:
            return (
                f"it depends on {repo_id}, which cannot be loaded here: build its project in the same command, name "
                f"its build in LOCAL_KERNELS={repo_id}=DIR, or load it once with the client ({error})"
            )
    return None


def _missing(error: BaseException | None) -> list[str]:
    """Return the missing modules that an exception reports, or an exception that it was raised from."""
    names = []
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            names.append(error.name)
        error = error.__cause__ or error.__context__
    return names


def _answers(
    seconds: float, others: dict[str, str], packages: dict[str, tuple[str | None, str]]
) -> dict[str, dict[str, Any]]:
    """Return the result of loading each directory in a process of its own."""
    if error := _import_error():
        text = f"PyTorch and the client cannot be imported: {error}"
        return {directory: {"outcome": "skipped", "text": text} for directory in packages}
    reasons = _in_fork(
        lambda: _rejections({Path(path).name: backend for path, (backend, _) in packages.items()}), seconds
    )
    answers: dict[str, dict[str, Any]] = {}
    for directory, (backend, key) in packages.items():
        name = Path(directory).name
        if not isinstance(reasons, dict):
            answers[directory] = {"outcome": "skipped", "text": f"the client cannot be asked: {reasons}"}
        elif reasons[name]:
            answers[directory] = {"outcome": "skipped", "text": reasons[name]}
        else:
            answers[directory] = _loaded(Path(directory), backend, key, others, seconds)
    return answers


def _loaded(directory: Path, backend: str | None, key: str, others: dict[str, str], seconds: float) -> dict[str, Any]:
    from kernels import get_local_kernel

    def load() -> dict[str, Any]:
        built = [f"{repo_id}={path}" for repo_id, path in others.items()]
        if entries := [entry for entry in (os.environ.get("LOCAL_KERNELS"), *built) if entry]:
            os.environ["LOCAL_KERNELS"] = ":".join(entries)
        if reason := _load_others(directory, backend):
            return {"outcome": "skipped", "text": reason, "ops": []}
        before = {schema.name for schema in _op_schemas()}
        answer: dict[str, Any] = {"outcome": "loaded", "text": ""}
        try:
            get_local_kernel(directory, backend=backend, trust_remote_code=True)
        except BaseException as error:
            lines = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
            # The client's note names the kernel and the variant, and so does the finding.
            text = "\n".join(line for line in lines if not line.startswith("while importing kernel "))
            answer = {"outcome": "failed", "text": text, "missing": _missing(error)}
        # The ops of a package that is loaded in part may tell why it fails.
        return {**answer, "ops": _new_ops(directory, key, before)}

    answer = _in_fork(load, seconds)
    return answer if isinstance(answer, dict) else {"outcome": "failed", "text": answer}


def _op_schemas() -> list[Any]:
    import torch

    return list(torch._C._jit_get_all_schemas())


def _new_ops(directory: Path, key: str, before: set[str]) -> list[dict[str, Any]] | None:
    """Describe the ops that loading a package has registered, without those of other packages; None on an old Torch."""
    import torch
    from kernels import Metadata, get_loaded_kernels

    if not hasattr(torch.library, "get_kernel"):
        return None
    own = Metadata.read_from_file(directory / "metadata.json").id
    others = {loaded.metadata.id for loaded in get_loaded_kernels()} - {own}
    ops = []
    returns = {(schema.name, schema.overload_name or "default"): bool(schema.returns) for schema in _op_schemas()}
    for full_name in sorted({name for name, _ in returns} - before):
        namespace, _, name = full_name.partition("::")
        if namespace in others:
            continue
        packet = getattr(getattr(torch.ops, namespace), name)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            places = {
                dispatch: _registered_at(op, dispatch)
                for dispatch in ("CPU", "CUDA", "XPU", "MPS", f"Autograd{key}", "Meta")
            }
            # The builder compiles sources by relative paths. Those of other packages are absolute.
            place = next((place for place in places.values() if place and not place.startswith("/")), "")
            if namespace == own or place:
                ops.append(
                    {
                        "name": name if overload == "default" else f"{name}.{overload}",
                        "namespace": "" if namespace == own else namespace,
                        "key": key,
                        "implemented": any(places.get(dispatch) is not None for dispatch in (key, f"Autograd{key}")),
                        "keys": [
                            dispatch for dispatch in ("CPU", "CUDA", "XPU", "MPS") if places[dispatch] is not None
                        ],
                        # Torch itself makes the fake of an op that returns nothing.
                        "fake": places["Meta"] is not None or not returns[full_name, overload],
                        "place": place,
                    }
                )
    return ops


def _registered_at(op: Any, key: str) -> str | None:
    """Return where the implementation of an op for a dispatch key is registered; None if there is none of its own."""
    import torch

    try:
        kernel = repr(torch.library.get_kernel(op, key))
    except Exception:
        return None
    return None if "Fallback" in kernel else kernel.partition("registered at ")[2].rstrip("')")


def _in_fork(function: Callable[[], Any], seconds: float) -> Any:
    """Return the result of a function in a forked process, or the text of that process's failure."""
    if sys.argv[1] == "load":
        return function()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as empty:
        result, log = Path(empty, "result.json"), Path(empty, "stderr")
        child = os.fork()
        if child == 0:
            try:
                # The fork ends when this process is killed, as a build that is stopped does.
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                os.close(int(sys.argv[1]))  # a package cannot answer for the builder
                os.chdir(empty)
                descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
                os.dup2(descriptor, 2)
                result.write_text(json.dumps(function()), encoding="utf-8")
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        status = _wait(child, seconds)
        if status is None:
            return f"no answer after {seconds:.0f} s"
        if status < 0:
            thrown = _thrown(log.read_text(errors="replace"))
            return f"the process was killed by {signal.Signals(-status).name}" + (f": {thrown}" if thrown else "")
        if status == 0 and result.is_file() and result.stat().st_size <= _LONGEST_RESULT:
            with contextlib.suppress(ValueError, RecursionError):  # the package can write there, too
                return json.loads(result.read_bytes())
        lines = log.read_text(errors="replace").strip().splitlines()
        return f"the process ended with status {status}" + (f": {lines[-1]}" if lines else "")


def _thrown(log: str) -> str:
    """Return the C++ exception that ended a process: its type, and the first line of its message."""
    match = re.search(r"terminate called after throwing an instance of '(.+)'(?:\s+what\(\): +(.*))?", log)
    return ": ".join(part for part in match.groups() if part) if match else ""


def _wait(child: int, seconds: float) -> int | None:
    """Return the exit status of a process, negative for a signal; kill it and return None if it takes too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main(words: list[str]) -> None:
    """Answer the questions of a connection, or load the package in a directory and print the answer."""
    if words[0] == "load":
        print(json.dumps(_answers(0, {}, {str(Path(words[1]).resolve()): (None, "")}), indent=1))
        return
    connection = socket.socket(fileno=int(words[0]))
    _import_error()
    for question in connection.makefile(encoding="utf-8"):
        token, *arguments = json.loads(question)
        answer = _answers(*map(json.loads, arguments))
        connection.sendall(f"{json.dumps({token: answer})}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # an interpreter that has imported Torch takes half a second to finish otherwise
