"""The card of a published kernel: the project's `CARD.md`, followed by sections generated from the packages.

Equal projects, packages and branches give equal cards, to the byte.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_builder.config.ownership import in_text
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import excluded
from kernel_builder.config.variant import Noarch, StableAbi, TvmFfiAbi, Variant
from kernel_builder.hub.package_api import Api
from kernel_builder.hub.packages import HubPackage
from kernel_format import front_matter
from kernel_format.errors import ConfigError

_NONE, _TORCH = "none", "Torch"


def render(
    project: Project, repo_id: str, packages: Mapping[str, HubPackage], api: Api, note: str | None = None
) -> str:
    """Return the text of the published `README.md`.

    Args:
        packages: Every package on the branch of the builds, by variant.
        api: The API with its documentation.
        note: A sentence of the publisher, such as how the packages were tested.
    """
    front, body = _source_card(project)
    front.setdefault("library_name", "kernels")
    front.setdefault("license", project.license)
    front["tags"] = list(dict.fromkeys([*(front.get("tags") or []), "kernel"]))
    load = f'{project.python_name} = get_kernel("{repo_id}", version={project.version})'
    usage = f"## Use\n\n```python\nfrom kernels import get_kernel\n\n{load}\n```"
    parts = [
        body,
        front_matter.GENERATED,  # so that a published card can be published again
        *([] if "get_kernel(" in body else [usage]),
        _api(api),
        _variants(packages),
        _build(project, repo_id, packages, note),
    ]
    return front_matter.join(front, "\n\n".join(parts)) + "\n"


def source_text(project: Project) -> str:
    """Return the author's text about a kernel, without front matter."""
    return _source_card(project)[1] + "\n"


def _source_card(project: Project) -> tuple[dict[str, Any], str]:
    """Return the front matter and the text of `CARD.md`, or else of `README.md`, without generated sections."""
    files = [project.root / name for name in ("CARD.md", "README.md") if (project.root / name).is_file()]
    if files and excluded(Path(os.path.realpath(project.root)), files[:1]):
        raise ConfigError(
            "git excludes the card or the target of its symbolic link, or does not track the target",
            where=str(files[0]),
            hint="copy the target into the project, or take it out of .gitignore",
        )
    text = in_text(project, files[0].read_text(encoding="utf-8")) if files else f"# {project.name}\n"
    front, body = front_matter.split(text)
    try:
        values = front_matter.parse(front) if front and front.strip() else {}
    except ValueError as error:
        raise ConfigError(
            f"the front matter {str(error).splitlines()[0]}",
            where=str(files[0]),
            hint="expected YAML between two lines of `---`",
        ) from error
    own, _, _ = body.partition(front_matter.GENERATED)
    return {key: value for key, value in values.items() if value is not None}, own.strip()


def _api(api: Api) -> str:
    lines = ["## API"]
    for name, member in sorted(api.members.items()):
        if member.kind == "function":
            shown = member.signature
        elif member.kind in ("class", "module"):
            shown = f"{member.kind} {name}"
        else:
            continue
        lines.append(f"\n```python\n{shown}\n```")
        summary, _, details = member.documentation.partition("\n\n")
        lines += [f"\n{summary}"] * bool(summary) + [f"\n````text\n{details}\n````"] * bool(details)
    if api.ops:
        schemas = "\n".join(schema for _, schema in sorted(api.ops.items()))
        lines.append(f"\nOperators in the namespace `torch.ops.<id of the variant>`:\n\n```\n{schemas}\n```")
    return "\n".join(lines)


def _variants(packages: Mapping[str, HubPackage]) -> str:
    titles = sorted({title for name in packages for title in requirements(name)} - {_TORCH})
    rows = [["variant", _TORCH, *titles, "capabilities", "size"]]
    for name, package in sorted(packages.items()):
        archs = ", ".join(package.metadata.archs) or _NONE
        needs = requirements(name)
        releases = [needs.get(title, _NONE if needs else "not known") for title in (_TORCH, *titles)]
        rows.append([f"`{name}`", *releases, archs, f"{package.size / 1024:.0f} KiB"])
    # Without capabilities, the table has no column for them.
    columns = [column for column in zip(*rows, strict=True) if set(column[1:]) != {_NONE}]
    table = [" | ".join(row) for row in zip(*columns, strict=True)]
    table.insert(1, " | ".join("---" for _ in columns))
    lines = [f"| {row} |" for row in table]
    by_status: dict[str, list[str]] = {}
    for name, package in sorted(packages.items()):
        if status := package.metadata.status:
            by_status.setdefault(status, []).append(name)
    for status, names in by_status.items():
        lines += ["", f"{status[0].upper()}{status[1:]}: {_list(names)}."]
    return "## Variants\n\n" + "\n".join(lines)


def requirements(name: str) -> dict[str, str]:
    """Return the versions of Torch and of the back end that a variant needs; empty for an unknown variant."""
    if (variant := Variant.find(name)) is None:
        return {}
    backend = variant.backend
    framework = variant.framework
    needs = {_TORCH: "any"}
    if isinstance(framework, TvmFfiAbi):
        needs = {"TVM FFI": str(framework.release)}
    elif not isinstance(framework, Noarch):
        needs[_TORCH] = f"{framework.release} and later" if isinstance(framework, StableAbi) else str(framework.release)
    if backend.compiles and backend.prefix:
        needs[backend.title] = backend.runs_with(variant.release) if variant.release else "any"
    return needs


def _build(project: Project, repo_id: str, packages: Mapping[str, HubPackage], note: str | None) -> str:
    builds: dict[tuple[str, ...], list[str]] = {}
    for name, package in sorted(packages.items()):
        sources, builder = package.provenance["kernel"], package.provenance["kernel-builder"]
        origin = _commit(sources) or _NONE, _commit(builder) or builder.get("version") or _NONE
        builds.setdefault(origin, []).append(name)
    links = [*(("Upstream", url) for url in project.upstream), ("Source", project.source)]
    lines = [
        f"## Build\n\nLicense: {project.license}.",
        *(f"{label}: <{address}>." for label, address in links if address),
        "",
        "| variants | sources | builder |",
        "| --- | --- | --- |",
        *(f"| {_list(names)} | {' | '.join(origin)} |" for origin, names in builds.items()),
    ]
    metadata = {name: package.metadata for name, package in sorted(packages.items())}
    unknown = [name for name, about in metadata.items() if not about.has_commit]
    remarks = {
        "The sources or the builder had uncommitted changes": [n for n, about in metadata.items() if about.is_dirty],
        "These cannot be verified, because no commit has their sources": unknown,
        "Findings of these checks were allowed when the packages were built": sorted(
            {name for about in metadata.values() for name in about.allowed_checks}
        ),
    }
    lines += [f"\n{text}: {_list(names)}." for text, names in remarks.items() if names]
    if note and (sentence := " ".join(note.split())):
        lines.append(f"\n{sentence if sentence.endswith(('.', '!', '?')) else f'{sentence}.'}")
    if len(unknown) < len(packages):
        lines.append("\nThe same sources, builder and compiler give the same files, byte for byte. To rebuild:\n\n```")
        lines += [f"git clone {project.source} {project.name} && cd {project.name}"] * bool(project.source)
        lines.append(f"kernel-builder verify {repo_id}@v{project.version} --source .\n```")
    return "\n".join(lines)


def _commit(state: Mapping[str, Any]) -> str:
    if not state.get("commit"):
        return ""
    return f"`{state['commit'][:12]}`" + (" with changes" if state.get("dirty") else "")


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
