"""Builds that are killed, stopped, concurrent or out of disk space leave nothing that disturbs a later build."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import CPU
from tests.e2e.conftest import BUILDER, Run, environment
from tests.e2e.test_bad_input import replace, snapshot, untouched

Copy = Callable[..., Path]
NewCache = Callable[[str], Path]
Start = Callable[..., "subprocess.Popen[str]"]

SLOW_SOURCE = """
constexpr unsigned count(unsigned long to) {
  unsigned sum = 0;
  for (unsigned long i = 0; i < to; ++i) sum += static_cast<unsigned>(i * i);
  return sum;
}
static_assert(count(1000000000) != 1);
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes | str]:
    """The packages of an undisturbed build of stable-scale's CPU variant."""
    from kernel_builder.toolchain import Toolchains
    from tests.conftest import PROJECTS

    home = tmp_path_factory.mktemp("undisturbed")
    project, cache = home / "stable-scale", home / "cache"
    shutil.copytree(PROJECTS / "stable-scale", project)
    cache.mkdir()
    (cache / "toolchains").symlink_to(Toolchains().store.root)
    command = [BUILDER, "build", project, "--variant", CPU, "--no-load", "--compiler-cache", "off"]
    subprocess.run(command, check=True, capture_output=True, env=environment(cache))
    return snapshot(project / "build")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a build of the CPU variant in its own session, as terminals do, and kills what is left at the end."""
    running: list[tuple[subprocess.Popen[str], Path]] = []

    def run(cache: Path, project: Path, *arguments: str | Path, own_session: bool = True) -> subprocess.Popen[str]:
        options = ["--variant", CPU, "--compiler-cache", "off", "--json"]
        process = subprocess.Popen(
            [BUILDER, "build", project, *options, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(cache),
            start_new_session=own_session,
        )
        running.append((process, cache))
        return process

    yield run
    for process, _ in running:
        if process.poll() is None:
            process.kill()
        process.communicate()
    for _, cache in running:
        for number in working_in(cache):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


@pytest.fixture
def slow_project(copy_project: Copy) -> Path:
    """A project with one source that takes the compiler a minute."""
    project = copy_project("stable-scale")
    source = project / "scale" / "scale_cpu.cpp"
    source.write_text(source.read_text() + SLOW_SOURCE)
    flags = '["-fconstexpr-loop-limit=2000000000", "-fconstexpr-ops-limit=100000000000"]'
    replace(project / "build.toml", 'backend = "cpu"', f'backend = "cpu"\ncxx-flags = {flags}')
    return project


def working_in(directory: Path) -> dict[int, str]:
    """Return the processes that work in a directory or name it, with their commands."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = os.fsdecode((process / "cmdline").read_bytes().replace(b"\0", b" "))
            if not command:  # a zombie
                continue
            if str(directory) in command or (process / "cwd").readlink().is_relative_to(directory):
                found[int(process.name)] = command
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def compiling(cache: Path) -> Callable[[], bool]:
    return lambda: any("cc1plus" in command and "scale_cpu.cpp" in command for command in working_in(cache).values())


def assert_whole(project: Path, cache: Path, undisturbed: dict[str, bytes | str]) -> None:
    """Assert that the packages equal those of an undisturbed build, and that project and cache hold nothing else."""
    assert snapshot(project / "build") == undisturbed
    assert sorted(path.name for path in project.iterdir()) == ["build", "build.toml", "scale", "torch-ext"]
    assert not (cache / "work").exists()
    left = [str(path) for path in cache.rglob("*") if path.is_file() and "toolchains" not in path.parts]
    assert [name for name in left if not name.endswith((".o", ".so", ".json", ".lock"))] == []


@pytest.mark.slow
@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
@pytest.mark.parametrize("line", ["1 variants", "[1/3]", "[2/3]", "[3/3]", "] checking"])
def test_kill_and_again(
    copy_project: Copy,
    new_cache: NewCache,
    kernel_builder: Run,
    start: Start,
    undisturbed: dict[str, bytes | str],
    line: str,
    group: bool,
) -> None:
    """SIGKILL while planning, compiling, linking and packaging, of the process or its whole group."""
    project, cache = copy_project("stable-scale"), new_cache("cache")
    process = start(cache, project)
    assert process.stderr is not None
    assert any(line in words for words in process.stderr)
    if group:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    assert not (project / "build").exists()
    again = kernel_builder(cache, "build", project, "--variant", CPU, "--no-load", "--compiler-cache", "off")
    assert again.code == 0, again
    assert_whole(project, cache, undisturbed)
    assert working_in(cache) == {}


@pytest.mark.slow
def test_kill_over_older_packages(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run, start: Start, undisturbed: dict[str, bytes | str]
) -> None:
    """At every moment there is either the whole old package or the whole new one, and the new one does appear."""
    project, cache = copy_project("stable-scale"), new_cache("cache")
    source = project / "scale" / "scale_cpu.cpp"
    changed = source.read_text()
    replace(source, "factor * in[i]", "factor * in[i] + 1")
    arguments = ("build", project, "--variant", CPU, "--no-load", "--compiler-cache", "off")
    assert kernel_builder(cache, *arguments).code == 0
    old = snapshot(project / "build")
    source.write_text(changed)
    warm = new_cache("warm")
    assert kernel_builder(warm, *arguments, "--out", project.parent / "out").code == 0
    shutil.rmtree(warm / "packages")
    build = project / "build"
    for moment in range(12):
        process = start(warm, project, "--no-load")
        assert process.stderr is not None
        assert any("] checking" in words for words in process.stderr)
        time.sleep(moment * 0.004)
        process.kill()
        process.wait()
        now = snapshot(build)
        assert now == old if moment == 0 else now in (old, undisturbed)
    # The swap gives the directory another inode. Killed right after it, the build leaves the new packages.
    shutil.rmtree(warm / "packages", ignore_errors=True)
    inode, end = build.stat().st_ino, time.monotonic() + 60
    process = start(warm, project, "--no-load")
    while build.stat().st_ino == inode and time.monotonic() < end:
        pass
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert snapshot(build) == undisturbed
    assert kernel_builder(warm, *arguments).code == 0
    assert_whole(project, warm, undisturbed)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
def test_stopped(slow_project: Path, new_cache: NewCache, start: Start, how: signal.Signals, group: bool) -> None:
    """Ctrl-C or another signal to end: builder and compilers end at once, without a traceback."""
    cache = new_cache("cache")
    with untouched(slow_project):
        process = start(cache, slow_project)
        assert wait_for(compiling(cache), 30)
        (os.killpg if group else os.kill)(process.pid, how)
        began = time.monotonic()
        stdout, stderr = process.communicate(timeout=10)
        assert time.monotonic() - began < 3
    assert process.returncode in {1, 128 + how}, (process.returncode, stderr)
    assert stdout == ""
    assert "Traceback" not in stderr
    assert working_in(cache) == {}


def test_compilers_of_a_killed_build_end_with_it(slow_project: Path, new_cache: NewCache, start: Start) -> None:
    cache = new_cache("cache")
    process = start(cache, slow_project)
    assert wait_for(compiling(cache), 30)
    process.kill()
    process.wait()
    assert wait_for(lambda: working_in(cache) == {}, 5)


def test_compilers_that_outlive_a_killed_build_do_no_harm(
    slow_project: Path, new_cache: NewCache, kernel_builder: Run, start: Start
) -> None:
    """The next build does not wait for them; they write neither to its directory nor to the cache."""
    replace(slow_project / "scale" / "scale_cpu.cpp", "count(1000000000)", "count(500000)")
    cache = new_cache("cache")
    # In the session of this test, where stopped processes stay stopped when their parent dies.
    first = start(cache, slow_project, own_session=False)
    assert wait_for(compiling(cache), 30)
    ninja = next(number for number, command in working_in(cache).items() if "/ninja -C" in command)
    os.kill(ninja, signal.SIGSTOP)
    first.kill()
    first.wait()
    assert compiling(cache)()
    arguments = ("build", slow_project, "--variant", CPU, "--no-load", "--compiler-cache", "off")
    second = kernel_builder(cache, *arguments)
    assert (second.code, second.answer["steps"]) == (0, 3), second
    outputs = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.suffix in (".o", ".so")}
    assert len(outputs) == 3
    assert wait_for(lambda: working_in(cache).keys() <= {ninja}, 60)
    os.kill(ninja, signal.SIGCONT)
    assert wait_for(lambda: working_in(cache) == {}, 10)
    assert {path: path.stat().st_mtime_ns for path in outputs} == outputs
    assert not (cache / "work").exists()
    assert kernel_builder(cache, *arguments).answer["steps"] == 0


def test_stopped_while_checking(copy_project: Copy, new_cache: NewCache, start: Start) -> None:
    """The staging directory is removed, and the process that loads the package ends."""
    project, cache = copy_project("stable-scale"), new_cache("cache")
    with untouched(project):
        process = start(cache, project)
        assert process.stderr is not None
        assert any("] checking" in words for words in process.stderr)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in stderr
    assert working_in(project) == {}


@pytest.mark.slow
@pytest.mark.parametrize("caches", [1, 2])
def test_two_builds_of_one_project_at_once(
    copy_project: Copy, new_cache: NewCache, start: Start, undisturbed: dict[str, bytes | str], caches: int
) -> None:
    project = copy_project("stable-scale")
    used = [new_cache(f"cache{number}") for number in range(caches)]
    both = [start(used[number % caches], project, "--no-load") for number in range(2)]
    answers = [json.loads(process.communicate()[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    for cache in used:
        assert_whole(project, cache, undisturbed)
    if caches == 1:
        assert sorted(answer["compiles"] for answer in answers) == [0, 2]


@pytest.mark.slow
def test_two_projects_at_once_in_one_cache(
    copy_project: Copy, new_cache: NewCache, start: Start, undisturbed: dict[str, bytes | str]
) -> None:
    """Their common source is compiled once; the rest, for each of them."""
    one, two, cache = copy_project("stable-scale", "one"), copy_project("stable-scale", "two"), new_cache("cache")
    with (two / "torch-ext" / "torch_binding.cpp").open("a") as binding:
        binding.write("// Changed.\n")
    both = [start(cache, project, "--no-load") for project in (one, two)]
    answers = [json.loads(process.communicate()[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    assert sorted(answer["compiles"] for answer in answers) == [1, 2]
    assert_whole(one, cache, undisturbed)
    assert snapshot(two / "build").keys() != undisturbed.keys()


def test_a_file_that_changes_meanwhile(slow_project: Path, new_cache: NewCache, start: Start) -> None:
    """A binary's name is a digest of the Python files too, so they must not change while it is built."""
    replace(slow_project / "scale" / "scale_cpu.cpp", "count(1000000000)", "count(500000)")
    cache = new_cache("cache")
    process = start(cache, slow_project, "--no-load")
    assert wait_for(compiling(cache), 30)
    python = slow_project / "torch-ext" / "stable_scale" / "__init__.py"
    python.write_text(python.read_text() + "# changed\n")
    stdout, _ = process.communicate()
    answer = json.loads(stdout)
    assert process.returncode == 5, answer
    assert answer["where"] == str(python)
    assert "changed while" in answer["message"]
    assert answer["hint"] == "run the build again"
    assert not (slow_project / "build").exists()


def in_namespace(setup: str, *command: str | Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a mount namespace of its own, which `setup` prepares."""
    script = f"set -e\n{setup}\nexec {shlex.join(map(str, command))}"
    return subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, env=env, check=False)


MAY_MOUNT = (
    shutil.which("unshare") is not None
    and subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    ).returncode
    == 0
)
needs_mounts = pytest.mark.skipif(not MAY_MOUNT, reason="this user may not mount file systems")


@needs_mounts
@pytest.mark.parametrize("kilobytes", [8, 16, 40, 80, 120])
def test_disk_full_while_compiling(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run, tmp_path: Path, kilobytes: int
) -> None:
    project, cache = copy_project("stable-scale"), tmp_path / "cache"
    cache.mkdir()
    store = new_cache("other") / "toolchains"
    command = [BUILDER, "build", project, "--variant", CPU, "--no-load", "--compiler-cache", "off", "--json"]
    setup = f"mount -t tmpfs -o size={kilobytes}k none {cache}; ln -s {store.resolve()} {cache}/toolchains"
    with untouched(project):
        done = in_namespace(setup, *command, env=environment(cache))
    assert "Traceback" not in done.stderr, done.stderr
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["error"]) == (4, "StoreError"), answer
    assert str(cache) in answer["where"]
    assert "KERNEL_BUILDER_CACHE" in answer["hint"]


@needs_mounts
@pytest.mark.parametrize("kilobytes", [8, 24, 40, 64])
@pytest.mark.parametrize("below", [False, True], ids=["volume", "below"])
def test_disk_full_while_assembling(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run, tmp_path: Path, kilobytes: int, below: bool
) -> None:
    """The volume's content stays unchanged, whether the volume is the destination or contains it."""
    project, cache, volume = copy_project("python-only"), new_cache("cache"), tmp_path / "volume"
    volume.mkdir()
    package = project / "torch-ext" / "python_only"
    (package / "tables.py").write_text("# " + "x" * (kilobytes * 1024))
    out = volume / "out" if below else volume
    before, after = tmp_path / "before", tmp_path / "after"
    script = f"""
mount -t tmpfs -o size={kilobytes}k none {volume}
mkdir -p {out}/torch-cpu; echo old > {out}/torch-cpu/metadata.json
cp -a {volume} {before}
{BUILDER} build {project} --out {out} --json && exit 100 || code=$?
cp -a {volume} {after}
exit $code
"""
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, env=environment(cache), check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["error"]) == (6, "PackageError"), answer
    assert "No space left" in answer["message"]
    assert "--out" in answer["hint"]
    assert snapshot(after) == snapshot(before)


@needs_mounts
def test_packages_go_into_a_volume(copy_project: Copy, new_cache: NewCache, tmp_path: Path) -> None:
    """A mount point or bind mount cannot be moved: its packages are replaced one by one."""
    project, cache, volume, result = copy_project("python-only"), new_cache("cache"), tmp_path / "v", tmp_path / "r"
    for mount in ("mount -t tmpfs none", f"mkdir {tmp_path}/source; mount --bind {tmp_path}/source"):
        volume.mkdir(exist_ok=True)
        script = f"""
set -e
{mount} {volume}
mkdir {volume}/torch-cpu; echo old > {volume}/torch-cpu/old.py
{BUILDER} build {project} --out {volume} --no-load --json
rm -rf {result}; cp -a {volume} {result}
"""
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, env=environment(cache), check=False
        )
        assert done.returncode == 0, done
        assert sorted(path.name for path in result.iterdir()) == ["torch-cpu", "torch-cuda"]
        assert not (result / "torch-cpu" / "old.py").exists()
        assert (result / "torch-cpu" / "metadata.json").is_file()


@needs_mounts
def test_packages_of_a_container_image(copy_project: Copy, new_cache: NewCache, tmp_path: Path) -> None:
    """An overlay's lower directories cannot be renamed."""
    lower, cache = copy_project("python-only").parent, new_cache("cache")
    image, merged, result = tmp_path / "image", tmp_path / "merged", tmp_path / "result"
    (lower / "python-only" / "build" / "torch-cpu").mkdir(parents=True)
    (lower / "python-only" / "build" / "torch-cpu" / "old.py").touch()
    (lower / "python-only").rename(image)
    merged.mkdir()
    script = f"""
set -e
mount -t tmpfs none /mnt; mkdir /mnt/upper /mnt/work
mount -t overlay none -o lowerdir={image},upperdir=/mnt/upper,workdir=/mnt/work {merged} || exit 77
{BUILDER} build {merged} --no-load --json
cp -a {merged} {result}
"""
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, env=environment(cache), check=False
    )
    if done.returncode == 77:
        pytest.skip("no overlays here")
    assert done.returncode == 0, done
    assert sorted(path.name for path in result.iterdir()) == ["build", "build.toml", "torch-ext"]
    assert sorted(path.name for path in (result / "build").iterdir()) == ["torch-cpu", "torch-cuda"]
    assert not (result / "build" / "torch-cpu" / "old.py").exists()


@needs_mounts
@pytest.mark.parametrize("where", ["cache", "project"])
def test_a_read_only_file_system(copy_project: Copy, new_cache: NewCache, tmp_path: Path, where: str) -> None:
    project, cache = copy_project("python-only"), new_cache("cache")
    place = cache if where == "cache" else project
    with untouched(project, cache):
        done = in_namespace(
            f"mount --bind {place} {place}; mount -o remount,ro,bind {place}",
            *[BUILDER, "build", project, "--no-load", "--json"],
            env=environment(cache),
        )
        shutil.rmtree(cache / "locks", ignore_errors=True)
    assert "Traceback" not in done.stderr, done.stderr
    answer = json.loads(done.stdout)
    assert answer["error"] == ("StoreError" if where == "cache" else "PackageError")
    assert "Read-only file system" in answer["message"]
    assert str(place) in answer["where"]
    assert ("KERNEL_BUILDER_CACHE" if where == "cache" else "--out") in answer["hint"]


def test_no_space_for_a_note_of_success(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> None:
    """If the cache cannot record that a package was checked, the next build checks it again."""
    project, cache = copy_project("python-only"), new_cache("cache")
    (cache / "packages").write_text("in the way")
    for _ in range(2):
        done = kernel_builder(cache, "build", project, "--no-load")
        assert done.code == 0, done
        assert {package["status"] for package in done.answer["packages"]} == {"built"}


def test_a_reader_that_leaves(slow_project: Path, new_cache: NewCache) -> None:
    """`kernel-builder build 2>&1 | head -1`: no traceback, no compilers left."""
    cache = new_cache("cache")
    source = slow_project / "scale" / "scale_cpu.cpp"
    replace(source, "count(1000000000)", "count(500000)")
    script = f"{shlex.quote(str(BUILDER))} build {shlex.quote(str(slow_project))} --variant {CPU}"
    script += " --compiler-cache off 2>&1 | head -1"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment(cache), check=True)
    assert done.stdout == "1 variants, 1 binaries\n"
    assert done.stderr == ""
    assert wait_for(lambda: working_in(cache) == {}, 10)


def test_waiting_says_so(slow_project: Path, copy_project: Copy, new_cache: NewCache, start: Start) -> None:
    """A second build that waits for the first one's compilers reports it."""
    cache = new_cache("cache")
    start(cache, slow_project)
    assert wait_for(compiling(cache), 30)
    second = start(cache, copy_project("stable-scale", "second"))
    said: list[str] = []
    assert second.stderr is not None
    reader = threading.Thread(target=lambda: said.extend(second.stderr or ()), daemon=True)
    reader.start()
    assert wait_for(lambda: any("another build is using the compilers" in line for line in said), 20)
