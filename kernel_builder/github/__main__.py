"""The steps of the workflows in `.github/` that no command of `kernel-builder` provides.

    python -m kernel_builder.github base            prints the commit to compare with; an empty line: build everything
    python -m kernel_builder.github table DIR       prints the results of builds as Markdown
    python -m kernel_builder.github comment DIR     writes that table to the pull request of the finished workflow run

Each file in DIR is the output of `kernel-builder build --json` in one job. The commands also read the variables and
the event file that GitHub provides to every job; `base` and `comment` need $GITHUB_TOKEN.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from kernel_builder.checkouts import git_output
from kernel_builder.github.build_table import markdown, read_results
from kernel_builder.github.rest_api import GitHub
from kernel_format.errors import ConfigError, KernelBuilderError


def base() -> str:
    """Return the commit to compare the projects with, or an empty text if all projects are to be built.

    For a pull request this is the first parent of the merge that GitHub checks out. For a push it is the commit of the
    last successful run of the same workflow on the branch, so that the projects of a failed run are built again.
    """
    event = os.environ["GITHUB_EVENT_NAME"]
    if event == "pull_request":
        return "HEAD^1"
    if event != "push":
        return ""
    workflow = os.environ["GITHUB_WORKFLOW_REF"].partition("@")[0].rpartition("/")[2]
    commit = GitHub.of_this_job().last_success(workflow, os.environ["GITHUB_REF_NAME"])
    if not commit:
        return ""
    # After a forced push that removed the commit, its packages may be on no branch.
    known = git_output(Path.cwd(), "merge-base", "--is-ancestor", commit, "HEAD")
    return "" if known is None else commit


def comment(directory: Path) -> str:
    """Write the results in `directory` to the pull request of the workflow run that this job follows.

    The pull request comes from GitHub's data about the run. The content of `directory` is not trusted.
    """
    run = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text())["workflow_run"]
    github = GitHub.of_this_job()
    owner = (run["head_repository"] or {}).get("owner", {}).get("login", "")
    number = github.pull_request(owner, run["head_branch"], run["head_sha"])
    if number is None:
        return f"no open pull request is at {run['head_sha']}; no comment is written"
    text = f"Commit {run['head_sha']}, [build log]({run['html_url']}): {run['conclusion']}.\n\n"
    return github.comment(number, text + markdown(read_results(directory)))


def main(arguments: list[str]) -> None:
    match arguments:
        case ["base"]:
            print(base())
        case ["table", directory]:
            print(markdown(read_results(Path(directory))), end="")
        case ["comment", directory]:
            print(comment(Path(directory)))
        case _:
            raise ConfigError("expected `base`, `table DIR` or `comment DIR`", where=" ".join(arguments))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KernelBuilderError as error:
        print(f"error: {error}" + (f"\n  hint: {error.hint}" if error.hint else ""), file=sys.stderr)
        sys.exit(error.exit_code)
