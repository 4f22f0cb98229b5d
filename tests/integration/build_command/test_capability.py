"""`build --capability` compiles device code for some capabilities only, and such packages are not published."""

from __future__ import annotations

import json

from tests.integration.build_command.conftest import Copy, NewCache, Run, assert_refused, replace
from tests.support.places import CUDA


def test_packages_of_one_capability_are_for_local_use(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run
) -> None:
    project, cache = copy_project("stable-scale"), new_cache("cache")
    replace(project / "build.toml", '["9.0"]', '["8.0", "9.0a"]')
    done = kernel_builder(cache, "build", project, "--variant", CUDA, "--capability", "9.0", "--no-load")
    assert done.code == 0, done
    metadata = json.loads((project / "build" / CUDA / "metadata.json").read_text())
    assert metadata["backend"]["archs"] == ["9.0a"]
    assert metadata["provenance"]["capabilities-limited"] == ["9.0"]

    upload = kernel_builder(cache, "upload", project, "--repo-id", "org/stable-scale", "--dry-run")
    assert_refused(
        upload, 6, "PackageError", where=CUDA, message="built with --capability 9.0", hint="without --capability"
    )
    wrong = kernel_builder(cache, "build", project, "--capability", "9.0a")
    assert_refused(wrong, 2, "ConfigError", where="--capability", message="'9.0a' is not", hint="9.0 selects 9.0a")
