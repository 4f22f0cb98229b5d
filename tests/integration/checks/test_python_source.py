"""The rules for a package's Python: sources that break them, and sources that look similar and do not."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kernel_builder import toml_file
from kernel_builder.checks import Finding
from tests.support.places import ROOT
from tests.support.sample_package import Make, findings

PYTHON_CHECKS = ("python-source", "python-imports", "op-namespace")
RULES = toml_file.read(Path(__file__).with_name("python_rules.toml"))
INIT = "from . import part\n"


def reported(make: Make, source: str, init: str = INIT) -> list[Finding]:
    """Return the findings in a package with a source as `part.py`."""
    return findings(make("torch-cpu", files={"__init__.py": init, "part.py": source, "layers.py": ""}), *PYTHON_CHECKS)


@pytest.mark.parametrize("rule", RULES["broken"], ids=lambda rule: rule["message"])
def test_source_that_breaks_a_rule(make: Make, rule: Mapping[str, str]) -> None:
    (finding,) = reported(make, rule["source"])
    assert (finding.check, finding.path, finding.severity) == (rule["check"], "part.py", "error")
    message = rule["message"] if sys.version_info >= (3, 11) else rule.get("message-of-3-10", rule["message"])
    assert message in finding.message and rule["hint"] in finding.hint


@pytest.mark.parametrize("source", RULES["kept"]["sources"])
def test_source_that_keeps_the_rules(make: Make, source: str) -> None:
    assert reported(make, source) == []


@pytest.mark.parametrize("rule", RULES["warned"])
def test_an_import_that_need_not_succeed_is_a_warning(make: Make, rule: Mapping[str, str]) -> None:
    """The public builder has NumPy beside Torch, and users need not."""
    (finding,) = reported(make, **rule)
    assert (finding.check, finding.path, finding.severity) == ("python-imports", "part.py", "warning")


@pytest.mark.parametrize("chain", RULES["chain"])
def test_imports_are_followed_from_the_first_file(make: Make, chain: dict[str, str]) -> None:
    found = findings(make("torch-cpu", files={**chain, "part.py": "import transformers\n"}), "python-imports")
    assert [(finding.path, finding.severity) for finding in found] == [("part.py", "error")]


def test_the_table_of_present_modules_is_what_torch_and_the_client_require() -> None:
    """Each direct requirement is in the table, and the table has nothing that nothing requires."""
    table = toml_file.read(ROOT / "kernel_builder" / "checks" / "present_modules.toml")
    for name, root in (("torch", "torch"), ("client", "kernels")):
        direct = {requirement for requirement in required(root) if requirement != "nvidia"}
        closure = {root, *direct}
        for _ in range(4):
            closure |= {more for distribution in closure for more in required(distribution)}
        gpu = {name for name in direct if name.startswith(("nvidia", "cuda", "triton"))}
        present = {*table["torch"], *table[name]}
        assert direct - gpu - {"tomli"} <= present
        assert set(table[name]) <= closure


def required(distribution: str) -> set[str]:
    """Return the names of an installed package's requirements on this machine, without extras."""
    try:
        texts = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return set()
    requirements = [Requirement(text) for text in texts]
    return {
        canonicalize_name(requirement.name)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }


def test_a_guess_is_a_warning(make: Make) -> None:
    (finding,) = findings(make("torch-cpu", files={"part.py": "n = 1\nn.is_integer()\n"}), *PYTHON_CHECKS)
    assert (finding.severity, finding.message) == ("warning", "line 2: 'int.is_integer' member needs Python 3.12")


def test_declared_dependencies_may_be_imported(make: Make) -> None:
    package = make("torch-cpu", files={"part.py": "import einops\n"}, **{"python-depends": ["einops"]})
    assert findings(package, *PYTHON_CHECKS) == []
