"""Check that a binary does not call functions that end the process of its user."""

from __future__ import annotations

from collections.abc import Iterator

from kernel_builder.checks.findings import CheckedPackage, Finding
from kernel_builder.config.variant import TvmFfiAbi
from kernel_builder.plural import listed

NAME = "process-end"
# std::terminate is left out: compilers call it in every function that is marked noexcept.
_FUNCTIONS = frozenset({"abort", "exit", "_exit", "_Exit", "quick_exit", "kill", "raise", "__assert_fail"})


def check_process_end(package: CheckedPackage) -> Iterator[Finding]:
    if package.variant and isinstance(package.variant.framework, TvmFfiAbi):
        return  # the static runtimes of CUDA and Rust, which such binaries contain, call them
    for binary in package.binaries:
        called = sorted({symbol.name for symbol in binary.undefined} & _FUNCTIONS)
        if called:
            yield Finding(
                NAME,
                binary.name,
                f"calls {listed(called)}, which can end the user's process",
                "throw an exception instead, by STD_TORCH_CHECK or TORCH_CHECK; -DNDEBUG removes assert()",
                "warning",
            )
