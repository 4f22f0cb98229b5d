"""The language CuTe DSL: C++ that calls the compiled host functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_aot import cute_reader, images
from kernel_aot.cpp_code import configuration, launcher, stored
from kernel_aot.cute_host import Host, translate
from kernel_aot.cute_reader import STREAM, CuteOp, CuteReader
from kernel_aot.images import Cubin, checked_name
from kernel_aot.language import Language, shared_memory
from kernel_aot.ops import Argument
from kernel_aot.triton import TRITON
from kernel_format.errors import ConfigError


@dataclass(frozen=True)
class Compiled:
    """A compiled function: the machine code of its kernels for one capability, and the host function."""

    capability: int
    image: bytes
    kernels: tuple[str, ...]
    host: Host

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return shared_memory(self.capability) if self.host.shared is None else self.host.shared


def _read(capability: int, result: dict[str, Any], outputs: Sequence[bytes], source: str) -> Compiled:
    host = translate(result["host"], result["kernels"], source)
    return Compiled(capability, outputs[0], tuple(map(checked_name, result["kernels"])), host)


def _sources(
    op: CuteOp, compiled: Sequence[Sequence[Compiled]], source: str, tables: Mapping[str, Any]
) -> dict[str, str]:
    """Return the C++ files of an op.

    Raises:
        ConfigError: If a compiled function differs between capabilities, or has other arguments than the op.
    """
    table, hosts, first = [], [], 0
    texts: dict[str, str] = {}
    for row in compiled:
        for other in row[1:]:
            if (other.host.text, other.kernels) != (row[0].host.text, row[0].kernels):
                raise ConfigError(
                    f"{op.kernel} launches other kernels for capability {other.capability / 10} than for "
                    f"{row[0].capability / 10}",
                    where=source,
                    hint="restrict `capabilities` in aot.toml, or do not let the @cute.jit function depend on them",
                )
        _check_arguments(op, row[0].host, source)
        name = texts.setdefault(row[0].host.text, f"host_{len(texts)}")
        hosts.append(f"    {{{name}, {op.name}_kernels + {first}}},")
        for kernel in row[0].kernels:
            table.append([Cubin(each.capability, False, each.image, kernel, 0, each.shared, 0) for each in row])
        first += len(row[0].kernels)
    host = [
        f"// The compiled host code of {op.kernel} of {source}. kernel-builder made this file of aot.toml.",
        '#include "aot/cute.h"',
        "",
        f"extern aot::Kernel {op.name}_kernels[];",
        "",
        "namespace {",
        "",
        *(text.replace("NAME", name, 1) + "\n" for text, name in texts.items()),
        "}  // namespace",
        "",
        f"extern const aot::Host {op.name}_hosts[] = {{",
        *hosts,
        "};",
    ]
    return {
        f"{op.name}.cpp": launcher(op, source, "cute.h", f"const aot::Host {op.name}_hosts[]", _launch(op)),
        f"{op.name}_host.cpp": "\n".join(host) + "\n",
        f"{op.name}_cubins.cpp": images.images(op, table),
    }


def _check_arguments(op: CuteOp, host: Host, source: str) -> None:
    """Check that the compiled function takes tensors as `_launch` lays them out."""
    for name, kind in zip(op.inputs, host.arguments, strict=False):
        sizes, strides = (len(op.dynamic_sizes(name)), len(op.layouts[name]) - 1) if name in op.layouts else (0, 0)
        after = 8 + -(-4 * sizes // 8) * 8
        expected = [(0, "char*"), *((8 + 4 * at, "uint32_t") for at in range(sizes))]
        expected += [(after + 8 * at, "uint64_t") for at in range(strides)]
        if len(op.inputs) != len(host.arguments) or (name in op.layouts and list(kind.scalars()) != expected):
            raise ConfigError(
                f"{name} of {op.kernel} is compiled to another layout than its type in aot.toml",
                where=source,
                hint="annotate tensors as cute.Tensor, and values that are known at compile time as cutlass.Constexpr",
            )


def _launch(op: CuteOp) -> Iterator[str]:
    """Yield the statements that call the host function of the chosen configuration."""
    for argument in op.arguments:
        yield from stored(op, argument)
        if argument.name in op.layouts:
            yield from _tensor(op, argument)
    yield f"const void* {STREAM}_value = aot::current_stream({op.first_tensor});"
    inputs = [f"&{name}_tensor" if name in op.layouts else f"&{name}_value" for name in op.inputs]
    yield f"const void* arguments[] = {{{', '.join(inputs)}}};"
    yield f"const aot::Host& host = {op.name}_hosts[{configuration(op)}];"
    yield f"host.function(host.kernels, {op.first_tensor}.get_device_index(), arguments);"


def _tensor(op: CuteOp, argument: Argument) -> Iterator[str]:
    """Yield the checks of a tensor's strides, and the struct that the host function takes."""
    tensor, name = argument.value.cpp, argument.name
    sizes = [f'aot::int32(aot::size({tensor}, {at}), "{tensor}.size({at})")' for at in op.dynamic_sizes(name)]
    strides = [f"aot::stride({tensor}, {at})" for at in range(len(op.layouts[name]) - 1)]
    for at, stride in enumerate(strides if argument.is_divisible else ()):
        size = f"{stride} * aot::element_size({tensor})"
        text = f"the bytes of {tensor}.stride({at}) to be divisible by 16"
        yield f'aot::require(aot::divisible({size}), "{text}", {{{size}}});'
    members = [("const void* data", f"{name}_value")]
    members += [(f"int32_t sizes[{len(sizes)}]", f"{{{', '.join(sizes)}}}")] if sizes else []
    members += [(f"int64_t strides[{len(strides)}]", f"{{{', '.join(strides)}}}")] if strides else []
    declared, values = zip(*members, strict=True)
    yield f"const struct {{ {'; '.join(declared)}; }} {name}_tensor = {{{', '.join(values)}}};"


CUTE_DSL = Language(
    title="CuTe DSL",
    programs=(Path(__file__).with_name("compile_cute.py"), *TRITON.programs),
    headers=(*TRITON.headers, "cute.h"),
    reader=CuteReader,
    left_out=re.compile(r"^(import|from) (cutlass|cuda)\b", re.MULTILINE),
    job=cute_reader.job,
    outputs=(".cubin",),
    read=_read,
    sources=_sources,
)
