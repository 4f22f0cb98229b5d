"""Every listing of the skill's references is correct: files that build, commands that work, Python that runs.

The references are one project. A listing whose first line is a comment with a path is that file of the project. Other
listings are commands and scripts, which run in the order of the text, beside the project.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import programs
from tests.support.files import write_files
from tests.support.places import ROOT

REFERENCES = ROOT / "packages" / "kernel-judge" / "kernel_judge" / "search" / "cuda-kernels" / "references"
# The order in which an agent needs them. GPU guides have no listings.
ORDER = ("build-toml", "vectors", "reductions", "torch", "integration", "judge-and-benchmark")


class Listing(NamedTuple):
    language: str
    text: str

    @property
    def path(self) -> str | None:
        """The file of the project that this is, or None for commands and scripts."""
        match = re.match(r"(?://|#) ([\w./-]+\.\w+)\n", self.text)
        return match[1] if match else None


def listings(reference: str) -> list[Listing]:
    text = (REFERENCES / f"{reference}.md").read_text()
    return [Listing(*parts) for parts in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


def run(directory: Path, *command: str | Path) -> None:
    tools = [str(Path(sys.executable).parent), os.environ["PATH"]]
    env = {**os.environ, "PATH": os.pathsep.join(tools), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    programs.run(*command, cwd=directory, env=env)


def test_every_reference_is_read() -> None:
    names = {path.stem for path in REFERENCES.glob("*.md") if not path.stem.startswith("gpu-")}
    assert names == set(ORDER)
    for path in REFERENCES.glob("gpu-*.md"):
        assert not listings(path.stem)
    for reference in ORDER:
        assert all(listing.language in {"sh", "python", "toml", "cpp", "cuda"} for listing in listings(reference))


@pytest.mark.nightly  # builds, tests, a judgement and a benchmark take 23 s of CPU time
def test_every_listing_works(tmp_path: Path) -> None:
    project = tmp_path / "rms-scale"
    for reference in ORDER:
        script = ""
        for listing in listings(reference):
            if listing.path:
                write_files(project, {listing.path: listing.text})
            elif listing.language == "sh":
                run(tmp_path, "sh", "-e", "-c", listing.text)
            else:
                assert listing.language == "python"
                script += listing.text  # later scripts of a reference use the names of earlier ones
        if script and find_spec("diffusers"):
            run(tmp_path, sys.executable, "-c", script)
    pytest.importorskip("diffusers", reason="diffusers and transformers need Python 3.11")
