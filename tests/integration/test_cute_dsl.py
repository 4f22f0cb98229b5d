"""Functions of CuTe DSL become binary packages: by the real CuTe DSL and compilers, without a GPU."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_builder.aot import generation
from kernel_builder.aot.generation import compiler_component
from kernel_builder.config import known_backends
from kernel_builder.config.project_files import read_project
from kernel_builder.toolchain import Toolchains
from kernel_format.cache_directory import default_cache
from kernel_format.errors import ConfigError
from tests.integration.test_aot import build
from tests.support.places import CUDA, ROOT


@pytest.fixture(scope="module", autouse=True)
def _cute_dsl() -> None:
    tools = Toolchains()
    trees = tools.lock.get(compiler_component({"language": "cute-dsl"}), {})
    if not trees or tools.store.find(trees["any"].name) is None:
        pytest.skip("CuTe DSL is not in the toolchain store: kernel-builder build of a project in it fetches it")


def project(directory: Path, change: Callable[[str], str] = lambda text: text, capabilities: str = '["9.0"]') -> Path:
    """Return the example with one op and one dtype."""
    example = ROOT / "examples/cute-dsl/row_norm"
    shutil.copytree(example, directory, ignore=shutil.ignore_patterns("build", "__pycache__"))
    table = (directory / "aot.toml").read_text().partition("[op.rms_norm]")[0]
    table = table.replace('["float16", "bfloat16", "float32"]', '["float32"]')
    (directory / "aot.toml").write_text(f"capabilities = {capabilities}\n{table}")
    module = directory / "torch-ext/row_norm/kernels.py"
    text = re.sub(r"\ndef rms_norm\(.*", "", module.read_text(), flags=re.DOTALL)
    module.write_text(change(text))
    module.with_name("layouts.py").write_text("import cutlass\n")
    return directory


def test_the_binary_package_has_no_cute_dsl(tmp_path: Path) -> None:
    root = project(tmp_path / "p", capabilities='["8.0", "9.0"]')
    answer = build(root, "--capability", "8.0", "--keep-generated", str(tmp_path / "shown"))
    assert [package["variant"] for package in answer["packages"]] == [CUDA], answer
    package = root / "build" / CUDA
    assert not any("cutlass" in path.read_text() for path in package.rglob("*.py"))
    (library,) = package.glob("*.so")
    assert b"libcuda.so" not in library.read_bytes()
    assert json.loads((package / "metadata.json").read_text())["backend"]["archs"] == ["8.0", "9.0"]
    images = (tmp_path / "shown/row-norm/aot/add_scaled_cubins.cpp").read_text()
    assert set(re.findall(r'{(\d+), false, image_\d, "[^"]+", 0, 0, 0}', images)) == {"80", "90"}


def test_two_generated_projects_have_the_same_bytes(tmp_path: Path) -> None:
    """Of other directories, with other caches."""
    generated = []
    for name in ("a", "b"):
        (tmp_path / name / "cache").mkdir(parents=True)
        (tmp_path / name / "cache/toolchains").symlink_to(default_cache() / "toolchains")
        toolchains = Toolchains(cache=tmp_path / name / "cache")
        author = read_project(project(tmp_path / name / "p"))
        made = generation.generate(author, known_backends.get("cuda"), toolchains, "auto")
        assert made.root.is_relative_to(tmp_path / name)
        files = [path for path in made.root.rglob("*") if path.is_file()]
        generated.append({path.relative_to(made.root): path.read_bytes() for path in files})
    assert generated[0] == generated[1]


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        (lambda text: text.replace("cute.ceil_div(", "cute.ceil_divide("), r"kernels\.py:\d+$", "ceil_divide"),
        (lambda text: text.replace(", stream=stream", ""), r"kernels\.py$", "a launch without the stream"),
    ],
)
def test_a_function_that_cannot_be_compiled_is_an_error(
    tmp_path: Path, change: Callable[[str], str], where: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        generation.generate(
            read_project(project(tmp_path / "p", change)), known_backends.get("cuda"), Toolchains(), "auto"
        )
    assert re.search(where, str(caught.value.where))
