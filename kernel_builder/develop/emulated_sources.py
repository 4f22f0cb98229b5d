"""Turns sources of CUDA and HIP into C++ for torch-kernel-emulator. Every line keeps its number.

Macros and templates of the emulator's headers do most of the work. The rest is rewritten in the text: launches,
declarations of shared memory, and names of the device that tensors are on.
"""

from __future__ import annotations

import re
from itertools import accumulate

from kernel_builder.checks.ops import split_list
from kernel_builder.steps.include_scan import LITERAL
from kernel_format.errors import ConfigError

# The first lines of every source, and of device sources, for which nvcc and hipcc include CUDA's and HIP's headers.
_FIRST = '#include "emulator_torch.h"\n'
_FIRST_OF_DEVICE = f'{_FIRST}#include "emulator.h"\n'

_DYNAMIC = re.compile(
    r"\bextern\s+__shared__\s+(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?([^;=\[\]]+?)\s*\b(\w+)\s*\[\s*\]\s*;"
)
_STATIC = re.compile(r"\b__shared__\s+(?:(?:__align__|alignas)\s*\((\d+|[^)]*)\)\s*)?([^;={}]+);")
_FIRST_VARIABLE = re.compile(r"(.*[\s*&>])(\w+)\s*((?:\[.*\])?)\s*", re.DOTALL)
_VARIABLE = re.compile(r"()\s*(\w+)\s*((?:\[.*\])?)\s*", re.DOTALL)
# The parts of the expression before `<<<`, from its end: identifiers, `::` and template arguments.
_IDENTIFIER = re.compile(r"[\w:]+$")
_SIMPLE = (
    (re.compile(r"\bhip(?=[A-Z])"), "cuda"),  # functions, types and constants of the runtime
    (re.compile(r"(#define \w+ )(?:CUDA|HIP)[ \t]*$", re.MULTILINE), r"\1CPU"),  # a macro that names the back end
    (re.compile(r"(TORCH_LIBRARY_IMPL\w*\s*\(\s*\w+\s*,\s*)(?:CUDA|HIP)\b"), r"\1CPU"),
    (re.compile(r"(\.|->)is_cuda\(\)"), r"\1is_cpu()"),
    (re.compile(r"\bDeviceType::CUDA\b"), "DeviceType::CPU"),
    (re.compile(r"\b__noinline__\b(?!\s*\))"), "__attribute__((noinline))"),
)


def translate(name: str, text: str, *, is_device_source: bool, is_header: bool) -> str:
    """Return a source or a header as C++ of the host, without its comments."""
    literals: list[bytes] = []

    def hide(match: re.Match[bytes]) -> bytes:
        lines = b"\n" * match[0].count(b"\n")
        literals.append(match[0])
        return b" " + lines if match["comment"] else b'"@%d@%s"' % (len(literals) - 1, lines)

    text = LITERAL.sub(hide, text.encode(errors="surrogateescape")).decode(errors="surrogateescape")
    text = _with_entries(_with_launches(name, text))
    text = _DYNAMIC.sub(_dynamic, text)
    text = _STATIC.sub(_static, text)
    for pattern, replacement in _SIMPLE:
        text = pattern.sub(replacement, text)
    text = re.sub(r'"@(\d+)@\n*"', lambda match: literals[int(match[1])].decode(errors="surrogateescape"), text)
    if is_header:
        return text
    first = _FIRST_OF_DEVICE if is_device_source else _FIRST
    return f'{first}#line 1 "{name}"\n{text}'


def _dynamic(match: re.Match[str]) -> str:
    lines = "\n" * match[0].count("\n")
    return f"{match[1]}* const {match[2]} = static_cast<{match[1]}*>(emulator::dynamic_shared());{lines}"


def _static(match: re.Match[str]) -> str:
    """Return declarations of references to shared memory, where each variable has a fixed offset."""
    alignment, declared = match[1], split_list(match[2])
    if not (first := _FIRST_VARIABLE.fullmatch(declared[0])):
        return match[0]
    of_type = " ".join(first[1].split())
    variables = [first, *filter(None, map(_VARIABLE.fullmatch, declared[1:]))]
    least = 1 if alignment is None else alignment if alignment.isdigit() else 16
    references = [
        f"auto& {variable[2]} = emulator::shared<{of_type}{' '.join(variable[3].split())}, {least}>([] {{}});"
        for variable in variables
    ]
    return " ".join(references) + "\n" * match[0].count("\n")


def _closing(text: str, at: int) -> int:
    """Return the position of the bracket that closes the bracket at a position, or -1."""
    depths = accumulate((character in "([{") - (character in ")]}") for character in text[at:])
    return next((place for place, depth in enumerate(depths, at) if depth == 0), -1)


def _with_launches(name: str, text: str) -> str:
    """Rewrite `kernel<<<configuration>>>(arguments)` as a call of `emulator::Launch`."""
    while (at := text.find("<<<")) >= 0:
        end = text.find(">>>", at)
        opening = text.find("(", end)
        closing = _closing(text, opening) if end >= 0 and opening >= 0 else -1
        begin = _kernel_begins(text, at)
        if closing < 0 or begin == at or text[end + 3 : opening].strip():
            raise ConfigError(
                f"line {text.count(chr(10), 0, at) + 1}: the emulator cannot parse this kernel launch",
                where=name,
                hint="write it as kernel<<<blocks, threads, bytes, stream>>>(arguments), or use cudaLaunchKernelEx",
            )
        configuration, kernel = text[at + 3 : end], text[begin:at].strip()
        arguments = text[opening + 1 : closing]
        call = f"[=](auto... emulated) {{ {kernel}(emulated...); }}"
        separator = ", " if arguments.strip() else ""
        text = f"{text[:begin]}emulator::Launch{{{configuration}}}({call}{separator}{arguments}){text[closing + 1 :]}"
    return text


def _kernel_begins(text: str, end: int) -> int:
    """Return the start of the kernel's name that ends at a position."""
    place = len(text[:end].rstrip())
    while place > 0:
        if text[place - 1] == ">":
            depth = 0
            while place > 0:
                place -= 1
                depth += (text[place] in ">)") - (text[place] in "<(")
                if depth == 0:
                    break
            place = len(text[:place].rstrip())
        identifier = _IDENTIFIER.search(text[max(0, place - 200) : place])
        if not identifier:
            break
        place -= len(identifier[0])
        if text[place - 1] != ">" or not identifier[0].startswith("::"):
            break
    return place


def _with_entries(text: str) -> str:
    """Insert a call that reports the kernel's name at the start of each kernel."""
    head, *kernels = re.split(r"(?=\b__global__\b)", text)
    for kernel in kernels:
        at = _body_begins(kernel)
        head += kernel if at is None else f"{kernel[:at]} emulator::enter_kernel(__func__);{kernel[at:]}"
    return head


def _body_begins(text: str) -> int | None:
    """Return the position after the first `{` outside of parentheses, or None if a `;` precedes it."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and character in "{;":
            return place + 1 if character == "{" else None
    return None
