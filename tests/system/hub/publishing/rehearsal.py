"""Runs the steps of the GitHub workflows as they are, without GitHub."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.places import ROOT
from tests.support.programs import run

BIN = Path(sys.executable).parent
WORKFLOWS = ROOT / ".github" / "workflows"
_NAMED = re.compile(r"(?<![\w.'-])(?:inputs|matrix|needs|steps|github|secrets|runner)\.[\w.-]+")
_FUNCTIONS = {"!cancelled()": "True", "always()": "True", "success()": "True", "&&": " and ", "||": " or "}


def evaluate(expression: str, known: Mapping[str, str | None]) -> Any:
    """Return the value of an expression of GitHub, as far as the workflows use its language."""

    def value(match: re.Match[str]) -> str:
        # GitHub has an empty text for a secret that is not set and for the output of a step that was skipped.
        optional = match[0].startswith(("secrets.", "steps."))
        text = known.get(match[0], "") if optional else known[match[0]]
        return repr({"true": True, "false": False}.get(str(text).lower(), text or ""))

    python = _NAMED.sub(value, expression)
    for github, meaning in _FUNCTIONS.items():
        python = python.replace(github, meaning)
    return eval(python, {"__builtins__": {}})


class Rehearsal:
    """Runs a workflow's jobs by `bash -e` in a checkout, as GitHub does, and imitates actions that move artifacts."""

    def __init__(
        self,
        checkout: Path,
        context: Mapping[str, str],
        environment: Mapping[str, str],
        workflow: str = "publish-kernels.yml",
    ) -> None:
        self.workflow = yaml.safe_load((WORKFLOWS / workflow).read_text())
        self.checkout, self.environment = checkout, environment
        self.artifacts = checkout.parent / "artifacts"
        inputs = (self.workflow[True].get("workflow_call") or {}).get("inputs", {})
        self.context = {f"inputs.{name}": str(given.get("default", "")) for name, given in inputs.items()} | context
        self.context["runner.temp"] = str(checkout.parent / "temp")

    def _evaluate(self, expression: str, more: Mapping[str, str | None] | None = None) -> Any:
        return evaluate(expression, {**self.context, **(more or {})})

    def _text(self, text: object, more: Mapping[str, str | None]) -> str:
        def value(match: re.Match[str]) -> str:
            result = self._evaluate(match[1], more)
            return str(result).lower() if isinstance(result, bool) else str(result)

        return re.sub(r"\$\{\{ (.+?) \}\}", value, str(text))

    def runs(self, name: str, **results: str) -> bool:
        """Returns whether a job runs after others with these results: `success`, `failure` or `skipped`."""
        condition = self.workflow["jobs"][name].get("if", "success()")
        failed = any(result != "success" for result in results.values())
        if failed and "cancelled()" not in condition:
            return False  # as on GitHub, a condition without a status function holds only after jobs that succeeded
        return bool(self._evaluate(condition, {f"needs.{job}.result": result for job, result in results.items()}))

    def job(self, name: str, matrix: Mapping[str, str | None] | None = None, *, only: str = "") -> dict[str, str]:
        """Run a job's steps, or one, and return the outputs. After a failure, only steps with `always()` run."""
        job = self.workflow["jobs"][name]
        shutil.rmtree(self.context["runner.temp"], ignore_errors=True)
        known = {f"matrix.{key}": value for key, value in (matrix or {}).items()}
        failure: AssertionError | None = None
        for step in job["steps"]:
            condition = str(step.get("if", "success()"))
            if (only and step.get("name") != only) or (failure and "always()" not in condition):
                continue
            if not self._evaluate(condition, known):
                continue
            try:
                step_outputs = self._step(job, step, known)
            except AssertionError as error:
                failure = failure or error
                continue
            known |= {f"steps.{step.get('id')}.outputs.{key}": value for key, value in step_outputs.items()}
        if failure:
            raise failure
        outputs = {key: self._text(value, known) for key, value in job.get("outputs", {}).items()}
        self.context |= {f"needs.{name}.outputs.{key}": value for key, value in outputs.items()}
        return outputs

    def _step(self, job: Mapping[str, Any], step: Mapping[str, Any], known: Mapping[str, str | None]) -> dict[str, str]:
        used = step.get("uses", "").partition("@")[0]
        if "artifact" in used:
            given = {key: self._text(value, known) for key, value in step["with"].items()}
            return self._upload(given) if used == "actions/upload-artifact" else self._download(given)
        if "run" not in step:
            return {}
        output = self.checkout.parent / "output"
        output.write_text("")
        own = {key: self._text(value, known) for key, value in {**job.get("env", {}), **step.get("env", {})}.items()}
        files = {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(self.checkout.parent / "summary")}
        environment = {**self.environment, "RUNNER_TEMP": self.context["runner.temp"], **own, **files}
        environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
        if "$(curl " in step["run"] and shutil.which("curl") is None:
            pytest.skip("curl is not installed: apt-get install curl")
        run("bash", "-e", "-c", step["run"], cwd=self.checkout, env=environment)
        return dict(line.split("=", 1) for line in output.read_text().splitlines())

    def _upload(self, given: Mapping[str, str]) -> dict[str, str]:
        place = self.artifacts / given["name"]
        for path in Path("/").glob(str(self.checkout / given["path"])[1:]):
            if any(file.is_file() for file in (path, *path.rglob("*"))):
                shutil.copytree(path if path.is_dir() else path.parent, place, dirs_exist_ok=True)
        assert place.exists() or given.get("if-no-files-found") != "error", given
        return {"artifact-id": given["name"]} if place.exists() else {}

    def _download(self, given: Mapping[str, str]) -> dict[str, str]:
        """Download or merge artifacts, whose ids are their names here."""
        place = self.checkout / given["path"] if "path" in given else self.artifacts / given["name"]
        for artifact in sorted(self.artifacts.iterdir()):
            if fnmatch.fnmatch(artifact.name, given.get("artifact-ids") or given["pattern"]):
                shutil.copytree(artifact, place, dirs_exist_ok=True)
        return {"artifact-id": place.name}
