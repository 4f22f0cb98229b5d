"""(Projects, variants, toolchains) -> one graph of steps, with equal steps merged.

Every step is named by a digest of all that determines its output: the compiler, the command, and the content of every
file that it can read. Nothing in that name depends on where a project lies or which variant asked for the step, so
steps that would give equal bytes are one step: a source that does not include Torch is compiled once for all Torch
releases, and a binary on the stable ABI is linked once for all variants that it serves.

Commands are written with tokens in place of directories (`STEP`, `TORCH`, ...), which become paths when the graph is
run; compilers are told to map those paths away again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from kernel_builder.build import include_scan
from kernel_builder.config import matrix, offered
from kernel_builder.config.project import Kernel, Project, TorchFramework, TorchNoarch
from kernel_builder.config.variant import Noarch, Release, Variant
from kernel_builder.errors import ConfigError, ToolchainError

if TYPE_CHECKING:
    from kernel_builder.toolchain import CudaToolkit, HostCompiler, Toolchains, TorchHeaders

# Directories that stand in commands as tokens.
STEP, TORCH, CUDA, PYTHON, SYSROOT = "\0step\0", "\0torch\0", "\0cuda\0", "\0python\0", "\0sysroot\0"

# Stands for the unique part of an op namespace, and is as long. Base32 has no 0, 1, 8 or 9, so it is never a real one,
# and no four bytes of it are likely to stand in an object by chance.
PLACEHOLDER = "0q8z1x9k0w8j1"

# Raise when a change to this file changes the bytes that a step gives for an equal command.
_RECIPE = 1

_CXX_FLAGS = ("-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden")
_NVCC_FLAGS = (
    "-O3",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fvisibility-inlines-hidden",
)
_LINK_FLAGS = (
    "-shared",
    "-nodefaultlibs",
    "-Wl,--build-id=none",
    "-Wl,--strip-all",
    "-Wl,--gc-sections",
    "-Wl,-z,noexecstack,-z,relro,-z,now",
    f"-Wl,--version-script={STEP}/exports.map",
)
_EXPORTS = "{ global: PyInit_*; local: *; };\n"


def digest(*parts: object) -> str:
    """A hexadecimal SHA-256 over values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Compile:
    """One source to one object.

    Attributes:
        key: Names the object.
        project: The project's root, from which `files` are staged.
        source: The source, relative to the project.
        tool: The compiler; `cuda` steps may use several threads.
        argv: The command, with tokens, without its output.
        roots: What the tokens stand for.
        files: Project-relative path -> SHA-256 of all that is staged.
        generated: Path in the step's directory -> content, of what the builder adds.
        placeholder: The object holds `PLACEHOLDER` in its op namespace, which the link replaces.
        title: What progress and errors call the step.
    """

    key: str
    project: Path
    source: str
    tool: Literal["cuda", "cxx"]
    argv: tuple[str, ...]
    roots: Mapping[str, Path]
    files: tuple[tuple[str, str], ...]
    generated: Mapping[str, str]
    placeholder: bool
    title: str


@dataclass(frozen=True)
class Binary:
    """One shared object: what was compiled, as opposed to the variants it is published as.

    Attributes:
        key: Names the file in the cache.
        module: Its module name and op namespace, `_<python name>_<backend>_<unique>`.
        objects: The compile steps it is linked from, in order.
        argv: The link command, with tokens, without objects and output.
        title: What progress and errors call it.
    """

    key: str
    module: str
    objects: tuple[Compile, ...]
    cxx: Path
    argv: tuple[str, ...]
    libraries: tuple[str, ...]
    roots: Mapping[str, Path]
    generated: Mapping[str, str]
    title: str


@dataclass(frozen=True)
class PlannedVariant:
    """What is to be published as one variant.

    Attributes:
        module: Its op namespace, which stands for the content of binary and Python files.
        archs: The capabilities that its binary has code for.
        python: Path inside the package -> SHA-256 of the project's Python files.
        binary: None for Python-only variants.
    """

    project: Project
    variant: Variant
    module: str
    archs: tuple[str, ...]
    python: Mapping[str, str]
    binary: Binary | None


@dataclass(frozen=True)
class Graph:
    """Every step of every project and variant asked for, each once."""

    variants: tuple[PlannedVariant, ...]

    @property
    def binaries(self) -> tuple[Binary, ...]:
        return tuple({v.binary.key: v.binary for v in self.variants if v.binary}.values())

    @property
    def compiles(self) -> tuple[Compile, ...]:
        return tuple({step.key: step for binary in self.binaries for step in binary.objects}.values())

    def variants_of(self, step: Compile | Binary) -> tuple[str, ...]:
        """The names of the variants that need a step."""
        return tuple(
            planned.variant.name
            for planned in self.variants
            if planned.binary
            and (planned.binary.key == step.key or any(step.key == part.key for part in planned.binary.objects))
        )


def unique_name(project: Project, backend: str, python: Mapping[str, str], *inputs: object) -> str:
    """The op namespace of a binary: unique by content, the same wherever and whenever it is built.

    It covers the Python files too: two versions of a kernel that share their binary still register their fakes and
    gradients under it, and have to be told apart.
    """
    named = (project.name, project.version, backend, dict(python))
    content = hashlib.sha256(digest(_RECIPE, *named, *inputs).encode()).digest()
    unique = base64.b32encode(content).decode().lower()[: len(PLACEHOLDER)]
    return f"_{project.python_name}_{backend}_{unique}"


def plan(
    selections: Iterable[tuple[Project, Sequence[Variant]]],
    toolchains: Toolchains,
    is_split: Callable[[str], bool] = lambda key: False,
) -> Graph:
    """Plan the variants of all projects as one graph.

    Args:
        selections: Projects, each with the variants to build.
        toolchains: Where compilers and headers come from.
        is_split: Tells of a compile step's key whether the compiler took `PLACEHOLDER` apart when the step was run,
            so that the link cannot replace it.

    Raises:
        ConfigError: If a source cannot be compiled by any compiler of its backend.
        ToolchainError: If a compiler or header is missing.
    """
    planned = []
    for project, variants in selections:
        binaries: dict[str, Binary] = {}
        python = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in project.python_files}
        for variant in variants:
            if isinstance(variant.framework, Noarch):
                module = unique_name(project, variant.backend, python)
                declared = project.framework.cuda_capabilities if isinstance(project.framework, TorchNoarch) else None
                archs = (declared or ()) if variant.backend == "cuda" else ()
                planned.append(PlannedVariant(project, variant, module, tuple(archs), python, None))
                continue
            kernels = [kernel for kernel in project.kernels if kernel.backend == variant.backend]
            cuda_archs = offered.archs(kernels, variant.cuda, variant.platform or "") if variant.cuda else ()
            binary = _binary(project, variant, python, toolchains, is_split)
            binary = binaries.setdefault(binary.key, binary)
            planned.append(PlannedVariant(project, variant, binary.module, cuda_archs, python, binary))
    return Graph(tuple(planned))


@dataclass(frozen=True)
class _Tools:
    """The toolchain of one variant. Torch's headers are asked for by the sources that include them."""

    host: HostCompiler
    cuda: CudaToolkit | None
    torch: Callable[[], TorchHeaders]


def _binary(
    project: Project,
    variant: Variant,
    python: Mapping[str, str],
    toolchains: Toolchains,
    is_split: Callable[[str], bool],
) -> Binary:
    drafts = compiles(project, variant, toolchains)
    if not drafts:
        raise ConfigError(
            f"there is nothing to compile for the {variant.backend} backend",
            where=f"{project.root / 'build.toml'}: [torch] src",
            hint="list the source that registers the ops, for example torch-ext/torch_binding.cpp",
        )

    assert isinstance(project.framework, TorchFramework)
    stable = variant.backend in project.framework.stable_abi
    libraries = _torch_libraries(stable=stable, cuda=variant.cuda is not None)
    argv = (*_LINK_FLAGS, f"-L{SYSROOT}/lib")
    sysroot = toolchains.sysroot().root
    host = toolchains.host()
    # The store names a sysroot by its recipe and the host compiler.
    inputs = [host.identity, sysroot.name, sysroot.parent.name, [draft.key for draft in drafts], argv, libraries]
    module = unique_name(project, variant.backend, python, *inputs)
    objects = tuple(_settle(draft, module, is_split) for draft in drafts)
    return Binary(
        key=digest("link", _RECIPE, module, [step.key for step in objects], inputs),
        module=module,
        objects=objects,
        cxx=host.path,
        argv=argv,
        libraries=libraries,
        roots={SYSROOT: sysroot},
        generated={"exports.map": _EXPORTS},
        title=f"{project.name} {variant.backend}{f' {variant.cuda}' if variant.cuda else ''}",
    )


def compiles(project: Project, variant: Variant, toolchains: Toolchains) -> tuple[Compile, ...]:
    """The compile steps of a variant's binary as they are before its op namespace is known, in the order of the link.

    The steps of which `needs_namespace` holds cannot be run like this.

    Raises:
        ConfigError, ToolchainError: As `plan`.
    """
    framework = project.framework
    assert isinstance(framework, TorchFramework)
    assert not isinstance(variant.framework, Noarch)
    # A project on the stable ABI gets its stable binary for the variants of single Torch releases too.
    stable = framework.stable_abi.get(variant.backend)
    release = stable or variant.framework.release
    tools = _Tools(
        toolchains.host(),
        toolchains.cuda(variant.cuda) if variant.cuda else None,
        cache(lambda: toolchains.torch(release, "stable" if stable else "full")),
    )

    definitions = [f"-D{variant.backend.upper()}_KERNEL", "-DPy_LIMITED_API=0x03090000"]
    if stable:
        definitions.append(f"-DTORCH_TARGET_VERSION={_target_version(stable)}")
        if variant.backend == "cuda":
            definitions.append("-DUSE_CUDA")

    drafts: list[Compile] = []
    binding = Kernel(
        name="torch",
        backend=variant.backend,
        depends=("torch",),
        src=framework.src,
        include=framework.include,
        cxx_flags=framework.cxx_flags,
    )
    for part in [binding, *(kernel for kernel in project.kernels if kernel.backend == variant.backend)]:
        _refuse_unprovided(project, part)
        for source in part.src:
            if PurePosixPath(source).suffix not in include_scan.HEADER_SUFFIXES:
                drafts.append(_compile(project, part, source, variant, tools, definitions))
    return tuple(drafts)


def _target_version(release: Release) -> str:
    return f"0x{(release.major << 56) | (release.minor << 48):016x}"


def _refuse_unprovided(project: Project, kernel: Kernel) -> None:
    unknown = [depend for depend in kernel.depends if depend != "torch"]
    if unknown:
        raise ToolchainError(
            f"{', '.join(unknown)} cannot be provided by this builder; it has Torch's and CUDA's headers",
            where=f"{project.root / 'build.toml'}: [kernel.{kernel.name}] depends",
            hint="copy the headers into the project, and name their directory in `include`",
        )


def _refuse_this_machines(project: Project, kernel: Kernel) -> None:
    native = [flag for flag in (*kernel.cxx_flags, *kernel.cuda_flags) if flag.endswith("=native")]
    if native:
        raise ConfigError(
            f"{native[0]} makes a binary for the machine that builds it, and the Hub's users have others",
            where=f"{project.root / 'build.toml'}: [{_table(kernel)}] cxx-flags, cuda-flags",
            hint="name an instruction set that all users have, or choose at run time: __attribute__((target(...))) and "
            "__builtin_cpu_supports; for CUDA, list cuda-capabilities",
        )


def _table(kernel: Kernel) -> str:
    """The table of `build.toml` that a part of a binary comes from."""
    return "torch" if kernel.name == "torch" else f"kernel.{kernel.name}"


def _torch_libraries(*, stable: bool, cuda: bool) -> tuple[str, ...]:
    host = ("libtorch_cpu.so",) if stable else ("libc10.so", "libtorch_cpu.so", "libtorch.so")
    device = ("libtorch_cuda.so",) if stable else ("libc10_cuda.so", "libtorch_cuda.so")
    return (*host, *(device if cuda else ()))


def _registration_header() -> str:
    return (resources.files("kernel_builder") / "templates" / "registration.h").read_text()


def _compile(
    project: Project, kernel: Kernel, source: str, variant: Variant, tools: _Tools, definitions: Sequence[str]
) -> Compile:
    where = f"{project.root / 'build.toml'}: [{_table(kernel)}] src"
    suffix = PurePosixPath(source).suffix
    if suffix not in include_scan.CUDA_SUFFIXES | include_scan.CXX_SUFFIXES:
        raise ConfigError(
            f"{source} is neither a header nor a source that the {variant.backend} backend can compile",
            where=where,
            hint="sources end in .cu, .cpp, .cc or .cxx; headers in .h, .hpp, .cuh or .inl",
        )
    if suffix in include_scan.CUDA_SUFFIXES and tools.cuda is None:
        raise ConfigError(
            f"{source} is a CUDA source, which the {variant.backend} backend cannot compile",
            where=where,
            hint='move it to a [kernel.*] table with backend = "cuda"',
        )
    if suffix in include_scan.CUDA_SUFFIXES and re.search(r'[,"$`\\]', source):
        raise ConfigError(
            f"nvcc cannot compile {source}: it takes names apart at commas, and gives the rest to a shell",
            where=where,
            hint="rename the file: letters, digits, dots, dashes and underscores are safe",
        )

    _refuse_this_machines(project, kernel)
    generated = {"registration.h": _registration_header()}
    scanned = include_scan.scan(project.root, source, kernel.include, kernel.src, generated)
    roots: dict[str, Path] = {}
    identities = [tools.host.identity]
    includes = [f"-I{STEP}/src/{entry}" if entry != "." else f"-I{STEP}/src" for entry in kernel.include]
    includes.append(f"-I{STEP}/builder")
    standard = 17
    if scanned.torch:
        headers = tools.torch()
        standard = matrix.cxx_standard(headers.release)
        identities.append(headers.identity)
        roots[TORCH] = headers.include[0]
        includes += _system_includes(TORCH, headers.include[0], headers.include)
    if scanned.python:
        identities.append(sys.version)
        roots[PYTHON] = _python_include(project, source)
        includes += ["-isystem", PYTHON]

    uses_cuda = suffix in include_scan.CUDA_SUFFIXES
    defines = [*definitions]
    if scanned.namespace:
        defines.append(f"-DTORCH_EXTENSION_NAME=_{project.python_name}_{variant.backend}_{PLACEHOLDER}")
    # What the compilers are told instead of the file's real path: stable, and different for each use of a source.
    # nvcc takes such options apart at commas and white space.
    alias = re.sub(r"[^\w./-]", lambda found: f"%{ord(found[0]):02x}", f"/{project.name}/{kernel.name}/{source}")
    if tools.cuda is not None:
        identities.append(tools.cuda.identity)
        roots[CUDA] = tools.cuda.root

    if uses_cuda:
        assert tools.cuda is not None
        assert variant.cuda is not None
        argv = [
            str(tools.cuda.nvcc),
            "-c",
            f"{STEP}/src/{source}",
            f"-ccbin={tools.host.path}",
            f"-std=c++{standard}",
            *_NVCC_FLAGS,
            *_gencode(offered.capabilities(kernel, variant.cuda, variant.platform or "")),
            *_compression(tools.cuda.release),
            *defines,
            *includes,
            *kernel.cuda_flags,
            *(f"-Xcompiler={flag}" for flag in kernel.cxx_flags),
            f"-Xcompiler={_path_maps(roots)}",
            # nvcc names internal symbols after its process and the source's path unless all of these are given.
            f"--frandom-seed={alias}",
            f"-Xcudafe=--orig_src_path_name={alias}",
            "--keep",
            f"--keep-dir={STEP}/keep",
        ]
        program = str(tools.cuda.nvcc)
    else:
        cuda_includes = _system_includes(CUDA, tools.cuda.root, tools.cuda.include) if tools.cuda else []
        argv = [
            str(tools.host.path),
            "-c",
            f"{STEP}/src/{source}",
            f"-std=c++{standard}",
            *_CXX_FLAGS,
            *defines,
            *includes,
            *cuda_includes,
            *kernel.cxx_flags,
            *_path_maps(roots).split(","),
            f"-frandom-seed={alias}",
        ]
        program = str(tools.host.path)

    compiler_free = [part for part in argv if part not in (program, f"-ccbin={tools.host.path}")]
    key = digest("compile", _RECIPE, compiler_free, identities, scanned.files, generated)
    return Compile(
        key=key,
        project=project.root,
        source=source,
        tool="cuda" if uses_cuda else "cxx",
        argv=tuple(argv),
        roots=roots,
        files=scanned.files,
        generated={f"builder/{name}": content for name, content in generated.items()},
        placeholder=scanned.namespace,
        title=f"{project.name}/{source} ({variant.backend}{f' {variant.cuda}' if variant.cuda else ''})",
    )


def needs_namespace(draft: Compile) -> bool:
    """Whether a step has to be given the real op namespace, because the link cannot replace it in the object."""
    in_reach = draft.tool == "cxx" and not any(part.startswith("-flto") for part in draft.argv)
    return draft.placeholder and not in_reach


def _settle(draft: Compile, module: str, is_split: Callable[[str], bool]) -> Compile:
    """Give a step that has to know the op namespace itself the real one.

    A host object is compiled with a placeholder where that can be replaced at the link, so that a change to one source
    does not change the command of the others. That needs the name to be in the object as one string. It is not in
    device code, which is compressed, nor in the bytecode of link-time optimisation, nor where the compiler copies the
    name in pieces, as it does for the std::string that the full C++ API makes of it: `is_split` tells of that.
    """
    if not needs_namespace(draft) and not (draft.placeholder and is_split(draft.key)):
        return draft
    argv = tuple(
        f"-DTORCH_EXTENSION_NAME={module}" if part.startswith("-DTORCH_EXTENSION_NAME=") else part
        for part in draft.argv
    )
    return replace(draft, argv=argv, key=digest("settled", draft.key, module), placeholder=False)


def _system_includes(token: str, root: Path, directories: Sequence[Path]) -> list[str]:
    """`-isystem` options for directories below `root`, which `token` stands for."""
    below = [directory.relative_to(root).as_posix() for directory in directories]
    return [part for path in below for part in ("-isystem", token if path == "." else f"{token}/{path}")]


def _path_maps(roots: Mapping[str, Path]) -> str:
    """Map directories of this machine out of `__FILE__`, as one comma-separated list of options."""
    maps = [f"-fmacro-prefix-map={STEP}/src/=", f"-fmacro-prefix-map={STEP}/="]
    return ",".join([*maps, *(f"-fmacro-prefix-map={token}/={token.strip(chr(0))}/" for token in roots)])


def _gencode(capabilities: Sequence[str]) -> list[str]:
    arguments = []
    for capability in capabilities:
        base = capability.removesuffix("+PTX")
        number = base.replace(".", "")
        codes = f"sm_{number}" + (f",compute_{number}" if base != capability else "")
        arguments.append(f"-gencode=arch=compute_{number},code=[{codes}]")
    return arguments


def _compression(cuda: Release) -> list[str]:
    """Smaller device code. Every driver that runs CUDA 13 can read it; some that run CUDA 12 cannot."""
    return ["--compress-mode=size"] if cuda.major >= 13 else []


def _python_include(project: Project, source: str) -> Path:
    import sysconfig

    directory = Path(sysconfig.get_path("include"))
    if not (directory / "Python.h").is_file():
        raise ToolchainError(
            "the source includes Python.h, which is not on this machine",
            where=str(project.root / source),
            hint="install Python's headers (Debian: apt-get install python3-dev), or do without: registration.h and "
            "the stable ABI need none",
        )
    return directory
