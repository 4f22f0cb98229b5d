"""Every error a user can cause, each with what to do next.

An error names the place (a file and key, a variant, a host name), says what was expected, and gives the
command or edit that mends it. The command line prints it and exits with `exit_code`; nothing else in the
builder prints errors.
"""

from __future__ import annotations


class KernelBuilderError(Exception):
    """Base of all errors that a user can cause.

    Args:
        message: What is wrong and what was expected, one sentence, no trailing newline.
        where: The file and key, variant or path concerned, e.g. `build.toml: [kernel.relu] src`.
        hint: What to do about it: a command, an edit, or a page to read.
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
        """The error as `--json` prints it."""
        return {
            "error": type(self).__name__,
            "message": self.message,
            "where": self.where,
            "hint": self.hint,
        }


class ConfigError(KernelBuilderError):
    """`build.toml` or a file it names is wrong."""

    exit_code = 2


class VariantError(KernelBuilderError):
    """An unknown variant, or one that this project or machine cannot build."""

    exit_code = 3


class ToolchainError(KernelBuilderError):
    """A compiler, header or library is missing, too old, or not what the lock says."""

    exit_code = 4


class FetchError(ToolchainError):
    """The package index could not be reached, or sent something else than the lock pins."""


class StoreError(ToolchainError):
    """The toolchain store or the cache cannot be written."""


class BuildError(KernelBuilderError):
    """A compile or link step failed. `output` is the compiler's own words."""

    exit_code = 5

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        command: str | None = None,
        output: str = "",
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.command = command
        self.output = output

    def as_dict(self) -> dict[str, str | None]:
        return {**super().as_dict(), "command": self.command, "output": self.output}


class PackageError(KernelBuilderError):
    """A package could not be assembled or moved into place."""

    exit_code = 6


class CheckError(KernelBuilderError):
    """A check has findings that stop the build."""

    exit_code = 7


class MeasureError(KernelBuilderError):
    """Measuring cannot go on."""

    exit_code = 8


class HubError(KernelBuilderError):
    """A Hub refuses, lacks what is asked for, or cannot be reached."""

    exit_code = 9


class VerificationError(KernelBuilderError):
    """A published kernel is not what its digest, its signature or its source say, or a signature cannot be made."""

    exit_code = 10
