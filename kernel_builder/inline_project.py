"""Creates a project from a single C++ or CUDA source, whose functions become operators."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kernel_builder.checks.ops import split_list
from kernel_builder.config.project import python_name
from kernel_builder.scaffold import render
from kernel_format.errors import ConfigError

_TEMPLATES = Path(__file__).parent / "templates"
# Types of C++ -> an example of an argument.
_EXAMPLES = {"Tensor": "torch.randn(4, 8, device=DEVICE)", "double": "2.0", "int64_t": "2", "bool": "True"}


def backend_of(source: str) -> str:
    """Return the backend of a source: "cuda" if it has or launches a kernel, else "cpu"."""
    return "cuda" if re.search(r"__global__|<<<", source) else "cpu"


def files(
    repo_id: str,
    source: str,
    functions: Sequence[str],
    *,
    stem: str,
    license_name: str = "apache-2.0",
    for_authors: bool = False,
) -> dict[str, str]:
    """Return the files of the project: path -> content.

    Args:
        repo_id: The Hub repository; the part after the slash is the name of the kernel.
        functions: Their names: C++ functions at file scope whose arguments and results are `Tensor`, `double`,
            `int64_t`, `bool`, `std::string`, or `std::optional` or `std::vector` of these. The function may write to
            arguments of type `Tensor&`. A function may return a `std::tuple`, or nothing.
        stem: The name of the file with the functions, without a suffix.
        for_authors: Whether to add the files of a new project that a build does not need: tests, card and so on.

    Raises:
        ConfigError: If there is no function, or a name is not a C++ name.
    """
    if not functions:
        raise ConfigError("no function is named", where="functions (--op)", hint="name the function of each operator")
    for function in functions:
        if not re.fullmatch(r"[A-Za-z]\w*", function):
            raise ConfigError(f"{function!r} is not the name of a C++ function", where="functions (--op)")
        if not re.search(rf"\b{function}\s*\(", source):
            known = re.findall(r"^\w[^;={}()\n]*[\s&*](\w+)\([^;{}]*\)\s*{", source, re.MULTILINE)
            hint = f"it has {', '.join(dict.fromkeys(known)) or 'none'}"
            raise ConfigError(f"the source defines no function {function!r}", where="functions (--op)", hint=hint)
    name = repo_id.rpartition("/")[2]
    package, backend = python_name(name), backend_of(source)
    values = {
        "name": name,
        "python_name": package,
        "repo_id": repo_id,
        "license": license_name,
        "backend": backend,
        "key": backend.upper(),
        "file_name": f"{stem}.{'cu' if backend == 'cuda' else 'cpp'}",
        "source": source.rstrip(),
        "define": "\n".join(f"  KERNEL_BUILDER_DEFINE(ops, {function});" for function in functions),
        "implement": "\n".join(f"  KERNEL_BUILDER_IMPLEMENT(ops, {function});" for function in functions),
        "assign": "\n".join(f"{function} = ops.{function}.default" for function in functions),
        "names": ", ".join(f'"{function}"' for function in functions),
    }
    rendered = render(_TEMPLATES / "inline", values)
    if for_authors:
        rendered |= _files_for_authors(source, functions, values)
    return rendered


def _files_for_authors(source: str, functions: Sequence[str], values: dict[str, str]) -> dict[str, str]:
    """Return the files of `kernel-builder init`, for functions with these signatures."""
    examples, fakes = {}, {}
    for function in functions:
        result, types = _signature(source, function)
        examples[function] = [_example(each) for each in types]
        tensor = types.index("Tensor") if "Tensor" in types else None
        results = result.count("Tensor")
        if result == "void" or (tensor is not None and re.fullmatch(r"(std::tuple<)?(Tensor(, |>)?)+", result)):
            copies = ", ".join([f"torch.empty_like(args[{tensor}])"] * results) or "None"
            fakes[function] = f"({copies})" if results > 1 else copies
    device = f'"{values["backend"]}"'
    first = examples[functions[0]]
    in_benchmark = ["x" if "torch.randn" in argument else argument for argument in first]
    calls = [f"kernel.{name}({', '.join(examples[name])})".replace("DEVICE", device) for name in functions]
    values = {
        **values,
        "operator": functions[0],
        "imported": ", ".join(functions),
        "summary": "Not written yet: the computation of " + ", ".join(f"`{name}`" for name in functions) + ".",
        "card_of_layer": "",
        "example": "\n".join(f"print({call})" for call in calls),
        "example_of_card": "\n".join(calls),
        "layer": "".join(map(str.capitalize, functions[0].split("_"))),
        "formula": "self.ours(x.float())  # Not written yet: the formula, in PyTorch",
        "passes": '["forward"]',
        "benchmark_arguments": ", ".join(in_benchmark),
        "arguments": "\n".join(f'    "{name}": [{", ".join(examples[name])}],' for name in functions),
        "fakes": "\n".join(f'    "{name}": lambda *args: {fake},' for name, fake in fakes.items()),
    }
    shared = ("CARD.md", ".gitignore", "tests/conftest.py", "benchmarks/benchmark.py")
    rendered = render(_TEMPLATES / "init", values, only=shared)
    rendered |= render(_TEMPLATES / "inline_project", values)
    rendered["benchmarks/workload.py"] = (_TEMPLATES / "kit" / "workload.py").read_text(encoding="utf-8")
    return rendered


def _signature(source: str, function: str) -> tuple[str, list[str]]:
    """Return the type of a function's result and of its arguments, without `const` and `&`."""
    found = re.search(rf"(?<![\w:])([\w:]+(?:<[\w:<>, ]*>)?)\s+{function}\s*\(([^()]*)\)\s*{{", source)
    if not found:
        return "", []
    declared = [re.sub(r"\bconst\b|&|=.*", " ", each).split() for each in split_list(found[2])]
    return found[1], ["".join(words[:-1] or words) for words in declared]


def _example(cpp_type: str) -> str:
    """Return a Python expression for an argument of a type."""
    if match := re.fullmatch(r"std::(optional|vector)<(.*)>", cpp_type):
        return "None" if match[1] == "optional" else f"[{_example(match[2])}]"
    return _EXAMPLES.get(cpp_type, '"text"')
