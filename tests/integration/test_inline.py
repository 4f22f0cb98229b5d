"""`kernel_builder.load` compiles one source, and `init --from` creates a project from it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import kernel_builder
from kernel_builder.develop import inline
from kernel_format.errors import BuildError, ConfigError, VariantError
from tests.support.cli import expect, invoke
from tests.support.files import write_files
from tests.support.places import CUDA, ROOT, SOURCES

SOURCE = SOURCES["inline_functions"]

PAGE = (ROOT / "docs" / "one-source.md").read_text()
ON_CUDA, ON_CPU = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_functions_are_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {"scaled": lambda x, factor, shift: torch.empty_like(x)}
    loaded = kernel_builder.load(SOURCE, ["scaled", "double_in_place", "copies"], fakes=fakes)
    x = torch.randn(3, 5)
    assert torch.equal(loaded.scaled(x, 3.0, None), 3 * x)
    assert torch.equal(loaded.scaled(x, 3.0, 2), 3 * x + 2)
    first, second = loaded.copies(x, False)
    assert torch.equal(first, x) and not second.any()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def graph(x: torch.Tensor) -> torch.Tensor:
        y = loaded.scaled(x, 2.0, 1)
        loaded.double_in_place(y)
        return y

    assert torch.equal(graph(x), 4 * x + 2)
    torch.library.opcheck(loaded.scaled, (x, 2.0, 1))

    def forbidden(*arguments: object, **options: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("kernel_builder.develop.choice.build", forbidden)
    assert torch.equal(kernel_builder.load(SOURCE, ["scaled", "double_in_place", "copies"]).scaled(x, 1.0, None), x)


def test_errors_name_the_mistake() -> None:
    with pytest.raises(ConfigError, match="defines no function 'other'") as caught:
        kernel_builder.load(SOURCE, "other")
    assert caught.value.hint == "it has scaled, double_in_place, copies"
    with pytest.raises(ConfigError, match="'other' is not one of the loaded functions"):
        kernel_builder.load(SOURCE, "scaled", fakes={"other": torch.empty_like})
    if torch.version.cuda is None:
        with pytest.raises(VariantError, match=r"has CUDA kernels, and the installed Torch .* is not for CUDA"):
            kernel_builder.load("__global__ void f() {}", "f")
    with pytest.raises(BuildError, match=r"inline\.cpp:2:.*nothing_like_this"):
        kernel_builder.load("\nTensor broken(const Tensor& x) { return nothing_like_this(x); }\n", "broken")
    with pytest.raises(BuildError) as refused:
        kernel_builder.load("void f(const Tensor& x, float factor) {}", "f")
    assert "Tensor, double, int64_t" in str(refused.value.hint)


def test_code_for_another_gpu_is_refused(tmp_path: Path) -> None:
    described = json.dumps({"backend": {"type": "cuda", "archs": ["7.5", "9.0a"]}})
    write_files(tmp_path, {f"build/{CUDA}/metadata.json": described})
    for capability in ("7.5", "9.0"):
        inline._check_device(tmp_path, [capability])
    with pytest.raises(VariantError, match=r"no code for this GPU, of capability 10\.0; .* code for 7\.5, 9\.0a"):
        inline._check_device(tmp_path, ["10.0"])


def test_the_example_of_the_page() -> None:
    exec(ON_CPU, {})


def test_the_table_of_the_page_turns_a_source_of_load_inline_into_its_example() -> None:
    before = SOURCES["function_of_load_inline"]
    for old, new in re.findall(r"^\| (`.*) \| (`.*) \|$", PAGE, re.MULTILINE):
        for name, replacement in zip(re.findall("`(.*?)`", old), re.findall("`(.*?)`", new), strict=True):
            before = before.replace(name, replacement)
    assert before in ON_CUDA


def test_a_project_is_created_from_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The CUDA source of the page compiles, and its command creates a project."""
    (source,) = re.findall(r'load\(\s*r"""(.*?)"""', ON_CUDA, re.DOTALL)
    (command,) = re.findall(r"kernel-builder (init .*)", PAGE)
    monkeypatch.chdir(tmp_path)
    Path("scale.cu").write_text(source)
    for arguments in (command.split(), ["build", "scale", "--variant", CUDA, "--capability", "9.0"]):
        steps = "" if arguments[0] == "build" else "pytest scale/tests\n  kernel-builder benchmark scale"
        expect(0, steps, *arguments)
    created = {path.relative_to("scale").as_posix() for path in Path("scale").rglob("*") if path.is_file()}
    for name in ("scale.cu", "README.md", "CARD.md", ".gitignore", "tests/test_scale.py", "benchmarks/benchmark.py"):
        assert name in created
    assert source.strip() in Path("scale/scale.cu").read_text()
    tests = Path("scale/tests/test_scale.py")
    formula = 'pytest.skip(f"Not written yet: the formula of {name}, in PyTorch")'
    for text, passed in ((formula, "1 passed, 1 skipped"), ("return arguments[0] * arguments[1]", "2 passed")):
        tests.write_text(tests.read_text().replace(formula, text))
        emulated = invoke("emulate", "scale", "--", "-q")  # in this process, which has imported Torch
        assert emulated.exit_code == 0 and passed in capfd.readouterr().out, emulated.output
