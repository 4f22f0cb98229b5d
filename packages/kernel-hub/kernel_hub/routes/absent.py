"""Words for the routes of the public Hub that this one does not have."""

from __future__ import annotations

import re

from kernel_hub.refusals import Refusal, not_supported

_KINDS = r"models|datasets|spaces"

# The first pattern that fits the path gives the reason and what to do instead.
_REASONS = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (
            r"/api/settings/webhooks(/|$)",
            "this Hub sends no webhooks: poll /api/kernels/ORG/NAME/refs, or follow its --audit-log",
        ),
        (r"/api/collections(/|$)", "this Hub has no collections: list its kernels at /api/kernels"),
        (r"/api/kernels/[^/]+/[^/]+/like$", "this Hub counts no likes"),
        (
            r"/api/kernels/[^/]+/[^/]+/discussions(/\d+)?(/(comment|title|status|pin))?$",
            "this Hub has pull requests, but no discussions: open one with create_commit(create_pr=True), and merge it "
            "with `kernel-builder hub merge`",
        ),
        (
            r"/api/kernels/[^/]+/[^/]+/user-access-request(/|$)",
            "this Hub gates no repositories: the operator gives access with `kernel-builder hub token add`",
        ),
        (
            r"/api/kernels/[^/]+/[^/]+/super-squash/",
            "this Hub does not squash a history: publish to a new branch, and delete the old one",
        ),
        (
            r"/api/kernels/[^/]+/[^/]+/duplicate$",
            "this Hub does not copy repositories: `kernel-builder hub import` publishes the kernel of another one",
        ),
        (
            rf"/api/({_KINDS}|jobs|scheduled-jobs|buckets|papers|daily_papers)(/|$)|/api/({_KINDS})-tags-by-type$",
            "this Hub holds kernels, and nothing else: pass repo_type='kernel'",
        ),
    )
)
_OTHER_REPOSITORY = re.compile(rf"/api/({_KINDS})/[^/]+/[^/]+")


def absent(method: str, path: str) -> Refusal:
    """Return the refusal of a request for which there is no route."""
    for pattern, reason in _REASONS:
        if pattern.match(path):
            # With this code the clients say that the repository does not exist: `repo_exists` answers False.
            if _OTHER_REPOSITORY.match(path):
                return Refusal(404, reason, code="RepoNotFound")
            return not_supported(reason)
    if path.startswith("/api/"):
        return not_supported(f"this Hub has no route {method} {path[:200]}; /openapi.json describes those that it has")
    return Refusal(404, f"no page {path[:200]}; / lists the kernels", code="NotFound")
