"""Layout, metadata and digest: every kind of damage is reported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_format.files import LFS_POINTER
from kernel_format.tree_digest import hash_tree
from tests.support.files import write_files
from tests.support.sample_package import STABLE_CPU, STABLE_CUDA, Compile, Make, findings


def _edit_metadata(package: Path, **changes: object) -> None:
    path = package / "metadata.json"
    changed = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))


def bytecode(package: Path, name: str) -> None:
    write_files(package / "__pycache__", [name])


@pytest.mark.parametrize(
    ("damage", "path", "message"),
    [
        (lambda p: (p / "_ops.py").unlink(), "_ops.py", "is missing"),
        (lambda p: shutil.rmtree(p / "demo_kernel"), "demo_kernel/__init__.py", "is missing"),
        (lambda p: (p / "metadata.json").write_text("{"), "metadata.json", "is not a JSON object"),
        (lambda p: _edit_metadata(p, license=None), "metadata.json", "missing field `license`"),
        (lambda p: _edit_metadata(p, version="1"), "metadata.json", 'invalid type: string "1"'),
        (lambda p: _edit_metadata(p, name="Demo"), "metadata.json", "cannot read it"),
        (lambda p: _edit_metadata(p, backend={"type": "cuda"}), "metadata.json", "the variant is for cpu"),
        (lambda p: _edit_metadata(p, id="demo"), "metadata.json", "expected _demo_kernel_cpu_<unique>"),
        (lambda p: (p / "_ops.py").write_text("ops = None\n"), "_ops.py", "does not register operators under the `id`"),
        (lambda p: (p / "extra.so.1").write_bytes(b"\x7fELF"), "extra.so.1", "is a binary in a variant that is Python"),
        (lambda p: (p / "data.bin").write_bytes(b"\x7fELF"), "data.bin", "is object code besides"),
        (lambda p: (p / "data.json").write_bytes(LFS_POINTER + b"v1\n"), "data.json", "is a pointer of git-lfs"),
        (lambda p: os.mkfifo(p / "pipe.py"), "pipe.py", "is neither a file nor a directory"),
        (lambda p: ((p / "metadata.json").unlink(), os.mkfifo(p / "metadata.json")), "metadata.json", "is missing"),
        (lambda p: (p / "link.py").symlink_to("_ops.py"), "link.py", "is a symbolic link"),
        (lambda p: (p / ".cache").mkdir(), ".cache", "is a hidden file"),
        (lambda p: (p / "a\nb.py").touch(), ".", r"'a\nb.py' has characters that cannot be shown"),
        (lambda p: (p / "_OPS.py").touch(), ".", "would be one file where case does not count"),
        (lambda p: (p / "op.pyc").touch(), "op.pyc", "is bytecode"),
        (lambda p: bytecode(p, "op.py"), "__pycache__/op.py", "is in a directory for bytecode"),
        (lambda p: p.rename(p.parent / "torch-nothing"), ".", "'torch-nothing' is not a variant's name"),
        (lambda p: (p / "__init__.py").write_text("changed"), "__init__.py", "than the digest of metadata.json"),
        (lambda p: (p / "_ops.py").unlink(), "_ops.py", "is in the digest of metadata.json but not in the package"),
        (lambda p: (p / "new.py").touch(), "new.py", "is in the package but not in the digest"),
        (lambda p: _edit_metadata(p, digest=None), "metadata.json", "has no `digest`"),
    ],
)
def test_a_damaged_package(make: Make, damage: Callable[[Path], object], path: str, message: str) -> None:
    package = make("torch-cpu")
    assert findings(package, "layout", "digest") == []
    damage(package)
    reported = findings(next(package.parent.iterdir()), "digest" if "digest" in message else "layout")
    assert [finding.path for finding in reported if message in finding.message] == [path]


def test_bytecode_that_python_writes_is_no_damage(make: Make) -> None:
    package = make("torch-cpu")
    bytecode(package, "op.cpython-311.pyc")
    assert findings(package, "layout") == []


def test_a_compiled_variant_has_one_binary_and_its_capabilities(compile_module: Compile, make: Make) -> None:
    without = make(STABLE_CPU)
    assert [(f.path, f.message) for f in findings(without, "layout")] == [
        (".", "expected exactly one binary, found none")
    ]
    (finding,) = findings(make(STABLE_CUDA, compile_module(STABLE_CUDA), backend={"type": "cuda"}), "layout")
    assert "`backend.archs` is missing or empty" in finding.message


def test_the_digest_of_a_tree_is_what_sha256sum_gives(make: Make) -> None:
    package = make("torch-cpu", files={"sub dir/ä.py": "x"})
    command = "find * -type f | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum"
    printed = subprocess.run(command, shell=True, cwd=package, capture_output=True, text=True, check=True).stdout
    assert hash_tree(package).value == printed.split()[0]
