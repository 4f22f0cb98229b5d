"""Where tests find the repository and its sample projects, and the variants that they build."""

from pathlib import Path

from kernel_builder import toml_file

ROOT = Path(__file__).resolve().parents[2]
# The directories of the distributions that the builder imports.
LIBRARIES = tuple(f"packages/kernel-{name}" for name in ("format", "sandbox", "aot", "emulator"))
PROJECTS = ROOT / "tests" / "projects"

CPU = "torch-stable-abi210-cpu-x86_64-linux"
CUDA = "torch-stable-abi210-cu130-x86_64-linux"
SOURCES: dict[str, str] = toml_file.read(Path(__file__).with_name("sources.toml"))
