"""A repository of many kernels: pull requests and merges, rehearsed with the workflows' own steps."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from kernel_builder.config.variant import this_platform
from tests.support.files import replace, write_files
from tests.support.loopback import QuietHandler, served
from tests.support.places import CPU, PROJECTS, ROOT, SOURCES
from tests.support.running_hub import RunningHub
from tests.unit.config.test_changed import commit, git

from .conftest import tree
from .rehearsal import WORKFLOWS, Rehearsal, evaluate

REPOSITORY = "org/kernels"
TOKEN = "token-of-the-job"
OWNER = "kernels-community"


def documented() -> list[str]:
    """Return the workflows of the documentation, with an owner and a commit."""
    text = (ROOT / "docs" / "many-kernels.md").read_text()
    text = text.replace("OWNER/", "owner/").replace("@COMMIT", f"@{'c0ffee00' * 5} # v0.1.0")
    return re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)


def all_workflows() -> list[dict[Any, Any]]:
    """Return every workflow of the repository and of the documentation. YAML 1.1 reads the key `on` as true."""
    return [yaml.safe_load(text) for text in (*(file.read_text() for file in WORKFLOWS.glob("*.yml")), *documented())]


def called(job: dict[str, Any]) -> dict[Any, Any]:
    """Return the workflow that a job calls."""
    workflow = yaml.safe_load((WORKFLOWS / job["uses"].rpartition("/")[2].partition("@")[0]).read_text())
    assert isinstance(workflow, dict)
    return workflow


def test_jobs_that_run_code_of_a_pull_request_have_no_secret_and_only_read() -> None:
    workflows = [workflow for workflow in all_workflows() if "pull_request" in workflow[True]]
    assert len(workflows) == 3
    pull_request = {"github.event_name": "pull_request", "github.ref": "refs/pull/1/merge"}
    jobs = 0
    queue = [job for workflow in workflows for job in workflow["jobs"].values()]
    for job in queue:
        if "github.event_name" in job.get("if", "") and not evaluate(job["if"], pull_request):
            continue
        jobs += 1
        assert set(job["permissions"].values()) <= {"read"}
        assert "secrets" not in yaml.safe_dump(job) and "environment" not in job
        queue += called(job)["jobs"].values() if "uses" in job else []
        for step in job.get("steps", []):
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
    assert jobs == 13  # test, device-code, Debian 13; twice a call and its selection, build, collection and tests


def test_no_workflow_runs_with_the_rights_of_the_repository_on_a_pull_request() -> None:
    assert not any({"pull_request_target", "workflow_run"} & set(workflow[True]) for workflow in all_workflows())


@dataclass
class RunningGitHub:
    """The commits of successful runs by workflow and branch, as GitHub's REST API answers on a loopback port."""

    url: str = ""
    runs: dict[tuple[str, str], list[str]] = field(default_factory=dict)


@pytest.fixture
def github() -> Iterator[RunningGitHub]:
    github = RunningGitHub()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            query = parse_qs(asked.query)
            prefix, _, rest = asked.path.partition("/actions/workflows/")
            workflow, _, runs = rest.partition("/")
            if self.headers["Authorization"] != f"Bearer {TOKEN}" or (prefix, runs) != (f"/repos/{REPOSITORY}", "runs"):
                self.send_json(404, {"message": "Not Found"})
                return
            assert query["status"] == ["success"] and query["event"] == ["push"]
            commits = github.runs.get((workflow, query["branch"][0]), [])
            self.send_json(200, {"workflow_runs": [{"head_sha": commit} for commit in commits[-1:]]})

    with served(Handler) as github.url:
        yield github


class ManyKernels:
    """A repository with two CPU projects that share a header, and its events on GitHub."""

    def __init__(self, root: Path, github: RunningGitHub, hub: RunningHub) -> None:
        self.root, self.github = root / "checkout", github
        for name in ("one", "two"):
            project = Path(shutil.copytree(PROJECTS / "stable-scale", self.root / name))
            text = (project / "build.toml").read_text().replace("stable-scale", name).replace(', "cuda"]', "]")
            (project / "build.toml").write_text(re.sub(r"\[kernel.scale_cuda\].*", "", text, flags=re.DOTALL))
            (project / "torch-ext" / "stable_scale").rename(project / "torch-ext" / name)
            (project / "scale" / "scale_cuda.cu").unlink()
            (self.root / "kit").mkdir(exist_ok=True)
            (project / "scale" / "scale.h").replace(self.root / "kit" / "scale.h")
            (project / "scale" / "scale.h").symlink_to("../../kit/scale.h")
            write_files(project, {"tests/test_load.py": SOURCES["test_of_a_kernel"]})
        (self.root / "scripts").mkdir()  # no project
        self.environment = {
            **{key: value for key, value in hub.environment.items() if key not in {"HF_TOKEN", "HF_ENDPOINT"}},
            "GITHUB_API_URL": github.url,
            "GITHUB_REPOSITORY": REPOSITORY,
            "GITHUB_REF_NAME": "main",
            "GITHUB_WORKFLOW_REF": f"{REPOSITORY}/.github/workflows/kernels.yml@refs/heads/main",
        }
        self.context = {"github.token": TOKEN, "inputs.endpoint": hub.url, "inputs.owner": OWNER}
        self.context |= {"inputs.skip-gpu-tests": "it has no GPU code", "inputs.sign": "false"}

    def workflow(self, name: str, event: str, job: str, **context: str) -> Rehearsal:
        """Return a workflow as the documented workflow of the repository calls it from a job."""
        inputs = yaml.safe_load(documented()[0])["jobs"][job]["with"]
        given = {f"inputs.{key}": str(value) for key, value in inputs.items()}
        environment = {**self.environment, "GITHUB_EVENT_NAME": event}
        return Rehearsal(self.root, {**given, **self.context, **context}, environment, name)

    def selected(self, event: str, job: str = "publish") -> str:
        """Return the projects that an event builds."""
        rehearsal = self.workflow("build-kernels.yml", event, job)
        projects = rehearsal.job("select")["projects"]
        assert rehearsal.runs("build", select="success") == bool(projects)
        return projects

    def build(self, event: str, job: str) -> str:
        """Build the projects that an event touches on this platform, and return them."""
        rehearsal = self.workflow("build-kernels.yml", event, job)
        selected = rehearsal.job("select")
        parts = json.loads(selected["runners"])["include"]
        assert {part["platform"] for part in parts} == {"x86_64-linux", "aarch64-linux"}
        assert rehearsal.runs("build", select="success")
        shutil.rmtree(self.root.parent / "artifacts", ignore_errors=True)
        for part in parts:
            if part["platform"] == this_platform():
                rehearsal.job("build", part)
        rehearsal.job("collect")
        for part in json.loads(selected["tests"])["include"]:
            if part["platform"] == this_platform():
                rehearsal.job("test", part)
        return selected["projects"]


def test_a_pull_request_and_its_merge_rehearsed(hub: RunningHub, github: RunningGitHub, tmp_path: Path) -> None:
    kernels = ManyKernels(tmp_path, github, hub)
    github.runs["kernels.yml", "main"] = [commit(kernels.root, "README.md", "Kernels")]

    # A pull request of a fork touches one project. Its build has nothing of use to a thief.
    git(kernels.root, "switch", "--quiet", "--create", "pull")
    commit(kernels.root, "one/torch-ext/one/more.py", "")
    git(kernels.root, "switch", "--quiet", "main")
    commit(kernels.root, "README.md", "Many kernels")
    git(kernels.root, "switch", "--quiet", "--detach", "main")
    git(kernels.root, "merge", "--quiet", "--no-ff", "--no-edit", "pull")
    assert kernels.build("pull_request", "build") == "one"
    artifacts = tmp_path / "artifacts"
    assert sorted(path.name for path in artifacts.iterdir()) == ["packages", "packages-one-cpu-x86_64-linux"]
    assert (tmp_path / "tested-one").exists()
    with pytest.raises(AssertionError, match="no kernel for cuda or rocm to emulate"):  # else its tests would run, too
        part = {"backend": "cuda", "platform": "x86_64-linux", "project": "one", "name": "one", "dependencies": ""}
        kernels.workflow("build-kernels.yml", "pull_request", "build").job("test", part, only="Test")

    # The merge publishes the project, and only that.
    merged = git(kernels.root, "rev-parse", "HEAD")
    git(kernels.root, "switch", "--quiet", "main")
    git(kernels.root, "merge", "--quiet", merged)
    projects = kernels.build("push", "publish")
    assert projects == "one"
    given = {
        "needs.build.outputs.projects": projects,
        "needs.build.outputs.packages": "packages",
        "secrets.HF_TOKEN": "any",
    }
    publishing = kernels.workflow("publish-kernels.yml", "push", "publish", **given)
    assert publishing.runs("publish", build="success", gpu="skipped")
    publishing.job("publish")
    assert f"build/{CPU}/metadata.json" in tree(hub, f"{OWNER}/one", "v1")
    assert not hub.api().repo_exists(f"{OWNER}/two", repo_type="kernel")

    # One refused project, here without packages, keeps the others from being published.
    commit(kernels.root, "one/CARD.md", "# one")
    publishing.context["needs.build.outputs.projects"] = "one two"
    before = tree(hub, f"{OWNER}/one", "main")
    with pytest.raises(AssertionError, match="two/build"):
        publishing.job("publish", only="Publish")
    assert tree(hub, f"{OWNER}/one", "main") == before


def test_the_projects_that_an_event_builds(hub: RunningHub, github: RunningGitHub, tmp_path: Path) -> None:
    kernels = ManyKernels(tmp_path, github, hub)
    first = commit(kernels.root, "README.md", "Kernels")
    assert kernels.selected("push") == "one two"  # nothing was published yet
    runs = github.runs["kernels.yml", "main"] = [first]
    commit(kernels.root, "two/CARD.md", "two")  # the run for this push fails
    commit(kernels.root, "README.md", "More kernels")
    assert kernels.selected("push") == "two"
    assert kernels.selected("pull_request", "build") == ""
    assert kernels.selected("workflow_dispatch") == "one two"
    runs.append(git(kernels.root, "rev-parse", "HEAD"))
    assert kernels.selected("push") == ""
    nothing = kernels.workflow("publish-kernels.yml", "push", "publish", **{"needs.build.outputs.projects": ""})
    assert not nothing.runs("publish", build="success", gpu="skipped")
    commit(kernels.root, "kit/scale.h", "// of both\n")
    assert kernels.selected("push") == "one two"
    runs.append("0" * 40)  # no commit of the branch: a forced push has removed it
    assert kernels.selected("push") == "one two"
    kernels.context["github.token"] = "expired"
    with pytest.raises(AssertionError, match="the job needs `actions: read`"):
        kernels.selected("push")


def test_a_python_only_project_is_tested_with_its_dependencies(
    hub: RunningHub, github: RunningGitHub, tmp_path: Path
) -> None:
    kernels = ManyKernels(tmp_path, github, hub)
    github.runs["kernels.yml", "main"] = [commit(kernels.root, "README.md", "Kernels")]
    project = Path(shutil.copytree(PROJECTS / "python-only", kernels.root / "three"))
    loads = f'kernel-depends = [{{ repo-id = "{OWNER}/one", version = 1 }}]\n\n[torch-noarch]'
    replace(project / "build.toml", "[torch-noarch]", loads)
    loading = SOURCES["test_of_a_kernel"].replace("local_kernel(project,", "local_kernel(project.parent / 'one',")
    write_files(project, {"tests/test_load.py": loading})
    commit(kernels.root, "three/CARD.md", "three")
    rehearsal = kernels.workflow("build-kernels.yml", "push", "publish")
    selected = rehearsal.job("select")
    (part,) = json.loads(selected["tests"])["include"]
    assert part["project"] == selected["projects"] == "three"
    assert part["dependencies"] == selected["dependencies"] == "one"
    rehearsal.job("build", part)
    rehearsal.job("collect")
    rehearsal.job("test", part)
    assert (tmp_path / "tested-three").exists()
