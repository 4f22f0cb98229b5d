"""Candidates: a Python file with `ModelNew`, a kernel project with such a file, or the form of the task's format."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from kernel_builder.api import build_for_device, in_work_tree, require_built
from kernel_format.errors import ConfigError, KernelBuilderError
from kernel_format.files import temporary_directory, write_files
from kernel_judge.judge.candidate_files import candidate_digest, copy_candidate, files_of
from kernel_tasks import Files, Task
from kernel_tasks.task import CANDIDATE

MODEL = "ModelNew"
_DEFINITION = re.compile(rf"^(class\s+{MODEL}\b|{MODEL}\s*=[^=])", re.MULTILINE)
# Names in programs that call a kernel of their own.
_KERNELS = re.compile(
    r"load_inline|cpp_extension|triton|cutlass|get_kernel|get_local_kernel|torch\.ops|ctypes|__global__"
)
_BUILD_BYTES = 4 << 30  # of packages, beside the limit for sources
_CASTS = ("bfloat16", "float16", ".half()", "float8", "allow_tf32", "set_float32_matmul_precision", "quantize")


@dataclass(frozen=True)
class Candidate:
    """Code that claims to solve a task."""

    path: Path  # the file or directory, of which nothing else writes
    file: Path  # the Python file that defines `ModelNew`
    digest: str
    is_project: bool
    files: Files | None = None  # a program with this form's candidate, in place of the file

    def prepared(self, directory: Path, device: str, *, is_built: bool = False) -> Path:
        """Copy the candidate to a directory, build it there if it is a project, and return the file with `ModelNew`.

        With `is_built`, the packages in the project's `build/` are taken instead of building.
        """
        if self.files:
            write_files(directory, self.files)
            return directory / CANDIDATE
        if not self.is_project:
            return Path(shutil.copy(self.file, directory))
        copy = directory / self.path.name
        copy_candidate(self.path, copy)
        if is_built:
            require_built(self.path, device)
            copy_candidate(self.path / "build", copy / "build", Counter(bytes=-_BUILD_BYTES))
        else:
            capability = () if device == "cpu" else (".".join(map(str, torch.cuda.get_device_capability())),)
            build_for_device(copy, device, capabilities=capability)  # for the GPU of this machine alone
        return copy / self.file.name

    def suspicions(self, dtype: str) -> list[str]:
        """Return suspicious facts about its source, in sentences."""
        files = files_of(self.path) if self.path.is_dir() else [self.path]
        files = [path for path in files if not self.is_project or path.suffix == ".py"]
        text = "\n".join(dict.fromkeys(path.read_text(encoding="utf-8", errors="replace") for path in files))
        sentences = []
        if not self.is_project and not _KERNELS.search(text):
            sentences.append("It has no kernel of its own: it calls only PyTorch's operations.")
        if dtype == "float32" and (casts := [name for name in _CASTS if name in text]):
            sentences.append(f"Its source names a lower precision: {', '.join(casts)}.")
        return sentences


@contextmanager
def frozen(candidate: Path, *, with_build: bool = False) -> Iterator[Path]:
    """Yield a copy of a candidate: the judgement, the digest and the signature are of the same files.

    It has no links: for those of a kernel project, files of its git work tree are copied in their places; others are
    left out. Errors name the original.

    Raises:
        ConfigError: If there is no candidate, or a file of it cannot be copied.
    """
    if not candidate.exists():
        hint = "name a file or a directory"
        raise ConfigError("does not exist; expected a candidate", where=str(candidate), hint=hint)
    real = candidate.resolve()
    with temporary_directory() as directory:
        copy, taken = directory / real.name, Counter[str]()
        try:
            links = copy_candidate(real, copy, taken)
            for inside in links if (real / "build.toml").is_file() else ():
                if in_work_tree(real, real / inside):
                    copy_candidate((real / inside).resolve(), copy / inside, taken)
            if with_build and (real / "build").is_dir():
                copy_candidate(real / "build", copy / "build", Counter(bytes=-_BUILD_BYTES))
        except OSError as error:
            hint = "it consists of regular files that the user may read"
            raise ConfigError(f"cannot be copied: {error}", where=str(candidate), hint=hint) from error
        try:
            yield copy
        except KernelBuilderError as error:
            error.where = error.where and error.where.replace(str(copy), str(candidate))
            raise


def read_candidate(path: Path, task: Task) -> Candidate:
    """Read a candidate in the form of the task's format, a file that defines `ModelNew`, or a project with one."""
    is_project = path.is_dir() and (path / "build.toml").is_file()
    is_model = path.suffix == ".py" and path.is_file() and _defines_model(path)
    if path.exists() and not is_project and not is_model and (program := task.candidate_files(path)):
        return Candidate(path, path, candidate_digest(path), is_project=False, files=program)
    if path.is_dir():
        if not is_project:
            raise ConfigError(
                "has no build.toml; a candidate is a Python file or a kernel project",
                where=str(path),
                hint="name the Python file, or create a project with `kernel-builder init`",
            )
        files = [file for file in sorted(path.glob("*.py")) if file.is_file() and _defines_model(file)]
        if len(files) != 1:
            raise ConfigError(
                f"has {len(files)} Python files beside build.toml that define {MODEL}; expected one",
                where=str(path),
                hint=f"write candidate.py with a torch.nn.Module named {MODEL} that loads the kernel beside it",
            )
        return Candidate(path, files[0], candidate_digest(path), is_project=True)
    return Candidate(path, path, candidate_digest(path), is_project=False)


def _defines_model(file: Path) -> bool:
    return bool(_DEFINITION.search(file.read_text(encoding="utf-8", errors="replace")))
