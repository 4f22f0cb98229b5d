"""Finds text of `init` in a project's card and documentation, and names that its API does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kernel_builder.config.project import Project
from kernel_builder.hub import card
from kernel_builder.hub.package_api import Api
from kernel_builder.scaffold import NOT_WRITTEN, template_claims

_LOADED = re.compile(r"^ *(\w+) = get_(?:local_)?kernel\(", re.M)
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.S)


def findings(project: Project, api: Api) -> Iterator[str]:
    """Yield one line for each finding, with a hint."""
    text = card.source_text(project)
    file = "CARD.md" if (project.root / "CARD.md").is_file() else "README.md"
    for line in text.splitlines():
        if NOT_WRITTEN in line:
            yield f"{file}: {line.strip()!r} is a placeholder of `init`: replace or remove it"
    for name, claim in template_claims():
        if claim in text and name not in api.members:
            yield f"{file}: {claim!r} is text of `init`, and there is no function {name}: describe the kernel's own"
    for name, member in sorted(api.members.items()):
        if NOT_WRITTEN in member.summary:
            yield f"{name}: its documentation, {member.summary!r}, is a placeholder of `init`: replace it"
    for name in _missing(text, api):
        yield f"{file}: the kernel does not have {name}: correct or remove the name"


def _missing(text: str, api: Api) -> Iterator[str]:
    """Yield the names in the code of a card that the API lacks, as `layers.ReLU`."""
    variables = "|".join(dict.fromkeys(_LOADED.findall(text)))
    if not variables or not api.members:
        return
    names = re.findall(rf"(?<![\w./-])(?:{variables})\.([A-Za-z][\w.]*)", "\n".join(_CODE.findall(text)))
    for dotted in dict.fromkeys(name.rstrip(".") for name in names):
        parts = dotted.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            if name not in api.members:
                yield name
            if name not in api.members or api.members[name].kind != "module":
                break
