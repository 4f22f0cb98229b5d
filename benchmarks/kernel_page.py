"""What the kernels reach: docs/kernels.md and its pictures, from what `kernel-builder benchmark --json` measured.

    .venv/bin/python benchmarks/kernel_page.py            writes them
    .venv/bin/python benchmarks/kernel_page.py --check    names those that are not as they must be

The results are benchmarks/results/<kernel>.<machine>.json; each holds the command that made it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from kernel_builder.measure import plot, tables
from kernel_builder.measure.results import OURS, Report, Row, geometric_mean, shape_name

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "kernels.md"
PICTURES = ROOT / "docs" / "kernels"
KERNELS = ("rmsnorm", "geglu", "adaln", "rope3d")
MACHINES = {"h100": "H100", "cpu": "CPU"}
LARGE = 16e6
# Off the sizes that anyone tunes for.
ODD = {(1, 4096, hidden) for hidden in (1000, 1152, 4097, 5120, 7168)} | {(1, 131072, 64), (1, 5, 17, 23, 20, 72)}

INTRODUCTION = """\
# Figures of the kernels

Written by `benchmarks/kernel_page.py` from the results in [benchmarks/results](../benchmarks/results), which
`kernel-builder benchmark` measured. In the tables are microseconds of one call, and in brackets the share that it
reaches of the speed of a copy: as fast as a copy of as many bytes as the operation must read and write, on the same
machine, in the same rounds, is 1.00. A kernel that reads and writes each byte once can hardly be faster, unless it
begins before the call in front of it has ended.

- Every result is first held against float64: what is further off than eager PyTorch by more than a tenth gets no time.
- Nothing is in a cache: each call takes the next of several sets of tensors, and writes to memory of its own; together
  they exceed the last cache four times over. A call on memory that was just written would be faster, whoever makes it.
- On the GPU it is the device's time, from replays of CUDA graphs that take at least two milliseconds. What a call costs
  the host is in tables of its own: calls of a small shape one after another, all threads on the core that is fastest.
- A call follows the last one at once. Ours let the next kernel begin while they end, and most ask for rows by then,
  fewer or none where tensors may be in the cache. That is some of what makes them faster than a copy, the more the
  shorter a call is. In a model, where the kernel in front has just written what they read, they gain less.
- All implementations take turns, and each time is the median of the rounds. Ratios are medians of the ratios of rounds.
- `torch.compile` compiles for each shape by itself.
"""

MISSED = """\
What is missed is the cost for the host of calls with two results. The host's processors go back and forth between two
speeds, in which the same call takes 1.0 and 1.3 to 1.8, and the tables below have rows of each. In runs for tuning,
which are not among the results, `F.rms_norm` took between 10.0 and 17 us, and a loop of Python alone between 7 and 14;
the shortest of several rounds was 6.7 for `rms_norm`, 6.6 for `geglu` and 6.8 of two tensors, 7.2 for `gate_residual`,
7.4 for `ada_layer_norm`, 7.9 for `ada_rms_norm`, 8.1 for `add_rms_norm`, 8.3 for `rope3d` and `apply_rotary`, 9.1 for
`gate_residual_ada_norm`, and 120 for that one in both passes, the longest. Of these the launch alone takes 3.2, and
Torch's allocation of each result 1.1: those above 8 have two results.

All figures of the GPU are of bfloat16. In the backward pass of `adaln` some rows take a general kernel: those of
float16 and float32 that do not divide into vectors, those that begin in the middle of one, and those beyond 8192; on
GPUs of other capabilities than 9.0 and 10.0 all rows of odd lengths, and short rows of float16 and float32. In runs for
tuning, of an earlier form of it and of bfloat16, it reached between 0.04 and 0.31 of a copy's speed on an H100. With
the fast kernels for all of these the package would be too large.

A package with all capabilities is to be of at most 3 MB on disk (`du -sb`), and 1 MB compressed (`tar | zstd -19`):
`rmsnorm` is of 1.13 and 0.98 MB, `geglu` of 0.56 and 0.36, `rope3d` of 0.46 and 0.28, `adaln` of 1.18 and 0.993.
"""


class Target(NamedTuple):
    """One line of what was aimed at."""

    what: str
    wanted: str
    measured: str
    met: bool | None


def results() -> dict[str, dict[str, Report]]:
    """Reports by machine and kernel, as far as there are any."""
    found: dict[str, dict[str, Report]] = {}
    for machine in MACHINES:
        for kernel in KERNELS:
            path = RESULTS / f"{kernel}.{machine}.json"
            if path.exists():
                report = found.setdefault(machine, {})[kernel] = Report.read(path)
                if host := hosts_alone(kernel, machine):
                    report.hosts = host.hosts
    return found


def hosts_alone(kernel: str, machine: str) -> Report | None:
    """What calls cost the host, where that was measured by itself, with the machine at rest."""
    path = RESULTS / f"{kernel}.{machine}.host.json"
    return Report.read(path) if path.exists() else None


def rows_of(report: Report | None, *operations: str, passes: str = "forward") -> list[Row]:
    """The rows of some operations, at the sizes of models."""
    rows = report.rows if report else []
    return [r for r in rows if r.place.operation in operations and r.place.passes == passes and not odd(r)]


def odd(row: Row) -> bool:
    """Whether it is about sizes that nobody tunes for, a single row among them."""
    return row.place.shape in ODD or all(size == 1 for size in row.place.shape[:2])


def share(row: Row) -> float:
    return row.shares[OURS].median


def over(row: Row, *peers: str) -> float:
    """The fastest of some peers, or of all, beside ours; above 1, ours is faster."""
    names = peers or tuple(name for name in row.ratios if name not in (OURS, "copy"))
    return min(row.ratios[name].median for name in names if name in row.ratios)


def beside(peer: str) -> Callable[[Row], float]:
    """That peer beside ours."""
    return lambda row: over(row, peer)


def above(least: float, rows: Sequence[Row]) -> list[Row]:
    """The rows that move more bytes, and those without a time, of which that is not known."""
    return [row for row in rows if row.bytes > least or not row.times]


def at_least(
    what: str, wanted: float, rows: Sequence[Row], value: Callable[[Row], float], *, mean: bool = False
) -> Iterator[Target]:
    """That the value of each row, or their geometric mean, is no less than it should be."""
    timed = [row for row in rows if OURS in row.times]
    if not rows:
        return
    lacking = f", {len(rows) - len(timed)} of {len(rows)} without a time" if len(timed) < len(rows) else ""
    if not timed:
        yield Target(what, f"at least {wanted}", lacking.removeprefix(", "), False)
    elif mean:
        found = geometric_mean(map(value, timed))
        yield Target(what, f"at least {wanted}", f"{found:.3f}{lacking}", found >= wanted and not lacking)
    else:
        least = min(timed, key=value)
        where = f"{least.place.operation} {shape_name(least.place.shape)}"
        missed = sum(value(row) < wanted for row in timed)
        below = f", {missed} of {len(timed)} below" if missed else ""
        yield Target(
            what, f"at least {wanted}", f"{value(least):.3f} at {where}{below}{lacking}", not missed and not lacking
        )


def targets(found: dict[str, dict[str, Report]]) -> Iterator[Target]:
    """What was aimed at, and what was reached."""
    gpu, cpu = found.get("h100", {}), found.get("cpu", {})
    norm = rows_of(gpu.get("rmsnorm"), "rms_norm", "add_rms_norm")
    yield from at_least("rms_norm, add_rms_norm: best peer / ours, each shape", 0.98, norm, over)
    yield from at_least("the same, geometric mean", 1.03, norm, over, mean=True)
    yield from at_least("the same: share of a copy above 16 MB", 1.0, above(LARGE, norm), share)
    geglu = above(LARGE, rows_of(gpu.get("geglu"), "geglu", "geglu, tanh", "geglu_pair, tanh"))
    yield from at_least("geglu, both forms: share of a copy", 1.0, geglu, share)
    yield from at_least("the same: torch.compile / ours, geometric mean", 1.0, geglu, beside("compile"), mean=True)
    adaln = gpu.get("adaln")
    ada = above(LARGE / 2, rows_of(adaln, "ada_layer_norm", "ada_rms_norm"))
    yield from at_least("ada_layer_norm, ada_rms_norm: share of a copy", 0.97, ada, share)
    fused = above(LARGE / 2, rows_of(adaln, "gate_residual_ada_norm"))
    yield from at_least("gate_residual_ada_norm: share of a copy", 0.95, fused, share)
    rope = above(LARGE, rows_of(gpu.get("rope3d"), "rope3d"))
    yield from at_least("rope3d, q and k: share of a copy", 1.0, rope, share)
    yield from at_least("the same: torch.compile with ready-made tables / ours", 1.0, rope, beside("compile"))
    both = rows_of(gpu.get("rmsnorm"), "rms_norm", passes="forward + backward")
    yield from at_least("rms_norm, forward + backward: share of a copy", 0.90, both, share)
    back = [row for report in gpu.values() for row in report.rows if row.place.passes == "backward" and not odd(row)]
    yield from at_least("backward of the others: share of a copy", 0.85, back, share)
    others = [row for report in gpu.values() for row in report.rows if odd(row)]
    yield from at_least("all, at sizes that nobody tunes for: best peer / ours", 0.9, others, over)
    for passes, most in (("forward", 8), ("forward + backward", 120)):
        hosts = [host for report in gpu.values() for host in report.hosts if host.place.passes == passes]
        timed = [host for host in hosts if OURS in host.times]
        if timed:
            worst = max(timed, key=lambda host: host.times[OURS].median)
            cost = worst.times[OURS].median * 1e6
            lacking = f", {len(hosts) - len(timed)} of {len(hosts)} without a time" if len(timed) < len(hosts) else ""
            measured = f"{cost:.1f} us, of {worst.place.operation}{lacking}"
            yield Target(f"cost for the host, {passes}", f"at most {most} us", measured, cost <= most and not lacking)
    on_cpu = [row for report in cpu.values() for row in report.rows]
    for peer, wanted in (("eager", 2.0), ("compile", 1.0)):
        rows = [row for row in on_cpu if peer in row.ratios or OURS in row.faults]
        what = f"on the CPU: {peer} / ours, geometric mean over dtypes and passes"
        yield from at_least(what, wanted, rows, beside(peer), mean=True)


def page(found: dict[str, dict[str, Report]]) -> str:
    """docs/kernels.md."""
    parts = [INTRODUCTION]
    table = [["target", "", "measured", ""]]
    table += [[one.what, one.wanted, one.measured, "met" if one.met else "missed"] for one in targets(found)]
    if len(table) > 1:
        parts.append(f"## Targets\n\n{tables.as_markdown(table)}\n\n{MISSED}")
    for machine, title in MACHINES.items():
        for kernel, report in found.get(machine, {}).items():
            parts.append(section(f"{kernel}, {title}", machine, report))
    return "\n".join(parts)


def section(title: str, machine: str, report: Report) -> str:
    """All that was measured of one kernel on one machine."""
    commit = ((report.build.get("provenance") or {}).get("kernel") or {}).get("commit")
    source = f" Built from {commit[:12]}." if commit else ""
    lines = [
        f"## {title}",
        "",
        f"{tables.machine(report)}. Variant `{report.variant}`, build `{report.build['id']}`.{source}",
        "",
        f"    {report.command}",
        "",
        tables.as_markdown(tables.summary(report.rows)),
        "",
        f"![Share of a copy's speed]({PICTURES.name}/{report.kernel}.{machine}.svg)",
        "",
    ]
    for heading, rows in tables.groups(report.rows):
        lines += [f"**{heading}**", "", tables.as_markdown(tables.times(rows)), ""]
    if report.hosts:
        lines += ["**Microseconds of the host for a call**", ""]
        if alone := hosts_alone(report.kernel, machine):
            lines += [f"    {alone.command}", ""]
        lines += [tables.as_markdown(tables.hosts(report.hosts)), ""]
    notes = tables.notes(report)
    return "\n".join([*lines, *(f"- {note}" for note in notes), ""])


def written() -> dict[Path, str]:
    """Every file, and what must be in it."""
    found = results()
    pictures = {
        PICTURES / f"{kernel}.{machine}.svg": plot.draw(report)
        for machine, reports in found.items()
        for kernel, report in reports.items()
    }
    return {PAGE: page(found), **pictures}


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; name what is not as it must be.")
def main(check: bool) -> None:
    """Write docs/kernels.md and its pictures from the results."""
    wanted = written()
    old = {path for path in PICTURES.glob("*.svg") if path not in wanted}
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in sorted([*changed, *old]):
        click.echo(path.relative_to(ROOT))
    if check:
        sys.exit(1 if changed or old else 0)
    PICTURES.mkdir(exist_ok=True)
    for path in changed:
        path.write_text(wanted[path])
    for path in old:
        path.unlink()


if __name__ == "__main__":
    main()
