"""Chooses rows of `config` in aot.toml by the times that Triton's autotuner measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Array

from kernel_aot import is_plain
from kernel_format.errors import ConfigError
from kernel_format.files import write_atomically

Row = dict[str, Any]


@dataclass(frozen=True)
class Launch:
    """The fastest configuration of a launch.

    Attributes:
        arguments: The launch's integers and constexprs: parameter of the kernel -> value.
        key: The autotuner's key: parameter of the kernel -> value.
        best: The constexprs and options of the fastest configuration.
        milliseconds: The times of all configurations, as `BLOCK: 1024, num_warps: 4` -> time.
    """

    arguments: Mapping[str, Any]
    key: Mapping[str, int]
    best: Row
    milliseconds: Mapping[str, float]


@contextmanager
def recording(kernels: Mapping[str, Any], launches: Mapping[str, list[Launch]]) -> Iterator[None]:
    """Record the launches of autotuned kernels (name -> `triton.autotune`'s object) in lists of the same names."""
    for name, tuner in kernels.items():
        tuner.run = _recorded(tuner, launches[name])  # of the object, before the class's method
    try:
        yield
    finally:
        for tuner in kernels.values():
            del tuner.run


def _recorded(tuner: Any, launches: list[Launch]) -> Any:
    run = tuner.run

    def recorded(*args: Any, **keywords: Any) -> Any:
        result = run(*args, **keywords)
        named = {**dict(zip(tuner.arg_names, args, strict=False)), **keywords}
        arguments = {name: value for name, value in named.items() if isinstance(value, int | str)}
        key = {name: named[name] for name in tuner.keys if isinstance(named.get(name), int)}
        if not any(launch.key == key and launch.arguments == arguments for launch in launches):
            times = {
                ", ".join(f"{name}: {value}" for name, value in _row(config).items()): taken[0]
                for config, taken in (tuner.configs_timings or {}).items()
            }
            launches.append(Launch(arguments, key, _row(tuner.best_config), times))
        return result

    return recorded


def _row(config: Any) -> Row:
    """Return the constexprs and options of a `triton.Config`."""
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


def rows(launches: Sequence[Launch], present: Sequence[Row], passed: Mapping[str, str], where: str) -> list[Row]:
    """Return the rows of an op, from the fastest configurations of its launches.

    Args:
        present: The rows that aot.toml has. Their constexprs that no configuration sets, such as the size of a head,
            are kept, and each combination of them is tuned by the launches that have it.
        passed: Constexpr -> the expression that the launch function passes for it.
        where: The place of the rows, for errors.

    Raises:
        ConfigError: If no launch has the constexprs of a row, or their expressions are unknown.
    """
    tuned = {name for launch in launches for name in launch.best} | {"num_warps", "num_stages", "when"}
    kept: list[Row] = []
    for row in present:
        fixed = {name: value for name, value in row.items() if name not in tuned}
        if fixed not in kept:
            kept.append(fixed)
    result: list[Row] = []
    for fixed in kept or [{}]:
        if unknown := [name for name in fixed if name not in passed]:
            raise ConfigError(
                f"the rows set {unknown[0]}, for which neither the launch function nor a configuration has a value",
                where=where,
                hint=f"pass {unknown[0]} in the launch function, or write the rows manually",
            )
        fitting = [launch for launch in launches if fixed.items() <= launch.arguments.items()]
        if not fitting:
            values = ", ".join(f"{name} = {value}" for name, value in fixed.items())
            hint = "add a shape to benchmarks/benchmark.py, or remove the row"
            raise ConfigError(f"no workload launches the kernel with {values}", where=where, hint=hint)
        # Rows need the values that the launch function passes on unchanged, without a condition.
        computed = {name: value for name, value in fixed.items() if not is_plain(passed[name])}
        result += _decisions(fitting, fixed, [f"({passed[name]}) == {value}" for name, value in computed.items()])
    return result


def _decisions(launches: Sequence[Launch], fixed: Row, conditions: Sequence[str]) -> list[Row]:
    """Return one row for each range of keys with the same configuration; the last row is for all larger keys."""
    decided: list[tuple[dict[str, int], Row]] = []
    for launch in sorted(launches, key=lambda launch: tuple(launch.key.values())):
        key = {name: value for name, value in launch.key.items() if name not in fixed}
        if (
            decided
            and decided[-1][1] == launch.best
            and all(value <= key[name] for name, value in decided[-1][0].items())
        ):
            decided.pop()  # the larger key's row holds for both
        decided.append((key, launch.best))
    result = []
    for number, (key, best) in enumerate(decided, 1):
        limits = [f"{name} <= {value}" for name, value in key.items()] if number < len(decided) else []
        when = " and ".join([*conditions, *limits])
        result.append(({"when": when} if when else {}) | fixed | best)
    return result


def write_rows(path: Path, tuned: Mapping[str, Sequence[Row]]) -> None:
    """Replace the rows of ops in aot.toml. The order of keys and all comments are kept."""
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    for op, new in tuned.items():
        table: Any = document["op"]
        table = table[op]
        comments = []
        if isinstance(table.get("config"), Array):
            lines = table["config"].as_string().splitlines()
            comments = [line.strip() for line in lines if line.strip().startswith("#")]
        tables = [
            ", ".join(f"{name} = {tomlkit.item(value).as_string()}" for name, value in row.items()) for row in new
        ]
        lines = [f"  {line}" for line in [*comments, *(f"{{ {values} }}," for values in tables)]]
        text = "\n".join(["[", *lines, "]"])
        table["config"] = tomlkit.value(text)
    write_atomically(path, tomlkit.dumps(document).encode())
