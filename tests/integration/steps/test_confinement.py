"""Compilers and loaded packages reach only their own files in a sandbox; a build without one gives a warning."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kernel_builder.backends.cuda import CUDA
from kernel_builder.checks import ProbeProcess, run_all
from kernel_builder.demangle import demangle
from kernel_builder.steps import ninja_run
from kernel_builder.steps.cache import output_path
from kernel_builder.steps.confinement import Confinement, chosen
from kernel_builder.steps.graph import Graph
from kernel_format.errors import ToolchainError
from kernel_format.tree_digest import hash_tree
from kernel_sandbox.confine import BUBBLEWRAP, LANDLOCK, landlock_version
from kernel_sandbox.sandbox import readable, strongest, wrapped
from tests.integration.build_command.conftest import working_in
from tests.integration.steps.test_ninja import planned
from tests.support.cli import expect
from tests.support.files import write_files, write_program
from tests.support.inside_attacks import MEMORY, OWN_FILE, SECRETS
from tests.support.outside import Outside
from tests.support.programs import wait_for
from tests.support.sample_package import assemble
from tests.support.sandboxes import skip_unless

pytestmark = [pytest.mark.attack, pytest.mark.sandbox]


@pytest.fixture(params=[BUBBLEWRAP, LANDLOCK])
def confinement(request: pytest.FixtureRequest) -> Confinement:
    """Return each sandbox that this system permits."""
    sandbox = chosen("auto", Path(shutil.which("g++") or "g++"))
    if request.param == BUBBLEWRAP:
        skip_unless(BUBBLEWRAP, sandbox.kind)
    skip_unless(LANDLOCK, LANDLOCK if sandbox.kind and landlock_version() > 0 else None)
    return Confinement(request.param, "", sandbox.tools)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_of_the_machine_can_be_reached(confinement: Confinement, device: str, tmp_path: Path) -> None:
    with Outside() as outside:
        around = partial(confinement.around, scratch=tmp_path, more=[outside.directory], device=device)
        assert outside.reached(around) == {OWN_FILE, *([MEMORY] if device == "cuda" else [])}


def test_a_package_reaches_nothing_of_the_machine(
    confinement: Confinement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Outside() as outside, ProbeProcess(confinement=confinement) as probe:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(outside.directory))  # where it may read
        for name in SECRETS:
            monkeypatch.setenv(name, "x")
        reports = f"*inside_attacks.succeeded({outside.targets!r}), *{SECRETS!r} & {{*os.environ}}"
        imports = f"import os\nfrom . import inside_attacks\nraise ImportError({reports})\n"
        files = {"__init__.py": imports, "inside_attacks.py": outside.program.read_text()}
        (report,) = run_all([assemble(tmp_path / "package", "torch-cpu", None, files)], only=["load"], probe=probe)
        (finding,) = report.findings
        reached = set(re.findall(r"'([\w-]+)'", finding.message.partition("ImportError")[2]))
        assert OWN_FILE in reached and outside.real(reached) == {OWN_FILE}


def test_bubblewrap_works_in_a_container_and_with_a_linked_venv(tmp_path: Path) -> None:
    """A pid namespace with its own /proc has no process of the numbers 2 to 8; a link leads to a venv."""
    skip_unless(BUBBLEWRAP, strongest())
    write_files(tmp_path / "venv", {"lib/file": "works"})
    link, scratch = tmp_path / "link", tmp_path / "scratch"
    link.symlink_to("venv")
    scratch.mkdir()
    paths = [*readable([link, link / "lib"])]
    command = wrapped(["cat", str(link / "lib" / "file")], BUBBLEWRAP, scratch, paths, "cpu")
    container = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    ended = 'for number in 2 3 4 5 6 7 8; do (exit); done; exec "$@"'
    inside = [*container, "sh", "-c", ended, "sh", *command]
    assert subprocess.run(inside, stdout=subprocess.PIPE, text=True, check=True).stdout == "works"


def test_what_is_killed_while_it_starts_leaves_no_process(confinement: Confinement, tmp_path: Path) -> None:
    """Of 100 commands, each gets SIGKILL up to 0.1 s after its start; none may run on, or sleep."""

    def kill_after(milliseconds: int) -> None:
        with subprocess.Popen(confinement.around(["sleep", "600"], tmp_path), stderr=subprocess.DEVNULL) as process:
            time.sleep(milliseconds / 1000)
            process.kill()

    with ThreadPoolExecutor(4) as pool:  # most of the time is sleep
        list(pool.map(kill_after, range(100)))
    assert wait_for(lambda: not working_in(tmp_path)), working_in(tmp_path)


def test_a_build_in_a_sandbox_gives_the_same_bytes(
    confinement: Confinement,
    copy_project: Callable[..., Path],
    new_cache: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There, programs also read the binary's symbols and their names."""
    for program in (tmp_path / "bin/nm", tmp_path / "bin/c++filt"):
        write_program(program, f": > {tmp_path}/outside")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    (variant,) = planned(copy_project("stable-scale")).variants
    assert variant.binary
    graph = Graph((replace(variant, binary=replace(variant.binary, linked_if_called=CUDA.linked_if_called)),))
    made = []
    confined = replace(confinement, tools=(*confinement.tools, str(tmp_path / "bin")))
    for name, where in (("free", None), ("confined", confined)):
        cache = new_cache(name)
        outcome = ninja_run.run(graph, cache, jobs=2, confinement=where)
        assert outcome.steps == 3 and not outcome.failures and outcome.cpu_seconds
        assert outcome.cpu_seconds > 0.1
        made.append([output_path(cache, step).read_bytes() for step in graph.compiles])
        assert (tmp_path / "outside").exists() == (where is None)
        (tmp_path / "outside").unlink(missing_ok=True)
    assert made[0] == made[1]
    assert demangle(["_Z1fv"]) and not (tmp_path / "outside").exists()


def test_a_compiler_cannot_change_the_script_that_stores_its_object(
    confinement: Confinement, copy_project: Callable[..., Path], new_cache: Callable[[str], Path], tmp_path: Path
) -> None:
    """Flags cannot name programs, so a g++ that misbehaves stands for a compiler that a source has taken over."""
    script = 'echo "echo taken > taken" >> ../run.sh\nmkfifo out.o\n: > headers-read'
    bad = write_program(tmp_path / "bin" / "g++", script)
    graph, cache = planned(copy_project("stable-scale")), new_cache("cache")
    (variant,) = graph.variants
    assert variant.binary
    objects = tuple(replace(step, argv=(str(bad), *step.argv[1:])) for step in variant.binary.objects)
    changed = Graph((replace(variant, binary=replace(variant.binary, objects=objects)),))
    tools = (*confinement.tools, str(bad.parent))
    outcome = ninja_run.run(changed, cache, jobs=2, confinement=Confinement(confinement.kind, "", tools))
    assert set(outcome.failures) == {step.key for step in objects}
    assert not list(cache.rglob("taken")) and not list((cache / "objects").rglob("*.o"))


def test_without_a_sandbox_require_fails_and_auto_says_why() -> None:
    """A compiler that does not run in a sandbox is a reason to do without, as a missing bubblewrap is."""
    with pytest.raises(ToolchainError, match=r"^--sandbox require: .*bubblewrap: ") as caught:
        chosen("require", Path("/bin/false"))
    assert "install bubblewrap" in (caught.value.hint or "") and "--sandbox off" in (caught.value.hint or "")
    sandbox = chosen("auto", Path("/bin/false"))
    assert sandbox.kind is None and "landlock: " in sandbox.reason
    assert sandbox.around(["true"], Path("/")) == ["true"]


def test_a_build_tells_its_sandbox_and_its_packages_do_not(
    copy_project: Callable[..., Path], new_cache: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = copy_project("python-only")
    monkeypatch.setenv("KERNEL_BUILDER_CACHE", str(new_cache("cache")))
    made = {}
    for mode in ("off", "auto"):
        out = project.parent / mode
        command = ["build", str(project), "--variant", "torch-cpu", "--sandbox", mode, "--out", str(out), "--json"]
        (package,) = json.loads(expect(0, "", *command).stdout)["packages"]
        assert (package["sandbox"] is None) == (mode == "off" or chosen("auto", None).kind is None)
        made[mode] = hash_tree(out / "torch-cpu").value
    assert made["off"] == made["auto"]


def test_a_sandbox_shows_paths_of_python_except_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(sys, "path", ["", ".", str(tmp_path), "lib", *sys.path])
    assert str(tmp_path) not in readable([]) and str(tmp_path / "lib") in readable([])
    assert all(Path(path).is_absolute() for path in readable([]))
    unknown = Path("/", "x" * 300)  # looking it up fails, as below a directory of another user
    assert str(unknown) not in readable([unknown])
