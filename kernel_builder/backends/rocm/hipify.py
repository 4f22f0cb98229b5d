"""Runs Torch's hipify, which turns CUDA sources into HIP, on a copy of a project's files.

A translation takes tenths of a second, and every plan of a build needs it, so it is kept in the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import io
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType

from kernel_builder.probe_cache import ProbeCache
from kernel_format.errors import ConfigError
from kernel_format.files import write_files

_MODULE = "kernel_builder_hipify"
# Increase when this module calls hipify in another way, or processes its output differently.
_FORM = 1


@dataclass(frozen=True)
class Translation:
    """A source in HIP."""

    source: str  # the path of the source, relative to the project; hipify renames `.cu` to `.hip`
    files: Mapping[str, str]  # path relative to the project -> text, of the files that differ from the project's


def translate(
    torch_utils: Path, project: Path, source: str, files: Sequence[str], include: Sequence[str], kept: ProbeCache
) -> Translation:
    """Translate a source and the headers that it includes.

    Args:
        torch_utils: The directory with hipify's package.
        files: The files that the source can reach, itself included, relative to the project.
        include: Directories of headers, relative to the project.
        kept: The translations of this hipify.

    Raises:
        ConfigError: If hipify cannot read or translate one.
    """
    contents = {name: (project / name).read_bytes() for name in sorted({source, *files})}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    topic = json.dumps([_FORM, source, digests, list(include)])
    translated = partial(_translated, torch_utils, source, contents, include)
    try:
        return Translation(**kept.recall(topic, (), translated, "source", "files"))
    except Exception as error:  # of a program that is not the builder's
        raise ConfigError(
            f"torch.utils.hipify cannot translate it, or a header that it includes: {type(error).__name__}: {error}",
            where=str(project / source),
            hint="hipify reads UTF-8, and has to find the end of each kernel launch and macro; or write the source in "
            "HIP, in a file that ends in .hip",
        ) from error


def _translated(
    torch_utils: Path, source: str, contents: Mapping[str, bytes], include: Sequence[str]
) -> dict[str, object]:
    """Return the fields of a `Translation`."""
    hipify = _hipify(torch_utils)
    with tempfile.TemporaryDirectory() as copied:
        root = Path(copied).resolve()
        write_files(root, contents)
        hipify.HIPIFY_FINAL_RESULT.clear()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            results = hipify.hipify(
                str(root),
                output_directory=str(root),
                includes=[f"{root}/*"],
                extra_files=[str(root / source)],
                header_include_dirs=[entry for entry in include if (root / entry).is_dir()],
                is_pytorch_extension=True,
                hipify_extra_files_only=True,
                hip_clang_launch=True,  # clang takes kernel<<<...>>>
            )
        files, translated = {}, source
        for original, result in results.items():
            if result.hipified_path is None:
                continue
            name, before = (str(Path(path).relative_to(root)) for path in (result.hipified_path, original))
            text = Path(result.hipified_path).read_text(encoding="utf-8")
            if before == source:
                translated = name
            if name != before or text.encode() != contents[before]:
                files[name] = _with_lines_of(before, contents[before].decode(), text)
        return {"source": translated, "files": files}


def _with_lines_of(name: str, original: str, text: str) -> str:
    """Let compilers name the lines of the original. hipify keeps lines, and adds some at the beginning."""
    lines = text.splitlines(keepends=True)
    added = len(lines) - len(original.splitlines())
    return "".join([*lines[:added], f'#line 1 "src/{name}"\n', *lines[added:]]) if added >= 0 else text


@lru_cache(maxsize=1)
def _hipify(torch_utils: Path) -> ModuleType:
    """Import hipify under a name of its own. Torch itself need not be installed."""
    package = torch_utils / "hipify"
    spec = importlib.util.spec_from_file_location(
        _MODULE, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec and spec.loader
    sys.modules[_MODULE] = module = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # the store is read-only
    try:
        spec.loader.exec_module(module)
        return importlib.import_module(f"{_MODULE}.hipify_python")
    finally:
        sys.dont_write_bytecode = writes
