"""The GitHub workflows: valid, safe, and run step by step against a local Hub."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import tomli
import yaml

from kernel_builder.config.variant import this_platform
from kernel_builder.hub.verification import verify
from tests.support.files import replace, write_files
from tests.support.places import CPU, PROJECTS, ROOT, SOURCES
from tests.support.programs import run
from tests.support.running_hub import RunningHub

from . import sigstore_instance
from .conftest import tree
from .rehearsal import BIN, Rehearsal

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
ACTIONS = sorted((ROOT / ".github/actions").glob("*/action.yml"))
OWNER = "kernels-community"


def test_workflows_and_actions_match_githubs_schemas() -> None:
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.github-actions", *ACTIONS)


def test_workflows_are_safe() -> None:
    """Actions are pinned by hash, permissions are minimal, and no untrusted text is part of a command."""
    run(BIN / "zizmor", "--offline", "--quiet", "--persona", "pedantic", ROOT / ".github")
    for file in [*WORKFLOWS, *ACTIONS]:
        for used, comment in re.findall(r"uses: (\S+)(.*)", file.read_text()):
            if not used.startswith("$/"):  # this repository, at the same commit
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used) and re.match(r" # v\d", comment), (file, used)
    for file in WORKFLOWS:
        workflow = yaml.safe_load(file.read_text())
        assert workflow["permissions"] == {}
        assert all(job["permissions"] is not None for job in workflow["jobs"].values())


def test_a_change_of_the_builder_builds_the_kernels() -> None:
    kernels = yaml.safe_load((WORKFLOWS[0].parent / "kernels.yml").read_text())["jobs"]["kernels"]
    shared = kernels["with"]["shared"].split()
    (names,) = re.findall(r"install \. \./packages/kernel-\{(.*?)\}", ACTIONS[0].read_text())
    packages = [ROOT / f"packages/kernel-{name}" for name in names.split(",")]
    parts = [*ACTIONS, ROOT / "pyproject.toml", *packages, *(ROOT / "kernel_builder").iterdir()]
    assert [part for part in parts if not any(part.is_relative_to(ROOT / path) for path in shared)] == []


@pytest.mark.attack
def test_tests_change_no_cache_and_no_artifact_that_a_release_uses() -> None:
    workflows = {file.name: yaml.safe_load(file.read_text()) for file in WORKFLOWS}
    for file in [*WORKFLOWS, *ACTIONS]:
        assert "actions/cache@" not in file.read_text()  # it saves at the end of the job
    for workflow in workflows.values():
        for step in (step for job in workflow["jobs"].values() for step in job.get("steps", [])):
            if "download-artifact" in step.get("uses", ""):  # tests can create artifacts of any other name
                assert step["with"].keys() == {"artifact-ids", "path"}, step
                assert "outputs" in step["with"]["artifact-ids"] or "inputs" in step["with"]["artifact-ids"]
    jobs = workflows["build-kernels.yml"]["jobs"]
    job = jobs["build"]
    assert job["steps"][-1]["name"] == "Keep the packages" and "collect" in jobs["test"]["needs"]
    assert workflows["publish-kernels.yml"]["jobs"]["build"]["with"]["cache"] is False
    # No key of a project begins with the prefix of another, also of one with the same name.
    (keys,) = [step for step in yaml.safe_load(ACTIONS[0].read_text())["runs"]["steps"] if step.get("id") == "keys"]
    assert "matrix.project" in job["steps"][1]["with"]["cache"]
    assert re.findall(r"objects-\$RUNNER_ARCH-(.*?)\"", keys["run"]) == ["$CACHE//", "$CACHE//$GITHUB_RUN_ID"]


@pytest.mark.attack
def test_the_documented_job_signs_only_files_that_it_has_rebuilt() -> None:
    (commands,) = re.findall(r"- run: \|\n(.*?)env:", (ROOT / "docs" / "publishing.md").read_text(), re.DOTALL)
    verify, download, _, sign, _ = map(str.strip, commands.strip().splitlines())
    assert verify == "kernel-builder verify ORG/NAME@$REVISION --source my-kernel" and " sign " in sign
    assert "--revision $REVISION" in download


RUN = "https://github.com/org/kernels/actions/runs/7"
WORKFLOW = "org/kernels/.github/workflows/publish-kernels.yml@refs/tags/v1.0"


def test_the_release_rehearsed_against_our_own_hub(
    hub: RunningHub, tmp_path: Path, sigstore: sigstore_instance.Running
) -> None:
    checkout = tmp_path / "checkout"
    for name, backend in (("python-only", "cuda"), ("stable-scale", "cpu")):
        project = Path(shutil.copytree(PROJECTS / name, checkout / "kernels" / name))
        config = (project / "build.toml").read_text()
        (project / "build.toml").write_text(config.replace('backends = ["cpu", "cuda"]', f'backends = ["{backend}"]'))
    # Only the job that publishes has Torch.
    write_files(tmp_path / "without", {"torch/__init__.py": "raise ImportError('not on this runner')\n"})
    environment = {key: value for key, value in hub.environment.items() if key not in {"HF_TOKEN", "HF_ENDPOINT"}}
    environment |= {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "org/kernels", "GITHUB_RUN_ID": "7"}
    environment["GITHUB_RUN_NUMBER"] = "7"
    environment["PYTHONPATH"] = str(tmp_path / "without")
    context = {
        "inputs.projects": "kernels/python-only kernels/stable-scale",
        "inputs.owner": OWNER,
        "inputs.endpoint": hub.url,
        "inputs.gpu-runner": "gpu",
        "inputs.wheels": "kernels/*",
        "secrets.hf-token": "",
    }
    building = Rehearsal(checkout, context, environment, "build-kernels.yml")
    selected = building.job("select")
    parts = json.loads(selected["runners"])["include"]
    assert [(part["name"], part["platform"], part["backend"]) for part in parts] == [
        ("python-only", "x86_64-linux", None),
        ("stable-scale", "aarch64-linux", "cpu"),
        ("stable-scale", "x86_64-linux", "cpu"),
    ]
    for part in parts:
        if part["platform"] == this_platform():
            building.job("build", part)
    context["needs.build.outputs.packages"] = building.job("collect")["packages"]
    context["needs.build.outputs.projects"] = selected["projects"]
    rehearsal = Rehearsal(checkout, context, environment)
    assert not rehearsal.runs("gpu", build="failure")
    assert not rehearsal.runs("publish", build="failure", gpu="skipped")
    assert not rehearsal.runs("publish", build="success", gpu="failure")
    assert rehearsal.runs("gpu", build="success")
    assert rehearsal.runs("publish", build="success", gpu="success")
    card = tmp_path / "artifacts" / "packages-of-a-test" / "kernels" / "stable-scale" / "CARD.md"
    write_files(card.parent, {card.name: ""})
    assert rehearsal.job("publish")["wheels"] == ""  # without a token: a dry run
    assert not (checkout / "kernels" / "stable-scale" / card.name).exists()
    assert not hub.api().repo_exists(f"{OWNER}/stable-scale", repo_type="kernel")
    trusting = SOURCES["trusting_client"].format(trust=sigstore.trust)
    write_files(tmp_path / "trusting", {"sitecustomize.py": trusting})
    environment |= {"PYTHONPATH": str(tmp_path / "trusting"), **sigstore.job_of("org/kernels", WORKFLOW)}
    context |= {"needs.build.outputs.projects": "kernels/stable-scale", "secrets.hf-token": "any"}
    published = f"{OWNER}/stable-scale"

    def publish(only: str = "") -> str:
        outputs = Rehearsal(checkout, context, environment).job("publish", only=only)
        assert only or outputs["wheels"] == "wheels"
        return Path(hub.api().hf_hub_download(published, "README.md", repo_type="kernel")).read_text()

    assert f"passed their tests on a GPU, in [this run]({RUN})." in publish()
    context["inputs.skip-gpu-tests"] = "the runner is being repaired"
    without = Rehearsal(checkout, context, environment)
    assert not without.runs("gpu", build="success")
    assert without.runs("publish", build="success", gpu="skipped")
    assert not without.runs("publish", build="failure", gpu="skipped")
    assert "published without a test on a GPU: the runner is being repaired." in publish(only="Publish")
    assert f"build/{CPU}/metadata.json" in tree(hub, published, "v1")
    assert verify(published, endpoint=hub.url, signers=[f"https://github.com/{WORKFLOW}"], require_signature=True).ok


def test_wheels_are_written_beside_the_release(doubling: Path, tmp_path: Path) -> None:
    replace(doubling / "build.toml", "version = 1", '  "version" = 0x1')  # any TOML
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    doubling.rename(checkout / "kernels")
    run(BIN / "kernel-builder", "build", "kernels", "--no-load", cwd=checkout)
    context = {"inputs.wheels": "k*", "needs.build.outputs.projects": "kernels"}
    Rehearsal(checkout, context, {**os.environ, "GITHUB_RUN_NUMBER": "7"}).job("publish", only="Write wheels")
    assert [path.name for path in (checkout / "dist").iterdir()] == ["python_only-1.7-py3-none-any.whl"]
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["kernels"]["with"]
    assert release["wheels"] == release["projects"], "with the dependencies of each"


def test_the_gpu_job_rehearsed_without_a_gpu(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    run(BIN / "kernel-builder", "init", "kernels/relu", "--name", "me/relu", "--backends", "cpu", cwd=checkout)
    shutil.copytree(checkout / "kernels/relu", checkout / "kernels/plain")
    shutil.rmtree(checkout / "kernels/plain/benchmarks")
    context = {
        "inputs.kernels": "kernels/plain",
        "inputs.backend": "cpu",
        "inputs.benchmark-options": "--rounds 3 --against eager --only device --shapes 64x64",
    }
    # The tests of a new project are in test_first_kernel.py.
    Rehearsal(checkout, context, {**os.environ, "PYTEST_ADDOPTS": "-m kernels_ci"}, "gpu.yml").job("gpu")
    context["inputs.kernels"] = "kernels/relu"
    Rehearsal(checkout, context, {**os.environ, "PYTEST_ADDOPTS": "-m kernels_ci"}, "gpu.yml").job("gpu")
    results = json.loads((checkout / "benchmark-results" / "relu.json").read_text())
    assert results["kernel"] == "relu"
    assert results["rows"]


def test_a_publication_passes_its_inputs_on() -> None:
    workflows = {file.name: yaml.safe_load(file.read_text()) for file in WORKFLOWS}
    publish = workflows["publish-kernels.yml"]
    for name, file in (("build", "build-kernels.yml"), ("gpu", "gpu.yml")):
        called, given = (workflow[True]["workflow_call"]["inputs"].keys() for workflow in (workflows[file], publish))
        assert called & given <= publish["jobs"][name]["with"].keys()


def test_kernels_are_published_after_their_dependencies() -> None:
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["kernels"]
    published: set[str] = set()
    for directory in release["with"]["projects"].split():
        general = tomli.loads((ROOT / directory / "build.toml").read_text())["general"]
        assert {dependency["repo-id"] for dependency in general.get("kernel-depends", [])} <= published
        published.add(general["hub"]["repo-id"])
