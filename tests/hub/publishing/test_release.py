"""The workflows: valid, careful, and rehearsed against our own Hub, step by step as they stand."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kernel_builder.config.variant import this_platform
from kernel_builder.hub.verification import verify
from kernel_builder.toolchain import Toolchains

from ...conftest import CPU, PROJECTS, ROOT
from ..conftest import RunningHub
from . import sigstore_instance
from .conftest import tree

BIN = Path(sys.executable).parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
ACTIONS = sorted((ROOT / ".github/actions").glob("*/action.yml"))
ORGANISATION = "kernels-community"


def run(*command: str | Path, **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_workflows_and_actions_are_what_github_reads() -> None:
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.github-actions", *ACTIONS)


def test_workflows_are_careful() -> None:
    """Actions pinned by hash, no more permissions than needed, nothing of the outside in a command."""
    run(BIN / "zizmor", "--offline", "--quiet", ROOT / ".github")
    for file in [*WORKFLOWS, *ACTIONS]:
        for used, comment in re.findall(r"uses: (\S+)(.*)", file.read_text()):
            if not used.startswith("$/"):  # this repository, at the same commit
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used) and re.match(r" # v\d", comment), (file, used)
    for file in WORKFLOWS:
        workflow = yaml.safe_load(file.read_text())
        assert workflow["permissions"] == {}
        assert all(job["permissions"] for job in workflow["jobs"].values())


def test_the_ten_lines_of_the_documentation_call_the_workflow() -> None:
    text = (ROOT / "docs/publishing.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (job,) = yaml.safe_load(example)["jobs"].values()
    called = yaml.safe_load((ROOT / ".github/workflows/publish-kernels.yml").read_text())[True]["workflow_call"]
    assert job["uses"].partition("@")[0].endswith(".github/workflows/publish-kernels.yml")
    assert set(job["with"]) <= set(called["inputs"])
    assert set(job["secrets"]) <= set(called["secrets"])
    assert len(example.splitlines()) <= 16
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["kernels"]
    assert set(release["with"]) <= set(called["inputs"])
    assert all((ROOT / project / "build.toml").is_file() for project in release["with"]["projects"].split())


class Rehearsal:
    """Runs the commands of a workflow's jobs as GitHub does: by `bash -e`, in a checkout, with their environment."""

    def __init__(self, checkout: Path, context: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self.workflow = yaml.safe_load((ROOT / ".github/workflows/publish-kernels.yml").read_text())
        self.checkout, self.environment = checkout, environment
        inputs = self.workflow[True]["workflow_call"]["inputs"]
        self.context = {f"inputs.{name}": str(given.get("default", "")) for name, given in inputs.items()} | context

    def _value(self, text: object, matrix: Mapping[str, str]) -> str:
        known = {**self.context, **{f"matrix.{key}": value or "" for key, value in matrix.items()}}
        return re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda match: known[match[1]], str(text))

    def job(self, name: str, matrix: Mapping[str, str] | None = None) -> dict[str, str]:
        """Runs the commands of a job, and returns what they have put out."""
        job = self.workflow["jobs"][name]
        output = self.checkout.parent / f"output-{name}"
        output.write_text("")
        for step in job["steps"]:
            wanted = self._value(f"${{{{ {step['if']} }}}}", {}) if "if" in step else "true"
            if "run" not in step or wanted.lower() != "true":
                continue
            given = {**job.get("env", {}), **step.get("env", {})}
            environment = {key: self._value(value, matrix or {}) for key, value in given.items()}
            environment = {**self.environment, **environment, "GITHUB_OUTPUT": str(output)}
            environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
            run("bash", "-e", "-c", step["run"], cwd=self.checkout, env=environment)
        return dict(line.split("=", 1) for line in output.read_text().splitlines())


# The roots of trust are all that differs from signing on a runner.
TRUSTING = """
import sys
if "sign" in sys.orig_argv:
    from sigstore.models import ClientTrustConfig
    ClientTrustConfig.production = classmethod(lambda cls, offline=False: cls.from_json({trust!r}))
"""
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
    (tmp_path / "without" / "torch").mkdir(parents=True)
    (tmp_path / "without" / "torch" / "__init__.py").write_text("raise ImportError('not on this runner')\n")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "toolchains").symlink_to(Toolchains().store.root, target_is_directory=True)
    environment = {key: value for key, value in hub.environment.items() if key not in {"HF_TOKEN", "HF_ENDPOINT"}}
    environment |= {"KERNEL_BUILDER_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path / "without")}
    context = {
        "inputs.projects": "kernels/python-only kernels/stable-scale",
        "inputs.organisation": ORGANISATION,
        "inputs.endpoint": hub.url,
        "secrets.hf-token": "",
    }
    rehearsal = Rehearsal(checkout, context, environment)
    parts = json.loads(rehearsal.job("plan")["runners"])["include"]
    assert [(part["name"], part["platform"], part["backend"]) for part in parts] == [
        ("python-only", "x86_64-linux", None),
        ("stable-scale", "aarch64-linux", "cpu"),
        ("stable-scale", "x86_64-linux", "cpu"),
    ]
    for part in parts:
        if part["platform"] == this_platform():
            rehearsal.job("build", part)
    shutil.copytree(checkout / "packages", checkout, dirs_exist_ok=True)  # as the artifacts come back

    rehearsal.job("publish")  # without a token: a dry run
    assert not hub.api().repo_exists(f"{ORGANISATION}/stable-scale", repo_type="kernel")
    (tmp_path / "trusting").mkdir()
    (tmp_path / "trusting" / "sitecustomize.py").write_text(TRUSTING.format(trust=sigstore.trust))
    environment |= {"PYTHONPATH": str(tmp_path / "trusting"), **sigstore.job_of("org/kernels", WORKFLOW)}
    context |= {"inputs.projects": "kernels/stable-scale", "secrets.hf-token": "any"}
    Rehearsal(checkout, context, environment).job("publish")
    published = f"{ORGANISATION}/stable-scale"
    assert f"build/{CPU}/metadata.json" in tree(hub, published, "v1")
    assert verify(published, endpoint=hub.url, signers=[f"https://github.com/{WORKFLOW}"], require_signature=True).ok
