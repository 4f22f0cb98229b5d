"""The built package for the tests of blocks, and the reasons to skip them."""

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

try:
    from kernels import get_kernel_dep, get_local_kernel  # noqa: F401 - a release without the first loads no blocks
except ImportError:
    get_local_kernel = None  # the tests are those of a wheel

PROJECT = Path(__file__).parents[1]
DEPENDENCIES = ("adaln", "decode", "geglu", "loss", "rmsnorm", "rope3d")


def pytest_configure(config):
    config.addinivalue_line("markers", "kernels_ci: the subset that checks a build within a few seconds")


def _owner():
    """Return the owner of the kernels that the built package loads."""
    for metadata in PROJECT.glob("build/*/metadata.json"):
        return json.loads(metadata.read_text())["kernel-depends"][0]["repo-id"].partition("/")[0]
    return "kernels-community"


def _reason_to_skip():
    if sys.version_info < (3, 11):
        return "diffusers and transformers need Python 3.11"
    libraries = ("accelerate", "diffusers", "peft", "transformers")
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: pip install -r kernels/blocks/tests/requirements.txt"
    given = os.environ.get("LOCAL_KERNELS", "")
    unbuilt = [
        name
        for name in DEPENDENCIES
        if get_local_kernel and not (PROJECT.parent / name / "build").is_dir() and f"{_owner()}/{name}=" not in given
    ]
    if unbuilt:
        return f"needs {', '.join(unbuilt)} beside blocks: kernel-builder build kernels/*"
    return None


SKIPPED = _reason_to_skip()


class SkippedModule(pytest.Module):
    """Stands for a test module that cannot even be imported."""

    def collect(self):
        pytest.skip(SKIPPED)


def pytest_pycollect_makemodule(module_path, parent):
    return SkippedModule.from_parent(parent, path=module_path) if SKIPPED else None


@pytest.fixture(scope="session")
def owner():
    return _owner()


@pytest.fixture(scope="session")
def local_kernels(owner):
    """The kernels as built in this checkout, or as LOCAL_KERNELS has them."""
    paths = [f"{owner}/{name}={PROJECT.parent / name}" for name in DEPENDENCIES]
    return os.pathsep.join([*paths, *filter(None, [os.environ.get("LOCAL_KERNELS")])])


@pytest.fixture(scope="session")
def blocks(local_kernels):
    """The package as built, with these kernels; or the installed wheels."""
    if get_local_kernel is None:
        return importlib.import_module("blocks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_KERNELS", local_kernels)
        return get_local_kernel(PROJECT)


@pytest.fixture(scope="module")
def one_thread():
    """Many threads make models of this size slower, by a factor of 50 on a machine with other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_dynamo():
    """Torch counts the graphs of code that models share, accelerate's hooks for example, and traces it 8 times."""
    torch._dynamo.reset()


@pytest.fixture
def on_the_device_of_the_kernels(blocks, monkeypatch):
    device = blocks.kernel_set.DEVICE
    if device == "cpu":
        yield
    else:
        # Else convolutions of float32 differ from call to call by more than the kernels do.
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        with torch.device(device):
            yield


@pytest.fixture
def kernels_of_the_cpu(blocks):
    """For tests of CPU-only behavior."""
    if blocks.kernel_set.DEVICE != "cpu":
        pytest.skip("the kernels that are loaded are for a GPU")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
