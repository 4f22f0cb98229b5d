"""The web pages: the list of kernels, and for each kernel its variants, its card and the line that loads it.

The pages need no JavaScript. Repositories are untrusted: the card's HTML is sanitized, images come from this Hub only,
and no script runs.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any
from urllib.parse import quote, urlencode, urlsplit

import nh3
import pyromark
from fastapi import APIRouter, Path, Request
from jinja2 import Environment, PackageLoader, select_autoescape
from starlette.responses import HTMLResponse, RedirectResponse, Response

from kernel_format import variant as variants
from kernel_format.errors import VariantError
from kernel_format.metadata import PackageMetadata
from kernel_format.variant import Noarch, StableAbi, TvmFfiAbi
from kernel_hub.git.objects import TreeEntry
from kernel_hub.git.repository import GitRepository
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import Refusal, no_token
from kernel_hub.repositories.reader import card_source, version_branches
from kernel_hub.routes.parameters import RepoId, TheCaller, TheHub, base_url, timestamp

router = APIRouter(include_in_schema=False)

METADATA_BYTES = 1 << 20
SHOWN_COMMITS = 10
SHOWN_CHANGES = 1000
SHOWN_FILES = 20_000  # of all builds: 0.2 s
# The most HTML of a card: a few bytes of tables and quotes give long HTML.
CARD_HTML_CHARACTERS = 128 << 10
_MARKDOWN = pyromark.Options.ENABLE_TABLES | pyromark.Options.ENABLE_STRIKETHROUGH
PAGE = 50

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src 'self'; base-uri 'none'; form-action 'self'"

_templates = Environment(
    loader=PackageLoader("kernel_hub"),
    autoescape=select_autoescape(),
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True)
class VariantRow:
    """A variant in the table of a kernel's page."""

    name: str
    torch: str
    backend: str
    platform: str
    capabilities: str
    size: int
    dirty: bool


@router.get("/")
def front_page(request: Request, hub: TheHub, caller: TheCaller, search: str = "", after: str = "") -> Response:
    """List the kernels that the caller may see."""
    kernels = hub.index.page(caller.seen(), search=search, after=after, count=PAGE + 1)
    return _page(
        request,
        "kernels.html",
        kernels=[(item, item.versions.split(), timestamp(item.changed)[:10]) for item in kernels[:PAGE]],
        search=search,
        after=after,
        more=urlencode({"search": search, "after": kernels[PAGE - 1].repo_id}) if len(kernels) > PAGE else "",
        trusted=hub.settings.trusted,
        endpoint=base_url(request),
    )


@router.get("/login")
def login(caller: TheCaller) -> Response:
    """Make the browser ask for a token, as the password of any user name."""
    if not caller.name:
        refusal = no_token("enter a token of this Hub as the password, with any user name")
        refusal.headers = {"WWW-Authenticate": 'Basic realm="Hub", charset="UTF-8"'}
        raise refusal
    return RedirectResponse("/", status_code=303)


@router.get("/kernels/{organization}/{name}")
def kernel_page(request: Request, repo_id: RepoId, hub: TheHub, caller: TheCaller, version: str = "") -> Response:
    """Show one kernel."""
    repository = hub.to_read(repo_id, caller)
    versions = version_branches(repository)
    branch = version if version in versions else (versions[-1] if versions else "main")
    commit = repository.refs.resolve(branch)
    main = repository.refs.resolve("main")
    return _page(
        request,
        "kernel.html",
        repo_id=repo_id,
        name=repo_id.partition("/")[2],
        private=repository.private,
        trusted=repo_id.partition("/")[0] in hub.settings.trusted,
        endpoint=base_url(request),
        versions=versions,
        branch=branch,
        version=branch.removeprefix("v") if branch in versions else None,
        commit=commit,
        changed=timestamp(repository.history.last_modified(commit))[:10],
        summary=_summary(hub, repo_id),
        variants=_variants(repository, commit),
        most_files=SHOWN_FILES,
        card=_card(repository, commit, main, branch),
        history=[
            (item.oid, item.title, timestamp(item.time)[:10])
            for item in repository.history.commits(commit, count=SHOWN_COMMITS)
        ],
    )


@router.get("/kernels/{organization}/{name}/commit/{commit}")
def commit_page(request: Request, repo_id: RepoId, commit: str, hub: TheHub, caller: TheCaller) -> Response:
    """Show one commit: its author, its message and the changed files."""
    repository = hub.to_read(repo_id, caller)
    commit = repository.refs.resolve(commit)
    changes, total = repository.history.changed_files(commit, count=SHOWN_CHANGES)
    return _page(
        request,
        "changes.html",
        repo_id=repo_id,
        commit=repository.history.commits(commit, count=1)[0],
        changes=changes,
        more=total - SHOWN_CHANGES,
    )


@router.get("/kernels/{organization}/{name}/discussions/{number}")
def pull_request_page(
    request: Request, repo_id: RepoId, number: Annotated[int, Path(ge=1, lt=2**31)], hub: TheHub, caller: TheCaller
) -> Response:
    """Show one pull request: the changed files, and the command that merges it."""
    repository = hub.to_read(repo_id, caller)
    pull_request = repository.commits.pull_request(number)
    base = None if pull_request.merged else repository.refs.resolve(pull_request.base)
    changes, total = repository.history.changed_files(pull_request.head, base, count=SHOWN_CHANGES)
    return _page(
        request,
        "changes.html",
        repo_id=repo_id,
        pull_request=pull_request,
        commit=repository.history.commits(pull_request.head, count=1)[0],
        changes=changes,
        more=total - SHOWN_CHANGES,
        endpoint=base_url(request),
    )


def refusal_page(request: Request, refusal: Refusal) -> Response:
    """Render a refusal as a web page."""
    page = _page(request, "refusal.html", status=refusal.status_code, message=refusal.message)
    page.status_code = refusal.status_code
    page.headers.update(refusal.headers or {})
    return page


def _page(request: Request, template: str, **values: Any) -> HTMLResponse:
    text = _templates.get_template(template).render(**values)
    return HTMLResponse(
        text,
        headers={
            "Cache-Control": "private, no-cache",
            "Content-Security-Policy": _POLICY,
            "Referrer-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        },
    )


@lru_cache(maxsize=32)
def _clean_html(source: str, base: str) -> str:
    """Render a card as sanitized HTML, with relative addresses resolved against `base`."""
    html = pyromark.html(source, options=_MARKDOWN)
    if len(html) > CARD_HTML_CHARACTERS:
        return f'<p>The <a href="{base}README.md">card</a> is too large to show here.</p>'
    return nh3.clean(
        html,
        link_rel="noopener noreferrer nofollow",
        attribute_filter=lambda tag, attribute, value: _resolved(attribute, value, base),
    )


def _card(repository: GitRepository, commit: str, main: str, branch: str) -> str:
    """Return the card as sanitized HTML."""
    source, revision = card_source(repository, main), "main"
    if not source:
        source, revision = card_source(repository, commit), branch
    base = f"/kernels/{repository.repo_id}/resolve/{quote(revision, safe='')}/"
    return _clean_html(source, base)


def _resolved(attribute: str, value: str, base: str) -> str:
    """Return an attribute of a card's HTML with its address resolved; "" for images from elsewhere."""
    if attribute not in {"href", "src"}:
        return value
    try:
        relative = _is_relative(value)
    except ValueError:  # such as //[x
        return ""
    if relative:
        return _inside(value, base)
    return value if attribute == "href" else ""


def _is_relative(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.path) and not parts.scheme and not parts.netloc and not address.startswith("/")


def _inside(address: str, base: str) -> str:
    """Return the address of a file of the repository. `..` does not lead out of the repository's root."""
    return base + posixpath.normpath(f"/{address}").lstrip("/")


def _summary(hub: Hub, repo_id: str) -> str:
    """Return the first paragraph of a kernel's card, as in lists."""
    indexed = hub.index.find(repo_id)
    return indexed.summary if indexed else ""


def _variants(repository: GitRepository, commit: str) -> list[VariantRow] | None:
    """Return the variants of a revision, or None if they have more files than a page shows."""
    if repository.trees.find(commit, "build") is None:
        return []
    listed = repository.trees.entries(commit, "build", recursive=True, count=SHOWN_FILES + 1)
    if len(listed) > SHOWN_FILES:
        return None
    sizes: dict[str, int] = {}
    described: dict[str, TreeEntry] = {}
    for entry in listed:
        parts = entry.path.split("/")
        if entry.is_folder or len(parts) < 3:
            continue
        sizes[parts[1]] = sizes.get(parts[1], 0) + entry.content_size
        if parts[2:] == ["metadata.json"] and not entry.large and entry.size <= METADATA_BYTES:
            described[parts[1]] = entry
    return [
        _variant_row(name, size, _metadata(repository, described.get(name))) for name, size in sorted(sizes.items())
    ]


def _metadata(repository: GitRepository, entry: TreeEntry | None) -> PackageMetadata:
    try:
        return PackageMetadata.from_json(repository.trees.read(entry)) if entry else PackageMetadata()
    except ValueError:
        return PackageMetadata()


def _variant_row(name: str, size: int, metadata: PackageMetadata) -> VariantRow:
    capabilities, dirty = ", ".join(metadata.archs), metadata.is_dirty
    try:
        variant = variants.parse(name)
    except VariantError:
        return VariantRow(name, "see the name", "see the name", "see the name", capabilities, size, dirty)
    framework = variant.framework
    if isinstance(framework, Noarch):
        torch = "any"
    elif isinstance(framework, TvmFfiAbi):
        torch = f"none, TVM FFI {framework.release}"
    else:
        torch = f"{framework.release} and later" if isinstance(framework, StableAbi) else str(framework.release)
    if variant.release:
        backend = f"{variant.backend.title} {variant.release} to {variant.release.major}.x"
    else:
        backend = {"cpu": "CPU", "cuda": "CUDA, any"}.get(variant.backend.name, variant.backend.name)
    return VariantRow(name, torch, backend, variant.platform or "any", capabilities, size, dirty)
