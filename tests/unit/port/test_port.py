"""`kernel-builder port` runs a setup.py in a sandbox, and names each argument that build.toml does not have."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernel_builder import toml_file
from kernel_builder.config.project_files import read_project
from kernel_builder.port.setup_runs import run_setup
from kernel_builder.steps import confinement
from kernel_sandbox.confine import BUBBLEWRAP
from tests.support import public_parser
from tests.support.cli import expect, invoke
from tests.support.files import write_files
from tests.support.sandboxes import skip_unless

SETUPS = toml_file.read(Path(__file__).with_name("setups.toml"))
SETUP, DECISIONS, HEAD, STRANGE, BINDING = (SETUPS[key] for key in ("whole", "decisions", "head", "strange", "binding"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "setup.py": SETUP,
        "csrc/fused.cpp": BINDING,
        "csrc/fused.h": '#pragma once\n#include "cuda/launch.h"\n#include <vector>\n',
        "csrc/cuda/launch.h": "#pragma once\n",
        "csrc/cuda/fused_cuda.cu": '#include "../fused.h"\n',
    }
    return write_files(tmp_path / "project", files)


@pytest.fixture(autouse=True, scope="module")
def sandbox() -> None:
    """The scripts of these tests write files elsewhere, so they do not run without a sandbox."""
    skip_unless(BUBBLEWRAP, BUBBLEWRAP if confinement.chosen("auto", None).kind else None)


def as_json(*args: str | Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(expect(0, "", "port", "--json", *args).stdout)
    return read


def line(words: str) -> int:
    return next(number for number, text in enumerate(SETUP.splitlines(), 1) if words in text)


def test_extensions_become_kernels(project: Path) -> None:
    expect(0, "", "port", project / "setup.py", "--name", "org/fused-ops")
    assert not (project / "written.txt").exists(), "the script runs on a copy"
    read = read_project(project)
    assert (read.name, read.license, read.hub_repo_id, read.version) == ("fused-ops", "apache-2.0", "org/fused-ops", 2)
    assert [backend.name for backend in read.backends] == ["cuda", "cpu"], "on a CPU the same call is for the CPU"
    cuda, cpu = read.kernels
    assert cuda.src == ("csrc/fused.cpp", "csrc/cuda/fused_cuda.cu", "csrc/cuda/launch.h", "csrc/fused.h")
    assert cpu.src == ("csrc/fused.cpp", "csrc/cuda/launch.h", "csrc/fused.h")
    assert (cuda.name, cpu.name) == ("fused_cuda", "fused_cpu")
    assert cuda.cuda_capabilities == ("8.0", "12.0+PTX")
    assert cuda.include == cpu.include == ("csrc",)
    assert cuda.cuda_flags == ("-DWITH_TWO=2", "-DWITH_CUDA", "--use_fast_math")
    assert cuda.cxx_flags == ("-DWITH_TWO=2", "-DWITH_CUDA", "-fopenmp")
    assert cpu.cxx_flags == ("-DWITH_TWO=2", "-fopenmp")
    assert [name for name, _ in read.python_files] == ["__init__.py"]


@pytest.mark.attack
def test_links_in_the_project_lead_nowhere(project: Path, tmp_path: Path) -> None:
    (project / "torch-ext").symlink_to(tmp_path)
    expect(2, "torch-ext: is a symbolic link", "port", project / "setup.py")
    assert [*tmp_path.iterdir(), *project.glob("build.toml")] == [project]


def test_remainder_is_listed_with_its_line(project: Path) -> None:
    report = as_json(project, "--dry-run")
    call = line("kind(")
    left_out = {entry["text"] for entry in report["left-out"] if entry["line"] == call}
    assert left_out == {
        "libraries = cublas: the builder links the libraries of docs/linking.md",
        "include_dirs: '../elsewhere' is outside the directory of setup.py",
        "include_dirs: <unknown torch.utils.cpp_extension.nothing()> has no value here",
        "-O3: set by the builder, or without effect on the binary",
    }
    assert [(entry["line"], entry["text"]) for entry in report["assumed"]] == [
        (line("DEBUG"), "the environment variable DEBUG is not set")
    ]
    assert {(entry["path"], entry["line"]) for entry in report["rewrites"]} == {
        ("csrc/fused.cpp", 1),
        ("csrc/fused.cpp", 4),
    }
    assert any(note.startswith("the package requires scipy: a kernel may import") for note in report["notes"])
    assert all(f"setup.py:{call}: {text}" in report["files"]["build.toml"] for text in left_out)
    shown = invoke("port", "--dry-run", project).output
    assert f"left out: setup.py:{call}: libraries" in shown
    assert "to change: csrc/fused.cpp:4: PYBIND11_MODULE" in shown
    assert sorted(path.name for path in project.iterdir()) == ["csrc", "setup.py"]


def test_variables_and_options_reach_the_script(project: Path) -> None:
    (project / "setup.py").write_text(
        f"{HEAD}flags = ['-DFAST'] if '--fast' in sys.argv else []\n"
        "if int(environ.get('CUDA', 0)):\n"
        "    setup(ext_modules=[CE('a', ['csrc/cuda/fused_cuda.cu'], extra_compile_args=flags)])\n"
    )
    result = expect(2, "the environment variable CUDA is not set", "port", project)
    assert "the option --fast is not given" in result.output
    report = as_json(project, "CUDA=1", "--", "--fast")
    assert report["kernels"][0]["cuda_flags"] == ["-DFAST"]
    assert report["assumed"] == []


def test_existing_files_are_kept(project: Path) -> None:
    package = write_files(project / "torch-ext/fused_ops", {"__init__.py": "# mine\n"})
    assert as_json(project / "setup.py")["written"] == ["build.toml"]
    (project / "build.toml").write_text("# mine\n")
    expect(2, "already has build.toml", "port", project / "setup.py")
    assert (project / "build.toml").read_text() == (package / "__init__.py").read_text() == "# mine\n"


@pytest.mark.attack
@pytest.mark.parametrize("failing", SETUPS["failing"])
def test_nothing_is_written_without_an_extension(tmp_path: Path, failing: str) -> None:
    script = SETUPS["failing"][failing]
    if "lines" in script:
        record = script.get("record", "").replace("DEEP", "[" * 200_000)
        (tmp_path / "setup.py").write_text(script["lines"].replace("RECORD", record))
    tracemalloc.start()
    expect(2, script["message"], "port", tmp_path / "setup.py")
    assert tracemalloc.get_traced_memory()[1] < 32 << 20, "of an output that does not end"
    tracemalloc.stop()
    assert not (tmp_path / "build.toml").exists()


def test_the_script_sees_no_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("token")
    monkeypatch.setenv("HF_TOKEN", "token")
    write_files(tmp_path, {"project/setup.py": f"{HEAD}print(environ['HF_TOKEN'])\n"})
    assert "KeyError: 'HF_TOKEN'" in invoke("port", tmp_path / "project").output
    (tmp_path / "project/setup.py").write_text(f"open({str(secret)!r})\n")
    assert re.search(r"line 1: (FileNotFound|Permission)Error", invoke("port", tmp_path / "project").output)


def test_pyproject_completes_it(tmp_path: Path) -> None:
    call = "from torch.utils import cpp_extension\ncpp_extension.CppExtension(name='a._C', sources=['a.cpp'])\n"
    about = '[project]\nname = "small-ops"\nlicense = "MIT"\n'
    write_files(tmp_path, {"setup.py": call, "a.cpp": "", "pyproject.toml": about})
    expect(0, "", "port", tmp_path / "setup.py")
    read = read_project(tmp_path)
    assert (read.name, read.license, [backend.name for backend in read.backends]) == ("small-ops", "mit", ["cpu"])
    assert read.kernels[0].name == "a_C_cpu"


def ported_kernel(directory: Path, lines: str) -> dict[str, Any]:
    """Return the CUDA kernel of a script with these lines."""
    write_files(directory, ("a.cu", "b80.cu", "b90.cu", "listed/c.cu", "walked/d.cu", "walked/e.h"))
    call = "kind('a', sources, extra_compile_args={'nvcc': flags})"
    (directory / "setup.py").write_text(
        f"{HEAD}kind, sources, flags = CE, ['a.cu'], []\n{lines}setup(ext_modules=[{call}])\n"
    )
    return next(kernel for kernel in as_json(directory, "--dry-run")["kernels"] if kernel["backend"] == "cuda")


@pytest.mark.parametrize("decided", SETUPS["capabilities"])
def test_capabilities_that_a_script_decides(tmp_path: Path, decided: str) -> None:
    script = SETUPS["capabilities"][decided]
    assert ported_kernel(tmp_path, script["lines"])["capabilities"] == script["expected"]


def test_flags_and_sources_that_a_script_decides(tmp_path: Path) -> None:
    kernel = ported_kernel(tmp_path, DECISIONS)
    assert kernel["cuda_flags"] == re.findall(r"-D\w+", DECISIONS)
    assert kernel["src"] == ["a.cu", "b80.cu", "b90.cu", "listed/c.cu", "walked/d.cu"]


def test_differences_between_machines_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.cu").touch()
    (tmp_path / "b.cpp").touch()
    (tmp_path / "setup.py").write_text(HEAD + SETUPS["two-machines"])
    report = as_json(tmp_path, "--dry-run")
    texts = [entry["text"] for entry in report["left-out"]]
    assert "the extension 'a' on CUDA 13 with a GPU only: extra_compile_args -DTUNED" in texts
    assert "the extension 'unused' is not in ext_modules" in texts
    assert "torch.utils.cpp_extension._write_ninja_file is replaced and not run" in texts
    assert "the extension 'b' on CUDA 13 with a GPU only: define_macros ['TWO', '2']" in texts
    assert "b.cpp is compiled by a command: add it to `src`, and the flags of -DA -c b.cpp" in texts
    assert len([text for text in texts if text.startswith("a.cu is compiled by a command")]) == 1
    (failed,) = report["failed"]
    assert re.fullmatch(r"as on a CPU: setup.py ends at line \d+: OSError: no toolkit", failed)


def strings(value: Any) -> Iterator[str]:
    """Yield the texts in a recorded value."""
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)
    elif value:
        yield str(value)


def test_no_argument_is_lost(tmp_path: Path) -> None:
    """Each recorded argument is in build.toml or in the output, and a build accepts the file."""
    (tmp_path / "setup.py").write_text(f"{HEAD}here = os.path.dirname(os.path.abspath(__file__)){STRANGE}")
    for name in ("inc", "lib", "common"):
        (tmp_path / name).mkdir()
    write_files(tmp_path, ("b.mm", "part.cpp"))
    (tmp_path / "a.cu").write_text(
        '#include <torch/python.h>\nstatic auto r = torch::RegisterOperators();\nm.def("svox2::a(Tensor x)");\n'
        '#include "part.cpp"\n'
        "void f(int n) { k<<<dim3(n, 2), 32>>>(n); k<<<n, 32, 0, s>>>(n); }\n"
    )
    (tmp_path / ".gitmodules").write_text('[submodule "lib"]\n\tpath = lib\n\turl = https://example.org/lib\n')
    report = as_json(tmp_path, "--name", "me/svox2")
    shown = json.dumps(report)
    for run in run_setup(tmp_path / "setup.py"):
        for value in strings([{**extension["arguments"], "name": ""} for extension in run.extensions]):
            lands = value.startswith(("-gencode", "arch="))  # as cuda-capabilities
            assert lands or value.removeprefix("-I") in shown, value
    (tmp_path / "public").mkdir()
    assert public_parser.read((tmp_path / "build.toml").read_text(), tmp_path / "public")
    read = read_project(tmp_path)
    assert (read.name, read.python_depends) == ("svox2", ("einops", "tvm-ffi"))
    (kernel,) = read.kernels
    assert "'../outside' is outside the directory of setup.py" in shown
    assert "libraries of setup(): [('z', {'sources': ['z.c']})]" in shown
    assert (kernel.src, kernel.include) == (("a.cu",), ("common", "inc")), (
        "an included source is not compiled by itself"
    )
    assert kernel.cxx_flags == ("-DONE", "-UNDEBUG", "-fopenmp", "-Wall")
    assert (kernel.cuda_flags, kernel.cuda_capabilities) == (("-DONE", "-UNDEBUG", "-Xptxas", "-v"), ("8.0+PTX",))
    assert sorted(entry["line"] for entry in report["rewrites"]) == [1, 2, 3, 4, 5], "each once"
    for start in ("lib is a git submodule, and empty", "include registration.h", 'add stable-abi = "2.10"'):
        assert any(note.startswith(start) for note in report["notes"]), start
    assert invoke("check-config", tmp_path).exit_code == 0


def test_flags_for_the_stable_abi_become_its_key(tmp_path: Path) -> None:
    targets = "'-DTORCH_TARGET_VERSION=0x020a000000000000'", "'-DTORCH_TARGET_VERSION=0x0209000000000000'"
    call = "CE('a', ['a.cu'], extra_compile_args=[{}, '-lineinfo', '--threads', '4'])"
    (tmp_path / "setup.py").write_text(f"{HEAD}setup(ext_modules=[{call.format(targets[0])}])\n")
    (tmp_path / "a.cu").write_text("")
    expect(0, "", "port", tmp_path / "setup.py")
    read = read_project(tmp_path)
    assert "Release(major=2, minor=10)" in repr(read.framework)
    assert read.kernels[0].cuda_flags == ("-lineinfo",)
    assert read.license == "other"
    second = call.replace("'a'", "'b'", 1).format(targets[1])
    (tmp_path / "setup.py").write_text(f"{HEAD}setup(ext_modules=[{call.format(targets[0])}, {second}])\n")
    report = as_json(tmp_path, "--dry-run")
    assert 'stable-abi = "' not in report["files"]["build.toml"]
    assert any("TORCH_TARGET_VERSION differs" in entry["text"] for entry in report["left-out"])
