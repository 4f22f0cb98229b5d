"""The build backend of a project with the `pyproject.toml` of `create-pyproject`: pip builds and installs the kernel.

pip calls the functions `build_wheel` and `build_editable` of PEP 517 and PEP 660 in the directory of a project. An
editable install puts the package in `build/` on Python's path, so later builds need no reinstallation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata

from kernel_builder import pipeline
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.develop import choice
from kernel_builder.package import wheel_archive
from kernel_builder.toolchain import Toolchains
from kernel_format import files
from kernel_format.errors import ConfigError

NAME = "pyproject.toml"
CONTENT = Path(__file__).with_name("project.toml").read_text()


def create(directory: Path, *, overwrite: bool = False) -> Path:
    """Write the `pyproject.toml` of a project."""
    file = read_project(directory).root / NAME
    if file.exists() and file.read_text() != CONTENT and not overwrite:
        raise ConfigError("the file exists, with other content", where=str(file), hint="use --force to replace it")
    files.write_atomically(file, CONTENT)
    return file


def build_wheel(wheel_directory: str, config_settings: Mapping[str, Any] | None = None, *_: Any) -> str:
    """Build the variant for this interpreter's Torch, and write a wheel of it. `-C variant=NAME` selects another."""
    project, package = _build(config_settings or {})
    content = {
        f"{project.python_name}/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        # The directory of the package's own name is for loaders that look for the module there.
        if path.is_file() and path.relative_to(package).parts[0] != project.python_name and path.suffix != ".pyc"
    }
    platform = Variant.parse(package.name).platform
    tag = f"linux_{platform.partition('-')[0]}" if platform else "any"
    return _write(wheel_directory, project, tag, content)


def build_editable(wheel_directory: str, config_settings: Mapping[str, Any] | None = None, *_: Any) -> str:
    """As `build_wheel`, but the wheel only puts `build/<variant>` on Python's path."""
    project, package = _build(config_settings or {})
    content = {f"{project.python_name}.pth": f"{package}\n".encode()}
    return _write(wheel_directory, project, "any", content)


def _build(settings: Mapping[str, Any]) -> tuple[Project, Path]:
    toolchains = Toolchains()
    project = read_project(Path())
    variant = choice.to_develop(project, settings.get("variant"), toolchains)
    choice.require_loadable(variant)
    request = pipeline.BuildRequest((project.root,), variants=(variant.name,))
    summary = pipeline.build(request, toolchains)
    if summary.failures:
        raise summary.failures[0].errors[0]
    return project, summary.packages[0].path


def _write(directory: str, project: Project, platform: str, content: Mapping[str, bytes]) -> str:
    about = Metadata.from_raw({"metadata_version": "2.1", "name": project.name, "version": str(project.version)})
    return wheel_archive.write(Path(directory), about, platform, content).name
