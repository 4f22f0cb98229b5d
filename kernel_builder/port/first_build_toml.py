"""Writes the first `build.toml` of a project that has a `setup.py`, and says what a person has to add."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.config import build_toml, licence_texts
from kernel_builder.config.project import distribution_name, python_name
from kernel_builder.config.project_files import submodules
from kernel_builder.port.extension_arguments import ArgumentReader, PortedExtension
from kernel_builder.port.setup_script import Remark, SetupScript, read_setup
from kernel_format.errors import ConfigError

# What is required only to build, and what Torch brings.
_EVERYWHERE = ("torch", "numpy", "ninja", "packaging", "setuptools", "wheel", "pybind11")
# What a source has to change, by what it says: pattern -> what to do.
_REWRITES = (
    (rb"PYBIND11_MODULE\s*\(", "PYBIND11_MODULE: register the functions as operators"),
    (rb"^\s*TORCH_LIBRARY(_IMPL|_FRAGMENT)?\s*\(", "TORCH_LIBRARY: the namespace has to be TORCH_EXTENSION_NAME"),
    (rb"^\s*STABLE_TORCH_LIBRARY(_IMPL|_FRAGMENT)?\s*\(", "STABLE_TORCH_LIBRARY: the namespace as well"),
    (rb"\bRegisterOperators\b", "RegisterOperators: two builds in one process abort Python; use TORCH_LIBRARY_EXPAND"),
    (rb"\.\s*(def|impl)\s*\(\s*\"\w+::\w", "the name of an op has a namespace: leave it out, the library gives it one"),
    (rb"#\s*include\s*[<\"]torch/extension\.h", "torch/extension.h includes Python's headers: include torch/all.h"),
    (
        rb"#\s*include\s*[<\"](pybind11|torch/csrc/utils/pybind|torch/python\.h|Python\.h)",
        "needs Python's C++ interface: leave it out",
    ),
)


@dataclass(frozen=True)
class SourceRemark:
    """A line of a source that has to change."""

    path: str
    line: int
    text: str


@dataclass(frozen=True)
class Port:
    """A first `build.toml`, and what it lacks.

    Attributes:
        directory: The directory of the `setup.py`.
        files: The files to write: path -> content.
        kernels: What was understood.
        left_out: Lines of `setup.py` that `build.toml` does not have.
        assumed: Conditions of `setup.py` that were decided without knowing them.
        rewrites: Lines of sources that have to change before the project builds.
        notes: What else to do.
    """

    directory: Path
    files: Mapping[str, str]
    kernels: tuple[PortedExtension, ...]
    left_out: tuple[Remark, ...]
    assumed: tuple[Remark, ...]
    rewrites: tuple[SourceRemark, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the result as `--json` prints it."""
        plain = {key.replace("_", "-"): value for key, value in asdict(self).items()}
        return {**plain, "directory": str(self.directory)}


def port(setup: Path, repo_id: str | None = None) -> Port:
    """Read a `setup.py` and return the first `build.toml` for it. Nothing is run or written.

    Raises:
        ConfigError: If the file is not Python, or declares no extension whose sources are known.
    """
    with_cuda, without = (read_setup(setup, cuda=cuda) for cuda in (True, False))
    root = setup.resolve().parent
    left_out = [*with_cuda.unknown]
    kernels: list[PortedExtension] = []
    calls = [call for call in with_cuda.extensions if call.backend == "cuda"]
    # The CPU's extensions are those of a machine without CUDA: on others the same call may be one for CUDA.
    calls += [call for call in without.extensions if call.backend == "cpu"]
    for call in calls or with_cuda.extensions:
        reader = ArgumentReader(root, call)
        extension = reader.read()
        left_out += reader.left_out
        if extension.src:
            kernels.append(extension)
        else:
            left_out.append(Remark(call.line, f"the extension {extension.name!r}: none of its sources is known"))
    if not kernels:
        raise ConfigError(
            "declares no extension of torch.utils.cpp_extension whose sources are known, so nothing is written",
            where=str(setup),
            hint="name the setup.py with the CUDAExtension or CppExtension, or write build.toml by hand: docs/port.md",
        )
    settings = _settings(root, with_cuda)
    name = _name(repo_id, settings.get("name"), root)
    licence = _licence(root, settings)
    depends, others = _python_depends(settings)
    text = _render(name, repo_id, licence, depends, _distinctly_named(kernels), left_out)
    build_toml.from_document(toml_file.parse(text, build_toml.FILE), build_toml.FILE, root)
    package = f"torch-ext/{python_name(name)}/__init__.py"
    files = {build_toml.FILE: text}
    if not (root / package).exists():
        files[package] = (
            f'"""{name}: import its functions here from modules of this package."""\n\nfrom ._ops import ops\n'
        )
        files[package] += '\n__all__ = ["ops"]\n'
    return Port(
        directory=root,
        files=files,
        kernels=tuple(kernels),
        left_out=_distinct(left_out),
        assumed=_distinct([*with_cuda.assumed, *without.assumed]),
        rewrites=tuple(_rewrites(root, kernels)),
        notes=(*_submodules(root), *_initialiser(root, kernels), *_notes(root, others, kernels, licence, package)),
    )


def _distinct(remarks: Iterable[Remark]) -> tuple[Remark, ...]:
    return tuple(sorted(dict.fromkeys(remarks), key=lambda remark: remark.line))


def _settings(root: Path, script: SetupScript) -> dict[str, Any]:
    """Return the arguments of `setup(...)`, and in their place what `pyproject.toml` says."""
    settings = {key: value for key, value in script.settings.items() if isinstance(value, (str, list))}
    try:
        project = toml_file.read(root / "pyproject.toml").get("project", {})
    except (OSError, ConfigError):
        return settings
    licence = project.get("license")
    urls = {key.lower(): value for key, value in project.get("urls", {}).items()}
    read = {
        "name": project.get("name"),
        "version": project.get("version"),
        "license": licence.get("text") if isinstance(licence, dict) else licence,
        "url": next((urls[key] for key in ("repository", "source", "homepage") if key in urls), None),
        "install_requires": project.get("dependencies"),
    }
    return {**{key: value for key, value in read.items() if value}, **settings}


def _name(repo_id: str | None, declared: Any, root: Path) -> str:
    """Return a name that `build.toml` allows."""
    wanted = repo_id.rpartition("/")[2] if repo_id else declared if isinstance(declared, str) else root.name
    name = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).lstrip("-0123456789").rstrip("-")
    if repo_id and (name != wanted or not re.fullmatch(build_toml.REPO_ID, repo_id)):
        raise ConfigError(
            f"{repo_id!r} is not the name of a Hub repository of a kernel", where="--name", hint="write org/my-kernel"
        )
    return name if re.fullmatch(build_toml.NAME, name) else "my-kernel"


def _licence(root: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the SPDX name of the licence, from what is declared or from the beginning of its text."""
    classifiers = settings.get("classifiers")
    declared = [settings.get("license"), *(classifiers if isinstance(classifiers, list) else [])]
    said = [entry for entry in declared if isinstance(entry, str) and (entry == declared[0] or entry.startswith("Lic"))]
    for text in said:
        if name := licence_texts.spdx_name(text):
            return name
    suggestion = licence_texts.suggested(root)
    return suggestion[0] if suggestion else None


def _distinctly_named(kernels: Sequence[PortedExtension]) -> Iterator[tuple[str, PortedExtension]]:
    taken: set[str] = set()
    for kernel in kernels:
        stem = kernel.name if kernel.name.endswith(f"_{kernel.backend}") else f"{kernel.name}_{kernel.backend}"
        name = next(
            candidate for candidate in (stem, *(f"{stem}_{n}" for n in range(2, 1000))) if candidate not in taken
        )
        taken.add(name)
        yield name, kernel


def _render(
    name: str,
    repo_id: str | None,
    licence: str | None,
    python_depends: Sequence[str],
    kernels: Iterable[tuple[str, PortedExtension]],
    left_out: Sequence[Remark],
) -> str:
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment("Written by `kernel-builder port` from setup.py, without running it; docs/port.md"))
    document.add(tomlkit.comment("of the builder says how to go on." + (" Not carried over:" if left_out else "")))
    for remark in _distinct(left_out):
        document.add(tomlkit.comment(f"  setup.py:{remark.line}: {' '.join(remark.text.split())[:140]}"))
    named = list(kernels)
    backends = list(dict.fromkeys(kernel.backend for _, kernel in named))
    general = tomlkit.table()
    general.update({"name": name, "version": 1, "edition": 5, "license": licence or "other", "backends": backends})
    if python_depends:
        general.add("python-depends", list(python_depends))
    document.add("general", general)
    if repo_id:
        general.add("hub", tomlkit.item({"repo-id": repo_id}))
    framework = tomlkit.table()
    releases = {
        backend: {kernel.stable_abi for _, kernel in named if kernel.backend == backend} for backend in backends
    }
    stable = {backend: abis.pop() for backend, abis in releases.items() if len(abis) == 1 and None not in abis}
    if stable:
        framework.add("stable-abi", stable)
    document.add("torch", framework)
    tables = tomlkit.table(is_super_table=True)
    for table_name, kernel in named:
        tables.add(table_name, _table(kernel))
    document.add("kernel", tables)
    return tomlkit.dumps(document)


def _table(kernel: PortedExtension) -> Any:
    import tomlkit

    table = tomlkit.table()
    table.update({"backend": kernel.backend, "depends": ["torch"]})
    lists = {
        "include": kernel.include,
        "src": (*kernel.src, *kernel.headers),
        "cxx-flags": kernel.cxx_flags,
        "cuda-flags": kernel.cuda_flags,
        "cuda-capabilities": kernel.capabilities,
    }
    for key, values in lists.items():
        if values:
            array = tomlkit.array()
            array.extend(values)
            table.add(key, array.multiline(sum(map(len, values)) > 80))
    return table


def _rewrites(root: Path, kernels: Sequence[PortedExtension]) -> Iterator[SourceRemark]:
    """Yield the lines of sources and headers that have to change."""
    for path in dict.fromkeys(path for kernel in kernels for path in (*kernel.src, *kernel.headers)):
        content = (root / path).read_bytes()
        for pattern, text in _REWRITES:
            for match in re.finditer(pattern, content, re.MULTILINE):
                yield SourceRemark(path, content.count(b"\n", 0, match.start() + 1) + 1, text)


def _python_depends(settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return which of the required packages `python-depends` may name, and the others that users lack."""
    known = {distribution_name(name): name for name in build_toml.PYTHON_DEPENDS}
    words = [
        re.split(r"[\s<>=!~;\[]", requirement)[0].lower()
        for requirement in settings.get("install_requires") or []
        if isinstance(requirement, str)
    ]
    return (
        [known[word] for word in words if word in known],
        [word for word in words if word and word not in known and word not in _EVERYWHERE],
    )


def _submodules(root: Path) -> Iterator[str]:
    """Yield the git submodules that the checkout does not have."""
    for path in submodules(root):
        directory = root / path
        if not directory.is_dir() or not any(directory.iterdir()):
            yield f"{path} is a git submodule, and empty: `git submodule update --init {path}`, and run port again"


def _initialiser(root: Path, kernels: Sequence[PortedExtension]) -> Iterator[str]:
    sources = {path for kernel in kernels for path in (*kernel.src, *kernel.headers)}
    if not any(b"REGISTER_EXTENSION" in (root / path).read_bytes() for path in sources):
        yield (
            "one source has to include registration.h and end with REGISTER_EXTENSION(TORCH_EXTENSION_NAME), which "
            "makes the binary a module of Python, in place of functions PyInit_..."
        )


def _notes(
    root: Path, requirements: Sequence[str], kernels: Sequence[PortedExtension], licence: str | None, package: str
) -> Iterator[str]:
    if licence is None:
        yield 'the licence is not known: replace "other" by its SPDX name in build.toml'
    by_backend = [kernel.backend for kernel in kernels]
    if any(by_backend.count(backend) > 1 for backend in by_backend):
        yield (
            "all extensions of a backend become one binary, whose operators share one namespace: write "
            "TORCH_LIBRARY_EXPAND in one source, and TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, ops) in the others"
        )
    if "cuda" in by_backend and "cpu" not in by_backend:
        yield "the kernel is for CUDA alone; give it a CPU kernel to test it where there is no GPU"
    for name in requirements:
        yield (
            f"the package requires {name}: a kernel may import the standard library, Torch, and what `python-depends` "
            f"names of {', '.join(build_toml.PYTHON_DEPENDS)}; import {name} in the functions that need it"
        )
    if (root / "README.md").is_file() and not (root / "CARD.md").exists():
        yield "README.md becomes the page on the Hub, with what it says of installing: a CARD.md takes its place"
    yield f"the Python package is {package.rpartition('/')[0]}: move the Python that users call there"
