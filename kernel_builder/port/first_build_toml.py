"""Writes the first `build.toml` of a project with a `setup.py`, and lists the remaining steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from kernel_builder import scaffold, toml_file
from kernel_builder.checks.ops import split_list
from kernel_builder.config import build_toml
from kernel_builder.config.project import distribution_name, python_name
from kernel_builder.config.project_files import submodules
from kernel_builder.json_value import by_field
from kernel_builder.plural import listed
from kernel_builder.port.extension_table import PortedExtension, Remark, TableReader
from kernel_builder.port.setup_runs import SetupRun, run_setup
from kernel_builder.steps.confinement import SandboxMode
from kernel_format.errors import ConfigError

# Packages that only a build needs, and dependencies of Torch.
_EVERYWHERE = ("torch", "numpy", "ninja", "packaging", "setuptools", "wheel", "pybind11")
# Necessary changes in sources: pattern -> instruction.
_TABLE = toml_file.read(Path(__file__).with_name("rewrites.toml"))
_REWRITES = {of["pattern"].encode(): of["instruction"] for of in _TABLE["rewrite"]}

# A kernel launch without a stream: its configuration has one or two arguments, or three.
_LAUNCH = re.compile(r"<<<(.*?)>>>", re.DOTALL)
# An included file that `src` would compile.
_INCLUDED_SOURCE = re.compile(rb'#[ \t]*include[ \t]*"([^"\n]+\.(?:cc|cpp|cxx|c|cu))"')


@dataclass(frozen=True)
class Port:
    """A first `build.toml`, and its gaps.

    Attributes:
        files: The files to write: path -> content.
        kernels: The extensions as tables of `build.toml`.
        failed: Machines for which `setup.py` ends with an error.
        left_out: Arguments of `setup.py` that `build.toml` does not have.
        assumed: Values that `setup.py` reads from its machine and that are assumed.
        rewrites: Lines of sources that have to change before the project builds.
    """

    directory: Path
    files: Mapping[str, str]
    kernels: tuple[PortedExtension, ...]
    failed: tuple[str, ...]
    left_out: tuple[Remark, ...]
    assumed: tuple[Remark, ...]
    rewrites: tuple[Remark, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the result as `--json` prints it."""
        return {key.replace("_", "-"): value for key, value in by_field(self, "_").items()}

    def write(self) -> list[str]:
        """Write the files, all or none; return their names."""
        scaffold.write(self.files, self.directory, hint="add --dry-run to print the build.toml, or move the file away")
        return list(self.files)


def port(setup: Path, repo_id: str | None = None, words: Sequence[str] = (), sandbox: SandboxMode = "require") -> Port:
    """Run a `setup.py` in a sandbox and return the first `build.toml` for it. Nothing is written.

    Args:
        words: Options of the script, and environment variables as NAME=VALUE.
    """
    runs = run_setup(setup, words, sandbox)
    root = setup.resolve().parent
    ends: dict[str, list[str]] = {}
    for run in runs:
        ends.setdefault(run.error or "", []).append(run.machine.title)
    failed = tuple(f"as on {listed(on)}: {setup.name} ends at {error}" for error, on in ends.items() if error)
    left_out = [Remark(*entry) for run in runs for entry in run.left_out]
    kernels: list[PortedExtension] = []
    for (run, extension), backend, has_other in _chosen(runs, left_out):
        table = TableReader(root, run, extension, backend, left_out, has_other).read()
        if table.src:
            kernels.append(table)
        else:
            left_out.append(Remark(table.line, f"the extension {table.name!r}: it has no C++ or CUDA source"))
    stable = _stable_abi(kernels, left_out)
    assumed = _distinct(Remark(*entry) for run in runs for entry in run.assumed)
    if not kernels:
        reasons = dict.fromkeys([*failed, *(f"line {entry.line}: {entry.text}" for entry in (*left_out, *assumed))])
        raise ConfigError(
            "declares no extension of torch.utils.cpp_extension with sources, so nothing is written"
            + "".join(f"; {reason}" for reason in reasons),
            where=str(setup),
            hint="give the variables and options that it reads, as in `kernel-builder port setup.py A=1 -- --option`, "
            "and install the modules that it imports beside the builder; or write build.toml: docs/port.md",
        )
    settings = _settings(root, next(run for run in runs if run.extensions).settings)
    name = _name(repo_id, settings.get("name"), root)
    declared = settings.get("license")  # `apache-2.0` for `Apache 2.0`
    license = re.sub(r"[^a-z0-9.+]+", "-", declared.lower()).strip("-") if isinstance(declared, str) else None
    depends, requirements = _python_depends(settings)
    major = re.match(r"[1-9]\d*", str(settings.get("version")))
    general = {"name": name, "version": int(major[0]) if major else 1, "edition": 6, "license": license or "other"}
    text = _render(general, repo_id, depends, kernels, stable, left_out)
    build_toml.from_document(toml_file.parse(text, build_toml.FILE), build_toml.FILE, root)
    package = f"torch-ext/{python_name(name)}/__init__.py"
    files = {build_toml.FILE: text}
    if not (root / package).exists():
        files[package] = f'"""{name}: import its functions here."""\n\nfrom ._ops import ops\n\n__all__ = ["ops"]\n'
    notes = tuple(_notes(root, requirements, kernels, license, package))
    rewrites = tuple(_rewrites(root, kernels))
    return Port(root, files, tuple(kernels), failed, _distinct(left_out), assumed, rewrites, notes)


_Declared = tuple[SetupRun, Mapping[str, Any]]


def _chosen(runs: Sequence[SetupRun], left_out: list[Remark]) -> list[tuple[_Declared, str, bool]]:
    """Return each extension with the run to take its arguments from, its backend, and whether it has another backend.

    Arguments that depend on the machine are added to `left_out` where the chosen run does not have them.
    """
    chosen = []
    with_gpu, without_gpu, cpu = map(_numbered, runs)
    for key in dict.fromkeys([*with_gpu, *without_gpu, *cpu]):
        # Scripts ask a GPU for its capability, so a machine without one has the arguments for all.
        found = [
            (run, extensions[key])
            for run, extensions in ((runs[1], without_gpu), (runs[0], with_gpu), (runs[2], cpu))
            if key in extensions
        ]
        for_cuda = [entry for entry in found if _is_cuda(entry[1]) or key not in cpu]
        for_cpu = [entry for entry in reversed(found) if entry not in for_cuda]
        for backend, entries in (("cuda", for_cuda), ("cpu", for_cpu)):
            if entries:
                chosen.append((entries[0], backend, bool(for_cuda and for_cpu)))
                # The flags of nvcc are in the table for CUDA.
                skipped = "extra_compile_args nvcc" if backend == "cpu" and for_cuda else None
                for other in entries[1:]:
                    left_out += _differences(entries[0], other, skipped)
    return sorted(chosen, key=lambda entry: entry[1] == "cpu")


def _numbered(run: SetupRun) -> dict[tuple[str, int], Mapping[str, Any]]:
    """Return the extensions of a run by their name and its number."""
    extensions: dict[tuple[str, int], Mapping[str, Any]] = {}
    for extension in run.extensions:
        name = str(extension["arguments"]["name"])
        extensions[name, sum(key[0] == name for key in extensions)] = extension
    return extensions


def _is_cuda(extension: Mapping[str, Any]) -> bool:
    sources = extension["arguments"]["sources"]
    has_source = isinstance(sources, list) and any(str(path).endswith(".cu") for path in sources)
    return extension["kind"] == "cuda" or has_source


def _differences(kept: _Declared, other: _Declared, skipped: str | None) -> Iterator[Remark]:
    """Yield the arguments of an extension that only another run than the chosen one has."""
    (_, extension), (run, others) = kept, other
    known = set(_flat(extension["arguments"]))
    added = [text for text in dict.fromkeys(_flat(others["arguments"])) if text not in known]
    if added := [text for text in added if not (skipped and text.startswith(skipped))]:
        text = f"the extension {others['arguments']['name']!r} on {run.machine.title} only: {', '.join(added)}"
        yield Remark(others["line"], text)


def _flat(value: Any, key: str = "") -> Iterator[str]:
    """Yield the texts of the arguments of an extension, with their keys."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flat(item, f"{key} {name}".strip())
    elif isinstance(value, list):
        for item in value:
            is_macro = key == "define_macros" and isinstance(item, list)
            yield from [f"{key} {item}"] if is_macro else _flat(item, key)
    else:
        yield f"{key} {value}"


def _distinct(remarks: Iterable[Remark]) -> tuple[Remark, ...]:
    return tuple(sorted(dict.fromkeys(remarks), key=lambda remark: remark.line))


def _settings(root: Path, declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `setup(...)`, and in their place the values of `pyproject.toml`."""
    settings = {key: value for key, value in declared.items() if isinstance(value, (str, list, dict)) and value}
    try:
        project = toml_file.read(root / "pyproject.toml").get("project", {})
    except (OSError, ConfigError):
        return settings
    license = project.get("license")
    read = {
        "name": project.get("name"),
        "version": project.get("version"),
        "license": license.get("text") if isinstance(license, dict) else license,
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


def _distinctly_named(kernels: Sequence[PortedExtension]) -> Iterator[tuple[str, PortedExtension]]:
    numbers: Counter[str] = Counter()
    for kernel in kernels:
        stem = kernel.name if kernel.name.endswith(f"_{kernel.backend}") else f"{kernel.name}_{kernel.backend}"
        numbers[stem] += 1
        yield stem if numbers[stem] == 1 else f"{stem}_{numbers[stem]}", kernel


def _render(
    general: dict[str, Any],
    repo_id: str | None,
    python_depends: Sequence[str],
    kernels: Sequence[PortedExtension],
    stable: Mapping[str, str],
    left_out: Sequence[Remark],
) -> str:
    lines = ["Written by `kernel-builder port` from setup.py. The next steps are in docs/port.md."]
    lines += ["Not carried over:"] if left_out else []
    lines += [f"  {str(remark)[:160]}" for remark in _distinct(left_out)]
    general["backends"] = list(dict.fromkeys(kernel.backend for kernel in kernels))
    if python_depends:
        general["python-depends"] = list(python_depends)
    if repo_id:
        general["hub"] = {"repo-id": repo_id}
    document = {
        "general": general,
        "torch": {"stable-abi": stable} if stable else {},
        "kernel": {table_name: _table(kernel) for table_name, kernel in _distinctly_named(kernels)},
    }
    return "".join(f"# {' '.join(line.split())}\n" for line in lines) + tomlkit.dumps(document)


def _stable_abi(kernels: Iterable[PortedExtension], left_out: list[Remark]) -> dict[str, str]:
    """Return the oldest Torch release by backend, where all extensions of the backend have the same."""
    releases: dict[str, str] = {}
    by_backend: dict[str, list[PortedExtension]] = {}
    for kernel in kernels:
        by_backend.setdefault(kernel.backend, []).append(kernel)
    for backend, own in by_backend.items():
        if len(own[0].targets) == 1 and all(kernel.targets == own[0].targets for kernel in own):
            releases[backend] = own[0].targets[0]
        elif targets := dict.fromkeys(target for kernel in own for target in kernel.targets):
            text = f"TORCH_TARGET_VERSION differs between the extensions for {backend}: {', '.join(targets)}"
            left_out.append(Remark(own[0].line, text))
    return releases


def _table(kernel: PortedExtension) -> dict[str, Any]:
    table: dict[str, Any] = {"language": f"cpp-{kernel.backend}", "depends": ["torch"]}
    lists = {
        "include": kernel.include,
        "src": (*kernel.src, *kernel.headers),
        "cxx-flags": kernel.cxx_flags,
        "cuda-flags": kernel.cuda_flags,
        "cuda-capabilities": kernel.capabilities,
    }
    for key, values in lists.items():
        if values:
            table[key] = tomlkit.array()
            table[key].extend(values)
            table[key].multiline(sum(map(len, values)) > 80)
    return table


def _rewrites(root: Path, kernels: Sequence[PortedExtension]) -> Iterator[Remark]:
    """Yield the lines of sources and headers that have to change."""
    for path in dict.fromkeys(path for kernel in kernels for path in (*kernel.src, *kernel.headers)):
        content = (root / path).read_bytes()
        for pattern, text in _REWRITES.items():
            for match in re.finditer(pattern, content, re.MULTILINE):
                yield Remark(content.count(b"\n", 0, match.start() + 1) + 1, text, path)
        text = content.decode(errors="replace")
        for launch in _LAUNCH.finditer(text):
            if len(split_list(launch[1])) < 4:
                number = text.count("\n", 0, launch.start()) + 1
                yield Remark(number, "launches on the default stream: pass the current stream of the device", path)
        for name in _INCLUDED_SOURCE.findall(content):
            number = content.count(b"\n", 0, content.index(name)) + 1
            advice = f"includes {name.decode(errors='replace')}: rename it to .inl or .h, and list it in `src`"
            yield Remark(number, advice, path)


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


def _notes(
    root: Path, requirements: Sequence[str], kernels: Sequence[PortedExtension], license: str | None, package: str
) -> Iterator[str]:
    for path in submodules(root):
        if not (root / path).is_dir() or not any((root / path).iterdir()):
            yield f"{path} is a git submodule, and empty: `git submodule update --init {path}`, and run port again"
    files = {path: (root / path).read_bytes() for kernel in kernels for path in (*kernel.src, *kernel.headers)}
    if not any(b"REGISTER_EXTENSION" in content for content in files.values()):
        yield (
            "include registration.h in one source, and end the source with REGISTER_EXTENSION(TORCH_EXTENSION_NAME), "
            "which makes the binary a Python module, in place of functions PyInit_..."
        )
    if license is None:
        yield 'the license is not known: replace "other" by its SPDX name in build.toml'
    if not any(kernel.targets for kernel in kernels):
        yield 'add stable-abi = "2.10" to [torch] for one binary for all releases from 2.10 on: docs/port.md'
    by_backend = [kernel.backend for kernel in kernels]
    if any(by_backend.count(backend) > 1 for backend in by_backend):
        yield (
            "all extensions of a backend become one binary, whose operators share one namespace: write "
            "TORCH_LIBRARY_EXPAND in one source, and TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, ops) in the others"
        )
    for name in requirements:
        yield (
            f"the package requires {name}: a kernel may import the standard library, Torch, and of `python-depends` "
            f"{', '.join(build_toml.PYTHON_DEPENDS)}; import {name} in the functions that need it"
        )
    yield f"the Python package is {package.rpartition('/')[0]}: move the Python files that users call into it"
