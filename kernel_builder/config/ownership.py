"""Another owner for a project: the renamed repositories, and the texts that name them.

`build.toml` names a project's repository and those of the kernels that it loads. `owned_by` returns the project as
another user or organization publishes it. Its Python files stay the same, so packages of two owners differ only in
`metadata.json`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from kernel_builder.config.project import KernelDependency, Project
from kernel_format.errors import ConfigError

VARIABLE = "KERNEL_BUILDER_OWNER"


def owned_by(project: Project, owner: str | None, repo_id: str | None = None) -> Project:
    """Return a project as another owner publishes it.

    The owner replaces that of the project's repository, and of the kernels that it loads from the same owner.

    Args:
        owner: A user or organization of the Hub. None: that of `build.toml`.
        repo_id: The exact name of the project's repository, independent of `owner`. None: the project's
            name in the owner's namespace.
    """
    if owner is not None and not re.fullmatch(r"[A-Za-z0-9][-.\w]*", owner):
        raise ConfigError(
            f"{owner!r} is not the name of a user or an organization of the Hub",
            where=f"--owner or ${VARIABLE}",
            hint="write the part of a repository's name before its slash: `my-org` for my-org/my-kernel",
        )
    declared = project.hub_repo_id
    own = declared.partition("/")[0] if declared else None
    depends = (project.kernel_depends, *project.backend_kernel_depends.values())
    names = [*([declared] if declared else []), *(depend.repo_id for table in depends for depend in table)]
    renamed = {}
    if owner and own and owner != own:
        renamed = {name: f"{owner}/{name.partition('/')[2]}" for name in names if name.partition("/")[0] == own}
    hub_repo_id = repo_id or (renamed.get(declared, declared) if declared else owner and f"{owner}/{project.name}")
    if declared and hub_repo_id and hub_repo_id != declared:
        renamed[declared] = hub_repo_id
    return replace(
        project,
        hub_repo_id=hub_repo_id,
        kernel_depends=_renamed(project.kernel_depends, renamed),
        backend_kernel_depends={
            backend: _renamed(table, renamed) for backend, table in project.backend_kernel_depends.items()
        },
        renamed=renamed,
    )


def _renamed(depends: tuple[KernelDependency, ...], names: Mapping[str, str]) -> tuple[KernelDependency, ...]:
    return tuple(replace(depend, repo_id=names.get(depend.repo_id, depend.repo_id)) for depend in depends)


def in_text(project: Project, text: str) -> str:
    """Return a text of the project, such as its card, with the names that its repositories have for its owner."""
    if not project.renamed:
        return text
    names = "|".join(sorted(map(re.escape, project.renamed), key=len, reverse=True))
    # Also in addresses, and before `@v1` and `:Layer`; not as a part of a longer name.
    return re.sub(rf"(?<![\w.-])(?:{names})(?![\w-]|\.\w)", lambda match: project.renamed[match[0]], text)
