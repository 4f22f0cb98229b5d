"""Runs a `setup.py` with stubs of setuptools and Torch, and prints its extensions and settings as JSON.

    python -I recorder.py ENVIRONMENT

ENVIRONMENT is JSON: `script` and `root`, the script and its directory; `cuda`, the CUDA release of Torch, or null;
`gpu`, whether there is a GPU; `home`, the directory of a toolkit; `arguments` of the script; `absent`, further modules
to replace by placeholders. The program runs in a sandbox on a copy of the project, and must not import the builder.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

from packaging.version import parse

TORCH = "2.13.0"
# The positional parameters of setuptools' Extension.
_PARAMETERS = (
    *("name", "sources", "include_dirs", "define_macros", "undef_macros", "library_dirs", "libraries"),
    *("runtime_library_dirs", "extra_objects", "extra_compile_args", "extra_link_args"),
)
environment = json.loads(sys.argv[1])
cuda, gpu, home, root = (environment[name] for name in ("cuda", "gpu", "home", "root"))
extensions: list[Extension] = []
settings: dict[str, Any] = {}
remarks: dict[tuple[int, str], None] = {}


def line() -> int:
    """Return the current line of setup.py; 0 if another program runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename != environment["script"]:
        frame = frame.f_back
    return frame.f_lineno if frame else 0


def remark(text: str) -> None:
    """Record an assumption about the machine, with the line of setup.py, if a file of the project depends on it."""
    frame: FrameType | None = sys._getframe(1)
    while frame and (frame.f_code.co_filename == __file__ or frame.f_globals["__name__"] in ("os", "collections.abc")):
        frame = frame.f_back
    if frame and frame.f_code.co_filename.startswith(root):
        remarks[line(), text] = None


class Placeholder:
    """A value that only the real module has. Uses of it are recorded."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_decorator = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if is_decorator else Placeholder(f"{self._name}()")

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()

    def __str__(self) -> str:
        remark(f"`{self._name}` has no value here")
        return f"<unknown {self._name}>"

    __repr__ = __fspath__ = __str__
    __hash__ = object.__hash__

    def _decide(self, *_: Any) -> bool:
        remark(f"`{self._name}` has no value here; conditions on it are taken as false")
        return False

    __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _decide

    def __iter__(self) -> Iterator[Any]:
        remark(f"`{self._name}` has no value here; it is taken as empty")
        return iter(())


class Stub(ModuleType):
    """A module that has the attributes of `CONTENTS`, and placeholders for others."""

    __path__ = [f"{home}/torch"]  # noqa: RUF012  # as in its base class

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if any(module == full or module.startswith(f"{full}.") for module in CONTENTS):
            return importlib.import_module(full)
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(full)


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stub for each replaced module and for its submodules."""

    replaced: ClassVar = {"setuptools", "distutils", "pkg_resources", "wheel", "torch", *environment["absent"]}

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.replaced:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=f"{home}/{name}/__init__.py", is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(CONTENTS.get(module.__name__, {}), __file__=f"{home}/{module.__name__}/__init__.py")


class Extension:
    """An extension, with the arguments of setuptools' `Extension` as attributes that the script may change."""

    _kind = "cpu"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._line = line()
        given = dict(zip(_PARAMETERS, args, strict=False))
        vars(self).update({**{name: [] for name in _PARAMETERS}, **given, **kwargs})
        extensions.append(self)


class CudaExtension(Extension):
    _kind = "cuda"


class SyclExtension(Extension):
    _kind = "xpu"


def _comparison(name: str) -> Callable[[Any, Any], bool]:
    def compare(self: str, other: Any) -> bool:
        text = ".".join(map(str, other)) if isinstance(other, tuple) else str(other)
        return bool(getattr(parse(str.__str__(self)), name)(parse(text)))

    return compare


# A text that compares by its numbers, as `torch.__version__` does, with the attributes of `packaging.version.Version`.
_COMPARISONS = {name: _comparison(name) for name in ("__lt__", "__le__", "__gt__", "__ge__")}
Version = type("Version", (str,), {**_COMPARISONS, "__getattr__": lambda self, name: getattr(parse(str(self)), name)})


class Environment(type(os.environ)):  # type: ignore[misc]
    """The environment variables; those that setup.py reads and that are not set are recorded."""

    def __getitem__(self, key: str) -> str:
        try:
            return str(super().__getitem__(key))
        except KeyError:
            remark(f"the environment variable {key} is not set")
            raise


class Arguments(list[str]):
    """`sys.argv`; options that setup.py looks for and that are not given are recorded."""

    def __contains__(self, value: object) -> bool:
        is_given = bool(super().__contains__(value))
        if not is_given and str(value).startswith("-"):
            remark(f"the option {value} is not given")
        return is_given


def setup(**given: Any) -> None:
    """Record the arguments of `setuptools.setup`."""
    settings.update(given)


def find_packages(where: str = ".", *args: Any, **kwargs: Any) -> list[str]:
    """Return the packages below a directory."""
    found = sorted(path.parent.relative_to(where) for path in Path(where).rglob("__init__.py"))
    return [".".join(path.parts) for path in found if path.parts]


def constant(value: Any) -> Callable[..., Any]:
    """Return a function that takes any arguments and returns a value."""
    return lambda *args, **kwargs: value


_PACKAGES = {"find_packages": find_packages, "find_namespace_packages": find_packages}
_TOOLS = {"setup": setup, "Extension": Extension, **_PACKAGES}


def of_gpu(value: Any) -> Callable[..., Any]:
    """Return a function that returns a value, and on a machine without a GPU raises an exception as Torch's does."""

    def read(*args: Any, **kwargs: Any) -> Any:
        if not gpu:
            raise RuntimeError("Found no NVIDIA driver on your system")
        return value

    return read


_H100 = SimpleNamespace(major=9, minor=0, name="NVIDIA H100", multi_processor_count=132, total_memory=80 << 30)
_BUILT_FOR = (80, 90, 100, 120) if cuda else ()
_ABSENT = {"is_available": constant(False), "is_built": constant(False)}
CONTENTS: dict[str, dict[str, Any]] = {
    "setuptools": _TOOLS,
    "setuptools.extension": _TOOLS,
    "distutils.core": _TOOLS,
    "distutils.extension": _TOOLS,
    "distutils.version": {"LooseVersion": Version, "StrictVersion": Version},
    "distutils.sysconfig": vars(sysconfig),
    "distutils.util": {"strtobool": lambda value: str(value).lower() in ("1", "y", "yes", "t", "true", "on")},
    "pkg_resources": {"parse_version": Version},
    "torch": {"__version__": Version(TORCH), "compiled_with_cxx11_abi": constant(True)},
    "torch.version": {"__version__": Version(TORCH), "cuda": cuda, "hip": None, "xpu": None, "debug": False},
    "torch.cuda": {
        "is_available": constant(gpu),
        "device_count": constant(int(gpu)),
        "current_device": of_gpu(0),
        "get_device_capability": of_gpu((9, 0)),
        "get_device_properties": of_gpu(_H100),
        "get_device_name": of_gpu(_H100.name),
        "get_arch_list": constant([f"sm_{number}" for number in _BUILT_FOR]),
        "get_gencode_flags": constant(" ".join(f"-gencode compute=compute_{n},code=sm_{n}" for n in _BUILT_FOR)),
    },
    "torch.xpu": _ABSENT,
    "torch.mps": _ABSENT,
    "torch.backends.mps": _ABSENT,
    "torch.backends.openmp": {"is_available": constant(True)},
    "torch.backends.cuda": {"is_built": constant(bool(cuda))},
    "torch.backends.cudnn": {"is_available": constant(bool(cuda)), "version": constant(91002)},
    "torch._C": {"_GLIBCXX_USE_CXX11_ABI": True},
    "torch.__config__": {"parallel_info": constant("ATen parallel backend: OpenMP"), "show": constant("")},
    "torch.utils": {"cmake_prefix_path": f"{home}/torch/share/cmake"},
    "torch.utils.cpp_extension": {
        "CppExtension": Extension,
        "CUDAExtension": CudaExtension,
        "SyclExtension": SyclExtension,
        "CUDA_HOME": home if cuda else None,
        "CUDNN_HOME": None,
        "ROCM_HOME": None,
        "IS_HIP_EXTENSION": False,
        "IS_WINDOWS": False,
        "IS_MACOS": False,
        "COMMON_NVCC_FLAGS": [],
        "TORCH_LIB_PATH": f"{home}/torch/lib",
        "include_paths": constant([f"{home}/torch/include"]),
        "library_paths": constant([f"{home}/torch/lib"]),
        "is_ninja_available": constant(True),
        "_find_cuda_home": constant(home if cuda else None),
        "_get_cuda_arch_flags": constant([]),
    },
}


def plain(value: Any) -> Any:
    """Return a value of JSON's types, with paths relative to the project, or to TORCH and CUDA_HOME."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, map, filter)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = str(value).replace(f"{home}/torch", "TORCH").replace(home, "CUDA_HOME")
    return text.replace(f"{root}/", "").replace(root, ".").replace(f"{Path(root).parent}/", "../")


def run(script: str) -> str | None:
    """Run the script, and return its error with the line."""
    try:
        code = compile(Path(script).read_bytes(), script, "exec")
        exec(code, {"__name__": "__main__", "__file__": script})
    except SyntaxError as error:
        return f"line {error.lineno}: is not Python: {error.msg}"
    except BaseException as error:  # of a script, which may also call sys.exit
        if isinstance(error, SystemExit) and settings:
            return None
        at = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
        return f"line {at[-1] if at else 0}: {''.join(traceback.format_exception_only(error)).strip().splitlines()[-1]}"
    return None


def main() -> None:
    """Run the script in the environment, and print the record."""
    out = os.dup(1)
    os.dup2(2, 1)  # the script's own output
    sys.meta_path.insert(0, StubFinder())
    version = importlib.metadata.version
    importlib.metadata.version = lambda distribution_name: (
        TORCH if distribution_name == "torch" else version(distribution_name)
    )
    os.environ.__class__ = Environment
    sys.argv = Arguments([environment["script"], *environment["arguments"]])
    sys.path.insert(0, root)
    os.chdir(root)
    error = run(environment["script"])
    listed = settings.pop("ext_modules", None) or []
    declared = listed if isinstance(listed, (list, tuple)) else [listed]
    commands = settings.pop("cmdclass", None) or {}
    left_out = [
        (0, f"the extension {getattr(entry, 'name', entry)} is not of setuptools or Torch")
        for entry in declared
        if not isinstance(entry, Extension)
    ]
    left_out += [
        (0, f"cmdclass {name!r} is a class of the project and is not run")
        for name, command in commands.items()
        if isinstance(command, type)
    ]
    left_out += [
        (0, f"{key} of setup(): {settings[key]}: the builder reads the extensions only")
        for key in ("libraries", "options")
        if settings.get(key)
    ]
    log = Path(home).with_name("compiled")
    for words in plain(log.read_text(errors="replace").splitlines() if log.exists() else []):
        for source in re.findall(r"\S+\.(?:cu|cc|cpp|cxx|c)\b", words):
            if Path(root, source).is_file():
                left_out += [(0, f"{source} is compiled by a command: add it to `src`, and the flags of {words}")]
    log.unlink(missing_ok=True)
    module = "torch.utils.cpp_extension"
    replaced = vars(sys.modules.get(module, object)).keys() - CONTENTS[module].keys()
    left_out += [(0, f"{module}.{name} is replaced and not run") for name in sorted(replaced) if name[:2] != "__"]
    in_setup = [extension for extension in extensions if any(extension is entry for entry in declared)]
    kept = []
    for extension in extensions:
        given = {name: value for name, value in vars(extension).items() if name[0] != "_"}
        # setuptools adds the include_dirs of setup() to those of every extension.
        arguments = plain({**given, "include_dirs": [*given["include_dirs"], *settings.get("include_dirs", ())]})
        if extension._kind == "xpu":
            reason = "is for XPU: the builder compiles none"
        elif in_setup and extension not in in_setup:
            reason = "is not in ext_modules"
        else:
            kept.append({"line": extension._line, "kind": extension._kind, "arguments": arguments})
            continue
        left_out.append((extension._line, f"the extension {str(arguments['name'])!r} {reason}"))
    record = {
        "error": error,
        "settings": plain(settings),
        "architectures": os.environ.get("TORCH_CUDA_ARCH_LIST", ""),
        "extensions": kept,
        "left_out": left_out,
        "assumed": [(0, f"{name} is not installed here; a placeholder replaces it") for name in environment["absent"]]
        + list(remarks),
    }
    os.write(out, json.dumps(record).encode())
    os._exit(0)


main()
