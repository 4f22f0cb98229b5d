"""(Projects, variants, toolchains) -> one graph of steps, in which identical steps are merged.

A step's key is a digest of everything that determines its output: the compiler, the command, and the content of every
file that it can read. It depends neither on the project's directory nor on the variant that asked for the step. So
identical steps run once: a source that does not include Torch is compiled once for all Torch releases, and a binary on
the stable ABI is linked once for all variants that it serves.

The op namespace is unique by content, so it can only be known when all steps are. The steps are first planned without
it; the digest of their keys names the module; then the steps whose files mention its macro get it in their
command. A change to one source therefore compiles that source and the binding, and links.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kernel_builder import backends
from kernel_builder.backends import CompiledBackend
from kernel_builder.backends.host_code import token
from kernel_builder.config import kernel_sources
from kernel_builder.config.project import Backend, Project, TorchNoarch
from kernel_builder.config.variant import Abi, Noarch, TvmFfiAbi, Variant, this_platform
from kernel_builder.steps import compile_steps, crates, recorded_sources
from kernel_builder.steps.graph import RECIPE, SYSROOT, Binary, Graph, PlannedVariant, digest
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import ConfigError
from kernel_format.metadata import CROSS_COMPILER

_UNIQUE_LENGTH = 13
_LINK_FLAGS = (
    "-shared",
    "-nodefaultlibs",
    # The linker's plugin would assemble bytecode in an object, and no list names the files that this reads.
    "-fno-lto",
    "-fno-use-linker-plugin",
    "-Wl,--build-id=none",
    "-Wl,--strip-all",
    "-Wl,--gc-sections",
    "-Wl,-z,noexecstack,-z,relro,-z,now",
    "-Wl,--version-script=exports.map",
    f"-L{SYSROOT}/lib",
)


def plan(selections: Iterable[tuple[Project, Sequence[Variant]]], toolchains: Toolchains) -> Graph:
    """Plan the variants of all projects as one graph."""
    planned = []
    for project, variants in selections:
        python = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in project.python_files}
        for variant in variants:
            if isinstance(variant.framework, Noarch):
                binary = None
                module = _module_name(project, variant.backend, python)
            else:
                binary = _binary(project, variant, python, toolchains)
                module = binary.module
            archs = _archs(project, variant, toolchains)
            sources = recorded_sources.record(project, binary.objects if binary else ())
            compiler = _compiler(project, variant, toolchains)
            planned.append(PlannedVariant(project, variant, module, archs, python, compiler, sources, binary))
    return Graph(tuple(planned))


def _archs(project: Project, variant: Variant, toolchains: Toolchains) -> tuple[str, ...]:
    if isinstance(project.framework, TorchNoarch):
        return getattr(project.framework, variant.backend.archs_key, None) or ()
    backend = backends.compiled(variant.backend)
    kernels = kernel_sources.of_backend(project, variant.backend, variant.release)
    toolkit = backend.toolkit(toolchains, variant.release)
    return backend.archs(kernels, toolkit.release if toolkit else variant.release, variant.platform or "")


def _compiler(project: Project, variant: Variant, toolchains: Toolchains) -> Mapping[str, Any]:
    """Return the compilers for the provenance: the back end's, Rust's, and a cross compiler.

    This platform's g++ is not recorded. A cross compiler gives other bytes than the g++ of its target platform.
    """
    recorded: dict[str, Any] = {}
    if not isinstance(variant.framework, Noarch):
        backend = backends.compiled(variant.backend)
        recorded.update(backend.provenance(backend.toolkit(toolchains, variant.release)))
        crate = any(kernel.cargo_manifest for kernel in kernel_sources.of_backend(project, backend, variant.release))
        if crate and (rust := crates.toolchain()):
            recorded["rust-compiler"] = rust.version
    if variant.platform not in (None, this_platform()):
        host = toolchains.host(variant.platform)
        recorded[CROSS_COMPILER] = {"name": "g++", "version": host.version, "digest": host.identity}
    return recorded


def _module_name(project: Project, backend: Backend, python: Mapping[str, str], *inputs: object) -> str:
    """Return the op namespace of a binary, which is a digest of its inputs.

    The Python files are among them: two versions of a kernel that share a binary still register different fakes and
    gradients, so they need different namespaces to be loaded into one process.
    """
    content = digest(RECIPE, project.name, project.version, backend.name, dict(python), *inputs)
    unique = base64.b32encode(hashlib.sha256(content.encode()).digest()).decode().lower()
    return f"_{project.python_name}_{backend}_{unique[:_UNIQUE_LENGTH]}"


def framework_libraries(framework: Abi, backend: CompiledBackend, *, stable: bool) -> tuple[str, ...]:
    """Return the libraries of Torch or TVM FFI that a binary needs."""
    if isinstance(framework, TvmFfiAbi):
        return ("libtvm_ffi.so",)
    host = ("libtorch_cpu.so",) if stable else ("libc10.so", "libtorch_cpu.so", "libtorch.so")
    return (*host, *backend.torch_libraries(stable=stable))


def _binary(project: Project, variant: Variant, python: Mapping[str, str], toolchains: Toolchains) -> Binary:
    framework = project.framework
    assert not isinstance(framework, TorchNoarch)
    drafts = compile_steps.drafts(project, variant, toolchains)
    if not drafts:
        raise ConfigError(
            f"there is nothing to compile for the {variant.backend} backend",
            where=f"{project.root / 'build.toml'}: [{framework.table}] src",
            hint=f"list the source that registers the functions, for example {framework.package_directory}/binding.cpp",
        )
    stable = variant.stable_abi(framework) is not None
    backend = backends.compiled(variant.backend)
    libraries = framework_libraries(variant.framework, backend, stable=stable)
    host = toolchains.host(variant.platform)
    sysroot = toolchains.sysroot(variant.platform, tuple(backend.linked_libraries.union(libraries))).root
    # The store names a sysroot by its recipe and the host compiler.
    tools = [host.identity, sysroot.name, sysroot.parent.name]
    argv: tuple[str, ...] = _LINK_FLAGS
    roots = {SYSROOT: sysroot}
    toolkit = backend.toolkit(toolchains, variant.release) if isinstance(variant.framework, TvmFfiAbi) else None
    if toolkit and (runtime := backend.static_runtime(toolkit)):
        place = token(toolkit.name)
        tools.append(toolkit.identity)
        roots[place] = toolkit.root
        argv = (*argv, f"-L{place}/{runtime.parent.relative_to(toolkit.root)}")
        libraries = (*libraries, runtime.name)
    # The initializer of a Python module, or the functions that TVM FFI looks up.
    exported = "__tvm_ffi_*" if isinstance(variant.framework, TvmFfiAbi) else "PyInit_*"
    inputs = [tools, [draft.key for draft in drafts], argv, libraries]
    module = _module_name(project, variant.backend, python, inputs)
    objects = tuple(compile_steps.with_namespace(draft, module, variant.framework) for draft in drafts)
    return Binary(
        key=digest("link", RECIPE, module, [step.key for step in objects], inputs),
        module=module,
        platform=host.platform,
        objects=objects,
        cxx=host.path,
        argv=argv,
        libraries=libraries,
        linked_if_called=backend.linked_if_called,
        roots=roots,
        generated={"exports.map": f"{{ global: {exported}; local: *; }};\n"},
        title=f"{project.name} {variant.target}",
    )
