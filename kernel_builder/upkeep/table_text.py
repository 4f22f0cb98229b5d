"""Additions to the builder's tables as text, so that comments, order and layout stay."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kernel_builder import toml_file
from kernel_builder.config.variant import Release


def after_block(text: str, first: str, addition: str) -> str:
    """Insert lines after a block: the lines from `first` to the next empty one.

    Args:
        first: The first line of the block, or how it begins.
        addition: Whole lines.
    """
    start = text.index(f"\n{first}") + 1
    end = text.find("\n\n", start)
    at = len(text) if end < 0 else end + 1
    return text[:at] + addition + text[at:]


def quoted(names: Iterable[object]) -> str:
    """Return an array in one line."""
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def array(names: Iterable[str]) -> str:
    """Return an array with one line for each name, as the tables of functions have them."""
    return "[\n" + "".join(f'    "{name}",\n' for name in names) + "]"


def with_torch(table: str, newest: Release, release: Release, entry: Iterable[str]) -> str:
    """Return the matrix, or the table of a back end, with a Torch release after its newest one."""
    return after_block(table, f'[torch."{newest}"]', f'\n[torch."{release}"]\n' + "".join(f"{x}\n" for x in entry))


def with_cuda(table: str, before: Release, release: Release, capabilities: Iterable[str]) -> str:
    """Return the table of CUDA with a release after another."""
    addition = f'\n[release."{release}"]\ncapabilities = {quoted(capabilities)}\n'
    return after_block(table, f'[release."{before}"]', addition)


def with_cuda_components(table: str, before: Release, release: Release) -> str:
    """Return the table of CUDA with the components of a release, which have the same files as those of another."""
    names = (f"cuda-{before}", f"cuda-libraries-{before}")
    blocks = [re.search(rf'(?ms)^\[component\."{re.escape(name)}"\]\n.*?\n\]\n', table) for name in names]
    addition = "".join("\n" + block[0].replace(str(before), str(release)) for block in blocks if block)
    return after_block(table, f'[component."{names[-1]}"]', addition)


def with_shims(shims: str, newest: str, release: Release, names: Iterable[str], of_cuda: Iterable[str]) -> str:
    """Return the table of the stable ABI with the functions of a release, and all those of CUDA."""
    shims = after_block(shims, f'"{newest}" = [', f'\n"{release}" = {array(sorted(names))}\n')
    known = toml_file.parse(shims, "torch_shims.toml")["library"]["cuda"]
    return re.sub(r"(?ms)^cuda = \[.*?^\]", lambda _: f"cuda = {array(sorted({*known, *of_cuda}))}", shims)


def with_libraries(table: str, last: Release, before: frozenset[str], release: Release, needed: frozenset[str]) -> str:
    """Return the table of CUDA with the changes of the libraries from one Torch release to the next.

    Args:
        last: The release before, which needs `before`.
        release: The release, which needs `needed`.
    """
    known = toml_file.parse(table, "cuda.toml")["library"]
    for name in sorted(before - needed):
        if name in known and known[name].get("loaded", True) and "until" not in known[name]:
            table = after_block(table, f"[library.{name}]", f'until = "{last}"\n')
    new = sorted(needed - before - set(known))
    return table + "".join(f'\n[library.{name}]\nsince = "{release}"\n' for name in new)
