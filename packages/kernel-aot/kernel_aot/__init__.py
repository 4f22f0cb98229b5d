"""Translates kernels in Triton or CuTe DSL to a project of C++ and Python, in which they are ops of Torch.

    tables = ...                                          # aot.toml, read and validated
    language = select_language(tables)
    ops = read_ops(root, tables)                          # completed from the launch functions, which never run
    listed = [variant for op in ops for variant in variants(op)]
    pairs = [(variant, arch) for variant in listed for arch in ("8.0", "9.0")]
    request(language, package, source, pairs, processes)  # to write as JSON; `language.programs` compile it to `out/`
    kernels = list(answers(language, out, pairs, source))
    sources(root, tables, name, ops, rows)                # path -> text of each generated file

The caller finds the compiler, and confines it: compiling imports the author's module.
"""

from kernel_aot.answers import answers
from kernel_aot.expressions import is_plain
from kernel_aot.language import CompiledKernel, Language, arch_number, request
from kernel_aot.launch_function import read_launch_function
from kernel_aot.ops import Op, Variant, variants
from kernel_aot.translation import read_ops, select_language, sources

__all__ = [
    "CompiledKernel", "Language", "Op", "Variant", "answers", "arch_number", "is_plain", "read_launch_function",
    "read_ops", "request", "select_language", "sources", "variants",
]  # fmt: skip
