"""Error responses for the public Hub's routes that this Hub does not have."""

from __future__ import annotations

import re

from kernel_hub.refusals import Refusal, not_supported

_OTHER_REPOSITORY = re.compile(r"/api/(models|datasets|spaces)/[^/]+/[^/]+")
_OTHER_KIND = re.compile(r"/api/(models|datasets|spaces|buckets)(/|$)")
_XET = re.compile(r"/api/kernels/[^/]+/[^/]+/xet-")


def absent(method: str, path: str) -> Refusal:
    """Return the refusal of a request for which there is no route."""
    kernels_only = "this Hub holds kernels only: pass repo_type='kernel'"
    if _OTHER_REPOSITORY.match(path):  # with this code the clients report that the repository does not exist
        return Refusal(404, kernels_only, code="RepoNotFound")
    if _OTHER_KIND.match(path):
        return not_supported(kernels_only)
    if _XET.match(path):
        return not_supported("this Hub does not support Xet: set HF_HUB_DISABLE_XET=1 to upload files above 512 MB")
    if path.startswith("/api/"):
        return not_supported(f"this Hub has no route {method} {path[:200]}; /openapi.json describes its routes")
    return Refusal(404, f"no page {path[:200]}; / lists the kernels", code="NotFound")
