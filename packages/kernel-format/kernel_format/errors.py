"""Every error that a user can cause, with its exit code.

An error names the place (a file and key, a variant, a host), states the expected value, and gives the command or edit
that corrects it. Only the command line prints errors.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
_REMEDIES = dict.fromkeys(_UNWRITABLE, "free some space, change the permissions, or name another place")


class KernelBuilderError(Exception):
    """Base of all errors that a user can cause.

    Args:
        message: The problem and the expected value, in one sentence without a newline.
        where: The file and key, variant or path concerned, such as `build.toml: [kernel.relu] src`.
        hint: The remedy: a command, an edit, or a page to read.
    """

    exit_code = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    def as_dict(self) -> dict[str, str | None]:
        """Return the error as `--json` prints it."""
        return {"error": type(self).__name__, "message": self.message, "where": self.where, "hint": self.hint}


class ConfigError(KernelBuilderError):
    """`build.toml`, a file that it names, or an argument is wrong."""

    exit_code = 2


class VariantError(KernelBuilderError):
    """A variant is unknown, or this project or machine cannot build it."""

    exit_code = 3


class ToolchainError(KernelBuilderError):
    """A compiler, header or library is missing, too old, or differs from the lock."""

    exit_code = 4


class FetchError(ToolchainError):
    """The package index cannot be reached, or its files differ from the lock."""


class StoreError(ToolchainError):
    """The toolchain store or the cache cannot be written."""


class BuildError(KernelBuilderError):
    """A compile or link step failed.

    Args:
        command: The command of the step.
        output: The compiler's output.
        log: A file with both.
    """

    exit_code = 5

    def __init__(
        self, message: str, *, command: str | None = None, output: str = "", log: str | None = None, **place: str | None
    ) -> None:
        super().__init__(message, **place)
        self.command = command
        self.output = output
        self.log = log

    def as_dict(self) -> dict[str, str | None]:
        return {**super().as_dict(), "command": self.command, "output": self.output, "log": self.log}


class PackageError(KernelBuilderError):
    """A package could not be assembled or moved into place."""

    exit_code = 6


class CheckError(KernelBuilderError):
    """A check has findings that make a package unfit for publishing."""

    exit_code = 7


class MeasureError(KernelBuilderError):
    """A kernel cannot be measured."""

    exit_code = 8


class HubError(KernelBuilderError):
    """A Hub refuses a request, does not have a file or repository, or cannot be reached."""

    exit_code = 9


class VerificationError(KernelBuilderError):
    """A published kernel does not match its digest, signature or source, or a signature cannot be made."""

    exit_code = 10


class NothingToBuildError(KernelBuilderError):
    """The projects are valid, but this builder supports none of their variants."""

    exit_code = 12  # 11 is the judge's


def system_error(error: OSError) -> KernelBuilderError:
    """Return the error of a file that cannot be read or written, with the remedy."""
    where = str(error.filename) if error.filename else None
    return KernelBuilderError(error.strerror or str(error), where=where, hint=_REMEDIES.get(error.errno or 0))


class SeveralErrors(KernelBuilderError):
    """Several errors of one command. The exit code is theirs if they have the same, else 1."""

    def __init__(self, errors: Sequence[KernelBuilderError]) -> None:
        texts = [str(error).splitlines()[0] for error in errors[:3]] + ["..."] * bool(errors[3:])
        super().__init__("; ".join(texts))
        codes = {error.exit_code for error in errors}
        self.errors = tuple(errors)
        self.exit_code = codes.pop() if len(codes) == 1 else KernelBuilderError.exit_code
