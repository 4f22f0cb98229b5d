"""The web pages: lists of kernels, and for each kernel its card, its variants, its files and the line that loads it.

The pages need no JavaScript. Repositories are untrusted: the card's HTML is sanitized, images come from this Hub only,
and no script runs.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import nh3
import pyromark
from fastapi import APIRouter, Request
from jinja2 import Environment, PackageLoader, select_autoescape
from starlette.responses import HTMLResponse, RedirectResponse, Response

from kernel_format import front_matter
from kernel_format import variant as variants
from kernel_format.errors import VariantError
from kernel_format.metadata import PackageMetadata
from kernel_format.tree_digest import SIGNATURE
from kernel_format.variant import Noarch, StableAbi, TvmFfiAbi
from kernel_hub import names
from kernel_hub.git.objects import PullRequest, TreeEntry
from kernel_hub.git.repository import GitRepository
from kernel_hub.http.turns import in_turn
from kernel_hub.refusals import Refusal, no_route, no_token
from kernel_hub.repositories.reader import find_card, version_branches
from kernel_hub.routes.parameters import HubRoute, Number, RepoId, TheCaller, TheHub
from kernel_hub.routes.responses import base_url, timestamp

router = APIRouter(route_class=HubRoute, include_in_schema=False)

METADATA_BYTES = 512 << 10  # of all variants, parsed in 0.05 s
SHOWN_COMMITS = 10
SHOWN_VERSIONS = 100  # the newest
SHOWN = 1000  # entries of a list
COUNTED_FILES = 2000  # in the sizes of variants: 0.05 s, if all are as small as a pointer and each is a variant
# The most HTML of a card: a few bytes of tables and quotes give long HTML.
CARD_HTML_CHARACTERS = 128 << 10
# Generated sections of a card, of which the page has its own.
_SHOWN_ABOVE = re.compile(r"^## (Use|Variants)\n.*?(?=^## |\Z)", re.M | re.S)
_MARKDOWN = pyromark.Options.ENABLE_TABLES | pyromark.Options.ENABLE_STRIKETHROUGH
_TAG = re.compile(rb"<!--.*?(-->|\Z)|<[^>]*>?", re.S)
PAGE = 50
_PASSWORD = 'Basic realm="Hub", charset="UTF-8"'

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src 'self'; base-uri 'none'; form-action 'self'"

_templates = Environment(
    loader=PackageLoader("kernel_hub"), autoescape=select_autoescape(), trim_blocks=True, lstrip_blocks=True
)


@router.get("/login")
def login(caller: TheCaller) -> Response:
    """Make the browser ask for a token, as the password of any user name."""
    if not caller.name:
        raise no_token("enter a token of this Hub as the password, with any user name", challenge=_PASSWORD)
    return RedirectResponse("/", status_code=303)


@router.get("/logout")
def logout() -> Response:
    """Make the browser forget the token, which it does when the Hub refuses it."""
    message = "logged out: cancel the browser's question for a password, or enter another token"
    raise no_token(message, challenge=_PASSWORD)


@router.get("/")
@router.get("/{organization}")
@in_turn
def list_page(
    request: Request, hub: TheHub, caller: TheCaller, organization: str = "", search: str = "", after: str = ""
) -> Response:
    """List the kernels that the caller may see: all, or those of an organization."""
    name = unquote(organization)
    if name:
        names.repo_id(name, "x")
        if not hub.index.count(caller.seen(), name) and name not in caller.organizations():
            raise no_route(request.method, request.url.path)
    kernels = hub.index.page(caller.seen(), search=search, organization=name, after=after, count=PAGE + 1)
    return _page(
        request,
        "kernels.html",
        kernels=[(item, item.versions.split(), timestamp(item.changed)[:10]) for item in kernels[:PAGE]],
        organization=name,
        search=search,
        after=after,
        more=urlencode({"search": search, "after": kernels[PAGE - 1].repo_id}) if len(kernels) > PAGE else "",
        trusted=hub.settings.trusted,
        endpoint=base_url(request),
    )


@router.get("/kernels/{organization}/{name}")
@in_turn
def kernel_page(request: Request, repo_id: RepoId, hub: TheHub, caller: TheCaller, version: str = "") -> Response:
    """Show one kernel."""
    repository = hub.to_read(repo_id, caller)
    versions = version_branches(repository)
    branch = version if version in versions else (versions[-1] if versions else "main")
    commit = repository.refs.resolve(branch)
    main = repository.refs.resolve("main")
    files = repository.revisions.entries(commit, recursive=True, count=COUNTED_FILES + 1)
    return _page(
        request,
        "kernel.html",
        repo_id=repo_id,
        name=repo_id.partition("/")[2],
        private=repository.private,
        trusted=repo_id.partition("/")[0] in hub.settings.trusted,
        endpoint=base_url(request),
        versions=versions[-SHOWN_VERSIONS:],
        branch=branch,
        version=branch.removeprefix("v") if branch in versions else None,
        commit=commit,
        changed=timestamp(repository.revisions.last_modified(commit))[:10],
        variants=_variants(repository, files) if len(files) <= COUNTED_FILES else None,
        most_files=COUNTED_FILES,
        files=[(entry.path, entry.content_size) for entry in files[:SHOWN] if not entry.is_folder],
        more_files=len(files) > SHOWN,
        card=_card(repository, commit, main, branch),
        history=[
            (item.oid, item.title, timestamp(item.time)[:10])
            for item in repository.revisions.commits(commit, count=SHOWN_COMMITS)
        ],
    )


@router.get("/kernels/{organization}/{name}/commit/{commit}")
@in_turn
def commit_page(request: Request, repo_id: RepoId, commit: str, hub: TheHub, caller: TheCaller) -> Response:
    """Show one commit: its author, its message and the changed files."""
    repository = hub.to_read(repo_id, caller)
    return _changes_page(request, repository, repository.refs.resolve(commit))


@router.get("/kernels/{organization}/{name}/discussions/{number}")
@in_turn
def pull_request_page(request: Request, repo_id: RepoId, number: Number, hub: TheHub, caller: TheCaller) -> Response:
    """Show one pull request: the changed files, and the command that merges it."""
    repository = hub.to_read(repo_id, caller)
    pull = repository.commits.pull_request(number)
    base = None if pull.merged else repository.refs.resolve(pull.base)
    return _changes_page(request, repository, pull.head, base, pull)


def _changes_page(
    request: Request, repository: GitRepository, commit: str, base: str | None = None, pull: PullRequest | None = None
) -> Response:
    changes = repository.revisions.changed_files(commit, base, count=SHOWN + 1)
    return _page(
        request,
        "changes.html",
        repo_id=repository.repo_id,
        pull_request=pull,
        commit=repository.revisions.commits(commit, count=1)[0],
        changes=changes[:SHOWN],
        more=len(changes) > SHOWN,
        endpoint=base_url(request),
    )


def refusal_page(request: Request, refusal: Refusal) -> Response:
    """Render a refusal as a web page."""
    page = _page(request, "refusal.html", status=refusal.status_code, message=refusal.message)
    page.status_code = refusal.status_code
    page.headers.update(refusal.headers or {})
    return page


def _page(request: Request, template: str, **values: Any) -> HTMLResponse:
    text = _templates.get_template(template).render(**values, user=getattr(request.state, "caller", ""))
    return HTMLResponse(
        text,
        headers={
            "Content-Security-Policy": _POLICY,
            "Referrer-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        },
    )


def _without_html(source: str) -> str:
    """Remove the tags and comments of raw HTML: a parser opens an unclosed `<b>` again in every later paragraph."""
    for _ in range(5):  # the remainder of a tag may be read as another
        events = pyromark.events_with_range(source, options=_MARKDOWN)
        raw = [place for event, place in events if event == {"Start": "HtmlBlock"} or "InlineHtml" in event]
        if not raw:
            return source
        data = source.encode()
        for place in reversed(raw):
            data = data[: place["start"]] + _TAG.sub(b"", data[place["start"] : place["end"]]) + data[place["end"] :]
        source = data.decode()
    return "The [card](README.md) has HTML that is not shown here."


@lru_cache(maxsize=32)
def _clean_html(source: str, base: str) -> str:
    """Render a card as sanitized HTML, with relative addresses resolved against `base`."""
    html = pyromark.html(_without_html(source), options=_MARKDOWN)
    if len(html) > CARD_HTML_CHARACTERS:
        return f'<p>The <a href="{base}README.md">card</a> is too large to show here.</p>'
    return nh3.clean(
        html,
        link_rel="noopener noreferrer nofollow",
        attribute_filter=lambda tag, attribute, value: _resolved(attribute, value, base),
    )


def _card(repository: GitRepository, commit: str, main: str, branch: str) -> str:
    """Return the card as sanitized HTML."""
    _, source, found = find_card(repository, main, commit)
    revision = quote("main" if found == main else branch, safe="")
    base = f"/kernels/{repository.repo_id}/resolve/{revision}/"
    text, _, generated = source.partition(front_matter.GENERATED)
    return _clean_html(text + _SHOWN_ABOVE.sub("", generated), base)


def _resolved(attribute: str, value: str, base: str) -> str:
    """Return an attribute of a card's HTML with its address resolved; "" for images from elsewhere."""
    if attribute not in {"href", "src"}:
        return value
    try:
        parts = urlsplit(value)
    except ValueError:  # such as //[x
        return ""
    if parts.path and not parts.scheme and not parts.netloc and not value.startswith("/"):
        path = unquote(parts.path).replace("\\", "/")  # as browsers do; `..` does not lead out of the repository's root
        return base + parts._replace(path=quote(posixpath.normpath(f"/{path}").lstrip("/"))).geturl()
    return value if attribute == "href" else ""


def _variants(repository: GitRepository, files: Sequence[TreeEntry]) -> list[dict[str, object]]:
    """Describe the variants among the files of a revision."""
    unread = METADATA_BYTES
    rows: dict[str, dict[str, Any]] = {}
    for entry in files:
        top, name, path = [*entry.path.split("/", 2), "", ""][:3]
        if top != "build" or not path or entry.is_folder:
            continue
        row = rows.setdefault(name, {"name": name, "needs": _needs(name), "size": 0, "metadata": PackageMetadata()})
        row["size"] += entry.content_size
        row["signed"] = row.get("signed") or path == SIGNATURE
        if path == "metadata.json" and not entry.large and entry.size <= unread:
            unread -= entry.size
            with suppress(ValueError):
                row["metadata"] = PackageMetadata.from_json(repository.revisions.read(entry))
    return [rows[name] for name in sorted(rows)[:SHOWN]]


def _needs(name: str) -> list[str]:
    """Return the releases of Torch and of the back end, and the platform, that a variant needs."""
    try:
        variant = variants.parse(name)
    except VariantError:
        return ["see the name"] * 3
    framework = variant.framework
    if isinstance(framework, Noarch):
        torch = "any"
    elif isinstance(framework, TvmFfiAbi):
        torch = f"none, TVM FFI {framework.release}"
    else:
        torch = f"{framework.release} and later" if isinstance(framework, StableAbi) else str(framework.release)
    release = f" {variant.release} to {variant.release.major}.x" if variant.release else ""
    return [torch, f"{variant.backend.title}{release}", variant.platform or "any"]
