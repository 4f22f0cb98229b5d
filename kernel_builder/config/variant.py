"""The variants that the builder builds: their names, read with the builder's back ends."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_builder.config import known_backends
from kernel_builder.config.project import Backend, CompiledFramework
from kernel_format import variant
from kernel_format.errors import VariantError
from kernel_format.release import Release
from kernel_format.variant import Abi, FullAbi, Noarch, StableAbi, TvmFfiAbi, this_platform

__all__ = ["PLATFORMS", "Abi", "FullAbi", "Noarch", "Release", "StableAbi", "TvmFfiAbi", "Variant", "this_platform"]

PLATFORMS = ("x86_64-linux", "aarch64-linux")


@dataclass(frozen=True)
class Variant(variant.Variant):
    """A variant whose back end is the builder's."""

    backend: Backend

    def stable_abi(self, framework: CompiledFramework) -> Release | None:
        """Return the Torch release whose stable ABI the binary targets, or None for the full C++ ABI.

        A project on the stable ABI publishes its stable binary under the names of single, later Torch releases too.
        """
        oldest = framework.stable_abi.get(self.backend)
        is_earlier = oldest and isinstance(self.framework, FullAbi) and self.framework.release < oldest
        return None if is_earlier else oldest

    @staticmethod
    def parse(name: str) -> Variant:
        """Read a variant's directory name.

        Raises:
            VariantError: If the name does not follow the grammar, or names a framework, back end or platform that the
                builder does not build.
        """
        parsed = variant.parse(name)
        backend = known_backends.get(parsed.backend.name)
        if parsed.platform and (parsed.platform not in PLATFORMS or backend not in known_backends.compiled_for()):
            raise VariantError(
                f"this builder compiles no {backend} kernels for {parsed.platform}",
                where=name,
                hint=f"it compiles for {', '.join(known_backends.COMPILED)} on {' and '.join(PLATFORMS)}",
            )
        return Variant(parsed.framework, backend, parsed.release, parsed.platform)

    @staticmethod
    def find(name: str) -> Variant | None:
        """Read a variant's directory name as `parse` does, and return None for any other name."""
        try:
            return Variant.parse(name)
        except VariantError:
            return None
