"""docs/compatibility.md, from the results of benchmarks/community.py and the two scripts that run on a GPU.

The measured values are in benchmarks/results/community.json; explanations of single projects are in
benchmarks/community_notes.toml.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from figures import ROOT

from kernel_builder import toml_file

PAGE = ROOT / "docs" / "compatibility.md"
NOTES = ROOT / "benchmarks" / "community_notes.toml"
SECONDS = 2.0  # for check-config over all projects
RATIO = 1.02  # of device time, ours to cpp_extension's
LOADABLE = ("cuda", "cpu")  # the back ends of the machines that measure
COMPARED = ("activation", "relu", "rotary")

_NAMES = {"cuda": "CUDA", "cpu": "CPU", "noarch": "Python only"}


def page(results: Mapping[str, Any]) -> str:
    """Return the page for the results."""
    notes = toml_file.read(NOTES)
    paragraphs = [
        "# Compatibility\n\nThe builder takes the projects of the public builder as they are. This page shows how far "
        "that holds for every\nproject of one public repository, huggingface/kernels-community. "
        "`benchmarks/community.py` writes it.",
        _commands(),
        "\n".join(_figures(results, notes)),
        f"Checkout {results['checkout']}; builder at {results['builder']}; {_machine(results['machine'])}",
        "<!-- measured: community -->",
        "## Projects\n\nEach project is built for the newest Torch that it supports: one variant a backend, CUDA for "
        "the one capability 9.0.\n*Loads*: the public client loads the package; for a CUDA binary on a machine without "
        "a GPU, the dynamic linker\nresolves every symbol with the libraries of Torch.",
        "\n".join(_projects(results, notes)),
        *(["\n".join(_outside(results["outside"], notes))] if "outside" in results else []),
        *(["\n".join(_tests(results["tests"], notes))] if "tests" in results else []),
        *(["\n".join(_comparison(results["compare"]))] if "compare" in results else []),
    ]
    return "\n\n".join(paragraphs) + "\n"


def _commands() -> str:
    commands = (
        "git clone https://github.com/huggingface/kernels-community",
        ".venv/bin/python benchmarks/community.py build kernels-community",
        ".venv/bin/python benchmarks/community.py load kernels-community --python PYTHON",
        "python benchmarks/community_tests.py kernels-community --packages community-build --json tests.json",
        "python benchmarks/community_compare.py kernels-community --packages community-build --json compare.json",
        ".venv/bin/python benchmarks/community.py page --tests tests.json --compare compare.json",
    )
    return (
        "\n".join(f"    {command}" for command in commands)
        + "\n\nPYTHON has the newest Torch. The two scripts in between run on a machine with a GPU."
    )


def _machine(on: Mapping[str, Any]) -> str:
    return f"{on['cpu']}, {on['cores']} cores, {on['system']}, Python {on['python']}, kernels {on['kernels']}."


def _figures(results: Mapping[str, Any], notes: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of figures: what, target, measured, verdict."""
    projects = results["projects"]
    accepted = sum(entry["accepted"] for entry in projects.values())
    yield "| figure | target | measured | |"
    yield "| --- | --- | --- | --- |"
    yield _row("projects that are accepted", f"{len(projects)}", f"{accepted}", accepted == len(projects))
    check = results["check-config"]
    met = check["seconds"] <= SECONDS
    yield _row(
        f"`check-config` over all {check['projects']}", f"at most {SECONDS:g} s", f"{check['seconds']:g} s in all", met
    )
    built = [outcome for entry in projects.values() for outcome in entry["variants"].values()]
    for kind, name in _NAMES.items():
        mine = [outcome for outcome in built if _kind(outcome) == kind]
        done = sum(outcome["status"] == "built" for outcome in mine)
        yield _row(f"{name} variants that are built", f"{len(mine)}", f"{done}", done == len(mine))
    loadable = [outcome for outcome in built if outcome["status"] == "built" and outcome["backend"] in LOADABLE]
    loads = sum(outcome.get("load") in ("loaded", "resolved") for outcome in loadable)
    yield _row("built packages for CUDA and CPU that load", f"{len(loadable)}", f"{loads}", loads == len(loadable))
    if "tests" in results:
        tests = results["tests"]["projects"]
        whole = sum(not _failed(outcome) for outcome in tests.values())
        explained = sum(_failed(outcome) and name in notes.get("tests", {}) for name, outcome in tests.items())
        measured = f"{whole + explained} of {len(tests)} tried; {whole} pass as a whole"
        met = whole + explained >= 10
        yield _row("projects whose own tests run on a GPU, every failure explained", "at least 10", measured, met)
    if "compare" in results:
        rows = results["compare"]["rows"]
        worst = max(row["ratio"] for row in rows)
        of = sorted({row["project"] for row in rows})
        yield _row(
            f"device time as a ratio of `torch.utils.cpp_extension`'s: {', '.join(COMPARED)}",
            f"at most {RATIO:g}",
            f"{worst:.3f} for {', '.join(of)}",
            worst <= RATIO and of == sorted(COMPARED),
        )


def _row(what: str, target: str, measured: str, met: bool) -> str:
    return f"| {what} | {target} | {measured} | {'met' if met else 'missed'} |"


def _kind(outcome: Mapping[str, Any]) -> str:
    return str(outcome["backend"]) if outcome["compiled"] else "noarch"


def _projects(results: Mapping[str, Any], notes: Mapping[str, Any]) -> Iterator[str]:
    yield "| project | variant | files compiled | CPU time | size | loads | |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, entry in sorted(results["projects"].items()):
        note = notes.get("build", {}).get(name, "")
        if not entry["variants"]:
            yield f"| {name} | none | | | | | {note or entry['reason'] or _not_ours(entry)} |"
        for variant, outcome in sorted(entry["variants"].items()):
            if outcome["status"] != "built":
                reason = note or _cell(outcome["reason"])
                yield f"| {name} | {variant} | | {_seconds(outcome)} | | | not built: {reason} |"
                continue
            size = f"{outcome['bytes'] / 1024:.0f} KiB"
            load, why = _load(outcome, note)
            yield f"| {name} | {variant} | {outcome['compiles']} | {_seconds(outcome)} | {size} | {load} | {why} |"


def _outside(outside: Mapping[str, Any], notes: Mapping[str, Any]) -> Iterator[str]:
    """Yield the projects and the setup.py of other repositories, one row for each repository."""
    repositories = outside["repositories"]
    projects = [project for entry in repositories.values() for project in entry["projects"].values()]
    ported = [port for entry in repositories.values() for port in entry["ported"].values()]
    variants = [outcome for project in projects for outcome in project.get("variants", {}).values()]
    built = [outcome for outcome in variants if outcome["status"] == "built"]
    counts = {status: _count(projects, status) for status in ("accepted", "updated")}
    tried, of_cpu = len(projects), [outcome for outcome in built if outcome["backend"] == "cpu"]
    loaded = sum(outcome["load"] == "loaded" for outcome in of_cpu)
    taken, after = _count(ported, "accepted"), sum(counts.values())
    yield "## Projects from outside\n"
    yield (
        "Other repositories, each at its newest commit. *Accepted*: `check-config` takes the project as it is; "
        "*updated*: after\n`update-build --license`. Variants for the CPU and of Python alone are built, and loaded "
        "where this machine can.\n`port` reads every `setup.py` with an extension, and `check-config` what it writes.\n"
    )
    yield "    .venv/bin/python benchmarks/community.py outside OWNER/NAME=DIR... --backend cpu --torch 2.13\n"
    yield f"Builder at {outside['builder']}; {_machine(outside['machine'])}\n"
    yield "| figure | target | measured | |"
    yield "| --- | --- | --- | --- |"
    yield _row("projects that are tried", "at least 60", f"{tried}", tried >= 60)
    as_is = f"{counts['accepted']} as they are, {after} after `update-build`"
    yield _row("projects that are accepted", f"{tried}", as_is, after == tried)
    yield _row("variants that are built", f"{len(variants)}", f"{len(built)}", len(built) == len(variants))
    yield _row("built packages for the CPU that load", f"{len(of_cpu)}", f"{loaded}", loaded == len(of_cpu))
    yield _row("`setup.py` that `port` understands", f"{len(ported)}", f"{taken}", taken == len(ported))
    yield f"\n{notes['port']['compared']}"
    yield "\n| repository | commit | projects | accepted | updated | built | loaded | `setup.py` | |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, entry in sorted(repositories.items()):
        if entry["projects"] or entry["ported"]:
            yield _repository(name, entry, notes.get("outside", {}))


def _count(outcomes: Iterable[Mapping[str, Any]], status: str) -> int:
    return sum(outcome["status"] == status for outcome in outcomes)


def _repository(name: str, entry: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    projects, ported = entry["projects"].values(), entry["ported"].values()
    variants = [outcome for project in projects for outcome in project.get("variants", {}).values()]
    loaded = sum(outcome.get("load") == "loaded" for outcome in variants)
    cells = [
        name,
        entry["commit"],
        *(str(len(projects)), str(_count(projects, "accepted")), str(_count(projects, "updated"))),
        *(f"{_count(variants, 'built')} of {len(variants)}", str(loaded)),
        f"{_count(ported, 'accepted')} of {len(ported)}" if ported else "",
        notes.get(name) or "; ".join(dict.fromkeys(_refusals(entry))),
    ]
    return f"| {' | '.join(cells)} |"


def _refusals(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is refused or not built in a repository."""
    for path, outcome in (*entry["projects"].items(), *entry["ported"].items()):
        if "reason" in outcome:
            yield f"{path}: {_cell(outcome['reason'])}"
        for variant, built in outcome.get("variants", {}).items():
            if built["status"] != "built":
                yield f"{path} {variant}: {_cell(built['reason'])}"


def _load(outcome: Mapping[str, Any], note: str) -> tuple[str, str]:
    """Return the cell that says whether a package loads, and the reason if it does not."""
    if outcome["backend"] not in LOADABLE:
        return "-", ""
    load = {"loaded": "yes", "resolved": "symbols"}.get(outcome.get("load", ""))
    return (load, "") if load else ("no", note or _cell(outcome.get("load", "not tried")))


def _not_ours(entry: Mapping[str, Any]) -> str:
    return f"for {', '.join(entry['backends'])} only, which this builder does not build"


def _seconds(outcome: Mapping[str, Any]) -> str:
    return f"{outcome['cpu-seconds']:.0f} s"


def _cell(text: str) -> str:
    """Return a text as one cell of a table."""
    return text.partition("\n")[0].replace("|", "\\|")[:160]


def _failed(outcome: Mapping[str, Any]) -> bool:
    counts = outcome["counts"]
    return not counts.get("passed") or bool(counts.get("failure") or counts.get("error"))


def _tests(tests: Mapping[str, Any], notes: Mapping[str, Any]) -> Iterator[str]:
    yield f"## The projects' own tests\n\nWith Torch {tests['torch']}.\n"
    yield "| project | variant | passed | failed | skipped | |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, outcome in sorted(tests["projects"].items()):
        counts = outcome["counts"]
        failed = counts.get("failure", 0) + counts.get("error", 0)
        note = notes.get("tests", {}).get(name, "")
        row = (name, outcome["variant"], counts.get("passed", 0), failed, counts.get("skipped", 0), note)
        yield "| " + " | ".join(map(str, row)) + " |"


def _comparison(compare: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "## Beside `torch.utils.cpp_extension`\n\nDevice time of binaries of the same sources, with a cold L2 cache, "
        f"measured in turn on an {compare['device']}.\n"
    )
    yield "| op | device time | ratio |"
    yield "| --- | --- | --- |"
    for row in compare["rows"]:
        yield f"| {row['project']}: {row['case']} | {row['microseconds']:.1f} us | {row['ratio']:.3f} |"
