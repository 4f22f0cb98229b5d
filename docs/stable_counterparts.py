"""Writes the tables of docs/port.md: the functions of the full C++ ABI, and their counterparts on Torch's stable ABI.

    .venv/bin/python docs/stable_counterparts.py            write them
    .venv/bin/python docs/stable_counterparts.py --check    fail if they differ from the headers of the installed Torch

The functions, the methods and the headers of equal names are read from Torch's stable headers (`torch/csrc/stable`
and `torch/headeronly`), with the release that each needs. Names that changed are listed below; a counterpart that
the headers no longer define is an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

PAGE = Path(__file__).resolve().parent / "port.md"
INCLUDE = Path(torch.__file__).resolve().parent / "include"
STABLE, HEADERONLY = "torch/csrc/stable", "torch/headeronly"
SHIM = "torch/csrc/inductor/aoti_torch/c/shim.h"

# Headers and functions that projects use -> the counterpart, and the header that defines it.
RENAMED = (
    ("`TORCH_LIBRARY(ns, m)`", "STABLE_TORCH_LIBRARY", f"{STABLE}/library.h"),
    ("`TORCH_LIBRARY_IMPL(ns, CUDA, m)`", "STABLE_TORCH_LIBRARY_IMPL", f"{STABLE}/library.h"),
    ('`m.impl("f", &f)`: `m.impl("f", TORCH_BOX(&f))`', "TORCH_BOX", f"{STABLE}/library.h"),
    ("`at::Tensor`, `torch::Tensor`", "torch::stable::Tensor", f"{STABLE}/tensor.h"),
    ("`TORCH_CHECK`", "STD_TORCH_CHECK", f"{HEADERONLY}/util/Exception.h"),
    ("`at::Half`, `c10::Half`", "torch::headeronly::Half", f"{HEADERONLY}/util/Half.h"),
    ("`at::BFloat16`, `c10::BFloat16`", "torch::headeronly::BFloat16", f"{HEADERONLY}/util/BFloat16.h"),
    ("`at::ScalarType`, `at::kFloat`", "torch::headeronly::ScalarType", f"{HEADERONLY}/core/ScalarType.h"),
    ("`at::IntArrayRef`", "torch::headeronly::IntHeaderOnlyArrayRef", f"{HEADERONLY}/util/HeaderOnlyArrayRef.h"),
    ("`c10::Device`", "torch::stable::Device", f"{STABLE}/device.h"),
    ("`at::DeviceType`, `at::kCUDA`", "torch::headeronly::DeviceType", f"{HEADERONLY}/core/DeviceType.h"),
    ("`AT_DISPATCH_V2`, `AT_DISPATCH_FLOATING_TYPES`", "THO_DISPATCH_V2", f"{HEADERONLY}/core/Dispatch_v2.h"),
    ("`AT_DISPATCH_SWITCH`", "THO_DISPATCH_SWITCH", f"{HEADERONLY}/core/Dispatch.h"),
    ("`AT_DISPATCH_CASE`", "THO_DISPATCH_CASE", f"{HEADERONLY}/core/Dispatch.h"),
    ("`at::TensorAccessor`", "torch::headeronly::HeaderOnlyTensorAccessor", f"{HEADERONLY}/core/TensorAccessor.h"),
    (
        "`at::PackedTensorAccessor32`",
        "torch::headeronly::HeaderOnlyGenericPackedTensorAccessor",
        f"{HEADERONLY}/core/TensorAccessor.h",
    ),
    ("`at::cuda::CUDAGuard`, `at::DeviceGuard`", "torch::stable::accelerator::DeviceGuard", f"{STABLE}/accelerator.h"),
    ("`at::cuda::getCurrentCUDAStream()`", "aoti_torch_get_current_cuda_stream", SHIM),
    ("`C10_CUDA_CHECK`", "STD_CUDA_CHECK", f"{STABLE}/macros.h"),
    ("`C10_CUDA_KERNEL_LAUNCH_CHECK()`", "STD_CUDA_KERNEL_LAUNCH_CHECK", f"{STABLE}/macros.h"),
    ("`at::get_num_threads()`", "torch::stable::get_num_threads", f"{STABLE}/ops.h"),
)
_GUARD = re.compile(r"#\s*if TORCH_FEATURE_VERSION (>=|<) TORCH_VERSION_(\d+)_(\d+)_0")
_FUNCTION = re.compile(r"^inline (?:torch::stable::Tensor&?|void|uint32_t) (\w+)\(")
_METHOD = re.compile(r"^  (?=\S)(?!return|explicit|using|static_|friend|\*|//)[\w:<>*& ]+[ *&](\w+)\([^;{]*(?:;|\{|$)")
_OLDEST = (2, 9)

Release = tuple[int, int]


def lines_with_release(header: str) -> Iterator[tuple[str, Release]]:
    """Yield the lines of a header with the oldest release that sees each, from the guards around it.

    `tensor.h` stands for `tensor_struct.h`, which declares functions that `tensor_inl.h` defines: a source that
    includes the former alone has undefined references.
    """
    guards: list[Release] = []
    struct = INCLUDE / header.replace(".h", "_struct.h")
    for line in (struct if struct.is_file() else INCLUDE / header).read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("#if"):
            guard = _GUARD.match(line)
            guards.append((int(guard[2]), int(guard[3])) if guard and guard[1] == ">=" else _OLDEST)
        elif line.startswith("#endif"):
            guards.pop()
        else:
            yield line, max([_OLDEST, *guards])


def release_of(name: str, header: str) -> Release:
    """Return the release from which a header defines a name."""
    name = name.rpartition("::")[2]
    defines = re.compile(
        rf"#\s*define {name}\b|(?:class|struct|enum class|using)\s+(?:alignas\(\d+\)\s+)?(?:[A-Z_]+\s+)?{name}\b"
        rf"|\b{name}\("
    )
    releases = [release for line, release in lines_with_release(header) if defines.search(line)]
    if not releases:
        raise SystemExit(f"{header} of Torch {torch.__version__} does not define {name}: correct {Path(__file__).name}")
    return min(releases)


def named(header: str, pattern: re.Pattern[str]) -> dict[str, Release]:
    """Return the matches of a pattern in a header, with its oldest release."""
    oldest: dict[str, Release] = {}
    for line, release in lines_with_release(header):
        if match := pattern.match(line):
            oldest[match[1]] = min(release, oldest.get(match[1], release))
    return dict(sorted(oldest.items()))


def shown(release: Release) -> str:
    return f"{release[0]}.{release[1]}"


def tables() -> str:
    """Return the tables, as Markdown."""
    version = shown(tuple(map(int, torch.__version__.split(".")[:2])))  # type: ignore[arg-type]
    functions, methods = named(f"{STABLE}/ops.h", _FUNCTION), named(f"{STABLE}/tensor.h", _METHOD)
    methods = {name: release for name, release in methods.items() if name not in ("Tensor", "get")}
    aten = {path.stem for path in (INCLUDE / "ATen/ops").glob("*.h")}
    same = sorted(
        str(path.relative_to(INCLUDE / HEADERONLY))
        for path in (INCLUDE / HEADERONLY).rglob("*.h")
        if (INCLUDE / "c10" / path.relative_to(INCLUDE / HEADERONLY)).is_file()
    )
    rows = [
        f"Read from the headers of Torch {version}. *From* is the oldest `stable-abi` that has it.",
        "",
        "| full C++ ABI | stable ABI | header | from |",
        "| --- | --- | --- | --- |",
        *(f"| {old} | `{name}` | `{header}` | {shown(release_of(name, header))} |" for old, name, header in RENAMED),
        "",
        "Functions of `torch/csrc/stable/ops.h`, in the namespace `torch::stable`. Methods of `at::Tensor`, such as "
        "`x.contiguous()`, are functions here: `torch::stable::contiguous(x)`.",
        "",
        "| from | functions that `at::` has too | others |",
        "| --- | --- | --- |",
        *_by_release(functions, aten),
        "",
        "Methods of `torch::stable::Tensor`:",
        "",
        "| from | methods |",
        "| --- | --- |",
        *(
            f"| {shown(since)} | {_list(name for name, release in methods.items() if release == since)} |"
            for since in sorted(set(methods.values()))
        ),
        "",
        "Headers that differ only in their directory: `c10/...` becomes `torch/headeronly/...`, and the namespaces "
        "`c10` and `at` become `torch::headeronly`:",
        "",
        _list(same) + ".",
    ]
    return "\n".join(rows)


def _by_release(functions: dict[str, Release], aten: set[str]) -> Iterator[str]:
    for since in sorted(set(functions.values())):
        names = [name for name, release in functions.items() if release == since]
        yield (
            f"| {shown(since)} | {_list(n for n in names if n in aten)} | {_list(n for n in names if n not in aten)} |"
        )


def _list(names: Iterator[str] | list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def written(page: str) -> str:
    """Return the page with the tables of the installed Torch."""
    begin, end = "<!-- tables: docs/stable_counterparts.py -->", "<!-- end of tables -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{tables()}\n\n{end}{after}"


def main() -> None:
    """Write the tables, or compare them."""
    page = PAGE.read_text(encoding="utf-8")
    new = written(page)
    if "--check" not in sys.argv:
        PAGE.write_text(new, encoding="utf-8")
    elif new != page:
        raise SystemExit("docs/port.md differs from Torch's headers: run .venv/bin/python docs/stable_counterparts.py")


if __name__ == "__main__":
    main()
