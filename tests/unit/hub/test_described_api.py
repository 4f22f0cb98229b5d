"""The Python of packages is as `kernels describe-api` of client 0.18 reads it.

The rule is that of `kernels/cli/describe.py` in huggingface/kernels at 19284561a28c: `__all__` of the package names the
functions, `__all__` of its module `layers` the layers, both are literal lists, and every name leads through relative
imports to a definition in the package.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from click.testing import CliRunner

from kernel_builder.cli import main
from tests.support.places import ROOT

PACKAGES = sorted({*ROOT.glob("kernels/*/torch-ext/*/__init__.py"), *ROOT.glob("examples/*/torch-ext/*/__init__.py")})
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def exported(module: Path) -> list[str]:
    """Return the literal `__all__` of a module."""
    for statement in ast.parse(module.read_text()).body:
        match statement:
            case ast.Assign([ast.Name("__all__")], value):
                names = ast.literal_eval(value)
                assert isinstance(names, (list, tuple))
                return [str(name) for name in names]
    return []


def is_defined(module: Path, name: str) -> bool:
    """Return whether a name is a function or class of a module, or of one that it imports the name from."""
    for statement in ast.parse(module.read_text()).body:
        if isinstance(statement, _Definition) and statement.name == name:
            return True
        match statement:
            case ast.Assign([ast.Name(alias)], ast.Name(target)) if alias == name:
                return is_defined(module, target)
        if isinstance(statement, ast.ImportFrom) and statement.level == 1 and statement.module:
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    base = module.parent.joinpath(*statement.module.split("."))
                    files = [path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()]
                    return bool(files) and is_defined(files[0], alias.name)
    return False


def undescribed(init: Path) -> list[str]:
    """Return the exported names that the command does not find, and `layers` if it lists none of its layers."""
    layers = next((p for p in (init.with_name("layers.py"), init.parent / "layers/__init__.py") if p.is_file()), None)
    names = [(init, name) for name in exported(init) if name != "layers"]
    missing = [name for module, name in names if not is_defined(module, name)]
    if layers is not None:
        listed = exported(layers)
        missing += [f"layers.{name}" for name in listed if not is_defined(layers, name)] or ["layers"] * (not listed)
    return missing if names else ["__all__"]


@pytest.mark.parametrize("init", PACKAGES, ids=lambda init: init.parent.name)
def test_the_client_describes_every_function_and_layer(init: Path) -> None:
    assert undescribed(init) == []


def test_the_client_describes_a_new_project(tmp_path: Path) -> None:
    made = CliRunner().invoke(main, ["init", str(tmp_path / "fresh"), "--name", "me/fresh"])
    assert made.exit_code == 0, made.output
    (init,) = (tmp_path / "fresh").glob("torch-ext/*/__init__.py")
    assert undescribed(init) == []
    init.with_name("layers.py").write_text("class Layer: ...\n")
    assert undescribed(init) == ["layers"]
