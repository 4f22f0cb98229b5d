"""The judge: builds a candidate, checks it on inputs that it has not seen, and times it beside its peers."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kernel_format.errors import BuildError, KernelBuilderError, MeasureError, ToolchainError, VariantError
from kernel_format.files import temporary_directory
from kernel_judge.judge.candidate import MODEL, Candidate, frozen, read_candidate
from kernel_judge.judge.gpu_memory import is_exhausted, taken_by_others
from kernel_judge.judge.peer_workers import COMPILED, PeerWorkers
from kernel_judge.judge.reference import Reference
from kernel_judge.judge.result_checks import RejectedError, ResultChecks
from kernel_judge.judge.scaling import affordable, cut_lengths, fitted, fitting_workloads, unseen
from kernel_judge.judge.speed import measure_speed
from kernel_judge.judge.speed_report import SpeedReport
from kernel_judge.judge.verdict import NOT_JUDGED, RIGHT, WRONG, Notify, Verdict
from kernel_judge.judge.worker_process import WorkerFailure, WorkerProcess
from kernel_sandbox import sandbox
from kernel_tasks import MachineError, Task, read_task

PEERS = ("eager", *COMPILED)
_ARENA_BYTES = 3 << 30  # of a GPU, or this share of its memory if that is less
_ARENA_SHARE = 26  # each of four workers has two, and its results; the judge has copies
_UNSEEN = 3
_START_SECONDS = 120.0
# On a CPU, the seconds after which peers that still compile are left out, and after which timing ends; on a GPU, those
# of timing. All are longer in proportion on a machine on which a worker needs longer to start.
_CPU_SECONDS, _TIMED_SECONDS = 30.0, {"cpu": 40.0, "cuda": 60.0}
_READY_SECONDS = 4.0
# Messages of Torch, Triton and the client for kernels on a machine without a GPU.
_NEEDS_GPU = re.compile(
    r"NVIDIA driver|not compiled with CUDA|detect CUDA compute_cap|No CUDA GPUs|\b0 active drivers"
    r"|Invalid backend 'cuda'|selected backend \(cu"
)
# Messages of Torch and Python if a compiler or a package for kernels is not installed.
_NEEDS_TOOL = re.compile(
    r"Ninja is required to load C\+\+ extensions|CUDA_HOME environment variable is not set"
    r"|(?:FileNotFoundError|InvalidCxxCompiler).*(?:c\+\+|g\+\+|clang|gcc|cc|nvcc)\b"
    r"|No working C\+\+ compiler found|'which', '(?:c\+\+|g\+\+|nvcc)'"
    r"|No module named '(?:triton|helion|cuda|cupy|cutlass|tilelang|numba|pycuda|tvm_ffi|flashinfer)['.]"
)

_LOADS = re.compile(r"^(?!\s*#).*\bkernel_builder(\.load\b|\s+import\s.*\bload\b)", re.MULTILINE)


@dataclass(frozen=True)
class JudgeRequest:
    """A candidate, its task, and the extent of the checks: the options of `kernel-builder judge`."""

    candidate: Path
    task: Path
    device: str | None = None  # "cpu" or "cuda"; None for the task's, or "cuda" if there is a GPU
    inputs: int = 100
    rounds: int = 15
    peers: tuple[str, ...] = PEERS
    seed: int | None = None  # makes inputs and shapes repeatable, and foreseeable by a candidate, for tests
    build_seconds: float = 600.0  # limit of importing the candidate, which may compile
    call_seconds: float = 30.0
    sandbox: str | None = None
    inputs_of_task_only: bool = False
    is_built: bool = False


def judge(request: JudgeRequest, notify: Notify = lambda message: None) -> Verdict:
    """Return the verdict on a candidate.

    Raises:
        ConfigError: If the task or the candidate cannot be read, or the reference cannot be run.
        MeasureError: If a process of the judge's own fails.
    """
    task = read_task(request.task)
    with frozen(request.candidate, with_build=request.is_built) as path:
        return _judge(request, task, read_candidate(path, task), notify)


def _judge(request: JudgeRequest, task: Task, candidate: Candidate, notify: Notify) -> Verdict:
    started = time.monotonic()
    device = request.device or task.settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    choice = random.SystemRandom() if request.seed is None else random.Random(request.seed)
    kind = request.sandbox or sandbox.strongest()
    judgement = _Judgement(request, task, candidate, device, kind, choice, notify, started)
    rejected: RejectedError | None = None
    word, reason, speed, exhausted = RIGHT, "", SpeedReport(), ""
    try:
        if device == "cuda" and not torch.cuda.is_available():
            raise MachineError("it is to run on a GPU, and Torch finds none: --device cpu judges it on the CPU")
        speed = judgement.run()
    except MachineError as error:
        word, reason = NOT_JUDGED, str(error)
    except (RejectedError, WorkerFailure) as error:
        # Without its traceback, whose frames keep memory of the GPU.
        word, reason = WRONG, str(error)
        rejected = RejectedError(error.kind, reason, getattr(error, "case", None))
    except Exception as error:
        exhausted = f"{type(error).__name__}: {error}"
        if not is_exhausted(exhausted):
            raise
    if exhausted:
        others = taken_by_others() if device == "cuda" else ""
        word, reason = NOT_JUDGED, f"the judge itself needs more memory than is free: {others or exhausted}"
    if rejected and device == "cuda" and is_exhausted(reason) and (others := taken_by_others()):
        word, reason, rejected = NOT_JUDGED, f"it ran out of memory, but {others}: {reason}", None
    # After a right result, the text of an exception is the candidate's choice.
    lacks = rejected and rejected.kind == "raised" and not (judgement.checks and judgement.checks.before)
    if lacks and _NEEDS_TOOL.search(reason):
        word, reason, rejected = NOT_JUDGED, f"it needs a program or package that is not here: {reason}", None
    elif lacks and not torch.cuda.is_available() and _NEEDS_GPU.search(reason):
        word, reason, rejected = NOT_JUDGED, f"it needs a GPU, and Torch finds none: {reason}", None
    gpu = str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "no GPU"
    return Verdict(
        verdict=word,
        reason=reason,
        rejected_as=rejected.kind if rejected else None,
        failing_case=rejected.case if rejected else None,
        task=task.name,
        task_digest=task.digest,
        candidate_digest=candidate.digest,
        sandbox=kind,
        device=f"cpu, {torch.get_num_threads()} threads" if device == "cpu" else gpu,
        seconds=round(time.monotonic() - started, 3),
        **vars(speed) | {"suspicious": (*judgement.suspicious, *speed.suspicious)},
    )


@dataclass
class _Judgement:
    request: JudgeRequest
    task: Task
    candidate: Candidate
    device: str
    sandbox: str
    choice: random.Random
    notify: Notify
    started: float
    suspicious: list[str] = field(default_factory=list)
    checks: ResultChecks | None = None

    def run(self) -> SpeedReport:
        """Examine the candidate and time it."""
        request, device = self.request, self.device
        with ExitStack() as stack:
            directory = stack.enter_context(temporary_directory())
            file = self._built(directory)
            worker = stack.enter_context(self._worker([directory]))
            self.notify("preparing the reference")
            references, timed, sentences = prepare_references(self.task, device, self.choice)
            self.suspicious += sentences
            modes = request.peers if request.rounds else ()
            peers = stack.enter_context(PeerWorkers(self.task, timed, modes, lambda: self._worker([]), self.notify))
            asked = time.monotonic()
            try:
                worker.ready(_START_SECONDS)
            except WorkerFailure as failure:
                raise MeasureError(
                    f"the candidate's process does not start: {failure}",
                    where=f"sandbox {self.sandbox}",
                    hint="choose another with --sandbox",
                ) from failure
            slowness = max(1.0, (time.monotonic() - asked) / _READY_SECONDS)
            worker.start("load", str(file), MODEL, self.candidate.is_project)
            worker.wait(request.build_seconds)
            for number, reference in enumerate(references):
                worker.ask("model", number, *reference.model_arguments(), seconds=request.build_seconds)
            checks = self.checks = ResultChecks(
                worker,
                references,
                self.task.settings.tolerance,
                request.call_seconds,
                compares_errors=not self.task.workloads
                or (self.task.is_elementwise and not request.inputs_of_task_only),
            )
            inputs = affordable(request.inputs, references)
            if inputs < request.inputs:
                self.suspicious.append(f"Only {inputs} inputs were checked, since drawing them or a call takes long.")
            seeds = [self.choice.getrandbits(48) for _ in range(inputs)]
            self.notify(f"checking {inputs} inputs of {len(references)} shapes")
            with peers.paused():
                checks.check(seeds)
                if request.inputs_of_task_only:
                    self.suspicious.append("Only the task's own inputs and parameters were checked.")
                else:
                    self.notify("checking other inputs")
                    checks.check_outside(self.task, self.choice.getrandbits(48), request.build_seconds)
            self.suspicious += checks.suspicious
            self.suspicious += self.candidate.suspicions(references[0].dtype or "float32")
            if request.is_built and self.candidate.is_project:
                self.suspicious.append(
                    "The judge did not build its packages: nothing says that they are of its sources."
                )
            if not request.rounds:
                return SpeedReport()
            self.notify(f"waiting for {', '.join(peers.workers)}")
            wait = slowness * _CPU_SECONDS - (time.monotonic() - self.started) if device == "cpu" else 600.0
            worker.stop()
            for reference in timed:
                reference.count_operations()  # peers compile meanwhile
            peers.finish(wait)
            end = (self.started if device == "cpu" else time.monotonic()) + slowness * _TIMED_SECONDS[device]
            report = measure_speed(
                worker, peers, timed, checks, request.rounds, request.call_seconds, end, self.choice, self.notify
            )
            # A candidate that counts its calls cannot know which one is the last.
            checks.check([self.choice.getrandbits(48) for _ in references])
            if not request.inputs_of_task_only:
                checks.check_outside(self.task, self.choice.getrandbits(48), request.build_seconds)
            return report

    def _built(self, directory: Path) -> Path:
        file = self.candidate.file
        if not self.candidate.is_project and file.is_file() and _LOADS.search(file.read_text(errors="replace")):
            raise RejectedError(
                "build-failed",
                "kernel_builder.load needs the builder's compilers, which the sandbox lacks; use load_inline of "
                "torch.utils.cpp_extension, or write a kernel project with a build.toml",
            )
        try:
            return self.candidate.prepared(directory, self.device, is_built=self.request.is_built)
        except KernelBuilderError as error:
            output = error.output.strip()[-1500:] if isinstance(error, BuildError) else ""
            text = f"{error}{f' ({error.hint})' if error.hint else ''}{f': {output}' if output else ''}"
            text = text.replace(str(directory), "")
            if isinstance(error, (ToolchainError, VariantError)):
                verb = "load" if self.request.is_built else "build"
                raise MachineError(f"this machine cannot {verb} it for {self.device}: {text}") from error
            raise RejectedError("build-failed", text) from error

    def _worker(self, readable: Sequence[Path]) -> WorkerProcess:
        arena, threads = 0, torch.get_num_threads()
        if self.device != "cpu":
            arena = min(_ARENA_BYTES, int(torch.cuda.get_device_properties(None).total_memory) // _ARENA_SHARE)
        return WorkerProcess(self.sandbox, self.device, readable=readable, arena_bytes=arena, threads=threads)


def prepare_references(
    task: Task, device: str, choice: random.Random
) -> tuple[list[Reference], list[Reference], list[str]]:
    """Return the reference at the sizes to time, at the task's further ones, and at sizes of the judge's choice.

    Returns:
        Also those to time, and notes for the verdict, in sentences.
    """
    if task.workloads:
        return fitting_workloads(task, device, choice.getrandbits(48))
    settings = task.settings
    dtypes: Sequence[str | None] = settings.dtypes or (None,)
    sizes = fitted(task, device)
    others = unseen(task, sizes, _UNSEEN, choice)
    given = [{**sizes, **shape} for shape in settings.shapes]
    seed = choice.getrandbits(48)
    cut = [] if others or given else cut_lengths(task, sizes, device, _UNSEEN, choice)
    shapes = [(sizes, {}), *((changed, {}) for changed in (*given, *others)), *((sizes, lengths) for lengths in cut)]
    references = [
        Reference(task, changed, dtypes[number % len(dtypes)], device, seed, lengths=lengths)
        for number, (changed, lengths) in enumerate(shapes)
    ]
    known = {(str(reference.sizes), reference.dtype) for reference in references if not reference.lengths}
    references += [Reference(task, sizes, dtype, device, seed) for dtype in dtypes if (str(sizes), dtype) not in known]
    sentences = []
    if len(shapes) == 1:
        sentences.append("The task has no sizes that can be changed: only one shape was checked.")
    if not references[0].has_exact:
        sentences.append("The reference draws random numbers or has no float64: results were compared with eager's.")
    if references[0].statistics:
        sentences.append(
            f"A call of the reference changes {', '.join(sorted(references[0].statistics))}: not compared."
        )
    timed = references[: max(1, min(len(references), 1 + len(settings.shapes or (1,))))]
    return references, timed, sentences
