"""Adds pages to the site that docs/ does not have: the README, the package reference, tables and plots of the kernels.

MkDocs calls the functions whose names begin with `on_`.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import model_results  # noqa: E402
import pages as figures  # noqa: E402
from kernel_results import read_results  # noqa: E402

# Page of the site -> file of the repository.
INCLUDED = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security-policy.md": "SECURITY.md",
}
_EXTERNAL = re.compile(r"[a-z]+:|#|/")
_PLOT = re.compile(r"<!-- plot: (.+?) (\S+) -->")
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the reference to the navigation."""
    assert config.nav is not None
    pages = [{title: name} for name, (title, _) in _reference().items()]
    config.nav.append({"Reference": pages})
    return config


def on_pre_build(config: MkDocsConfig) -> None:
    """Check the links of Markdown files that are not pages of the site, such as the kernels' cards."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "*.md"], check=True, capture_output=True, text=True).stdout
    others = {name for name in listed.splitlines() if not name.startswith("docs/")} - set(INCLUDED.values())
    broken = [
        f"{name} links to {link}, which does not exist"
        for name in sorted(others)
        for _, link in _LINK.findall((ROOT / name).read_text(encoding="utf-8"))
        if not _EXTERNAL.match(link) and not (ROOT / name).parent.joinpath(link.partition("#")[0]).exists()
    ]
    if broken:
        raise PluginError("\n".join(broken))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and plots that are not in docs/."""
    for page, source in INCLUDED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for page, (_, text) in _reference().items():
        files.append(File.generated(config, page, content=text))
    plots = {result.plot_name: result.draw() for result in read_results()}
    plots["models/models.h200.svg"] = model_results.draw_models(figures.results("models-h200"))
    plots["models/generate.h200.svg"] = model_results.draw_generate(figures.results("generate.h200"))
    for name, content in plots.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in figures. Replace links that leave docs/ by links to another page, or to the file in the repository."""
    path = page.file.src_uri
    markdown = _with_figures(path, markdown)
    source = INCLUDED.get(path, f"docs/{path}")

    def rewritten(match: re.Match[str]) -> str:
        label, link = match[1], match[2]
        if _EXTERNAL.match(link):
            return match[0]
        target, hash_, anchor = link.partition("#")
        in_repository = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        pages = {included: page for page, included in INCLUDED.items()}
        if in_repository in pages or in_repository.startswith("docs/"):
            to = pages.get(in_repository, in_repository.removeprefix("docs/"))
            return f"{label}({posixpath.relpath(to, posixpath.dirname(path) or '.')}{hash_}{anchor})"
        if not (ROOT / in_repository).exists():
            raise PluginError(f"{source} links to {link}, which does not exist")
        repository = config.repo_url
        return f"{label}({repository}/blob/HEAD/{in_repository})" if repository else label[1:-1]

    return _LINK.sub(rewritten, markdown)


def _with_figures(path: str, markdown: str) -> str:
    """Return a page with the tables and plots that the repository does not have."""
    if path == "kernels.md":
        markdown += figures.render("docs/kernels.md")[figures.SITE]
    return _PLOT.sub(r"![\1](\2)", markdown)


def _reference() -> dict[str, tuple[str, str]]:
    """Return page -> its title and text: one page for the command line, and one for each directory of the packages."""
    pages = {"reference/cli.md": ("Command line", _command_line())}
    for package in (ROOT / "kernel_builder", *sorted(ROOT.glob("packages/*/kernel_*"))):
        for directory in sorted(path.parent for path in package.rglob("__init__.py")):
            name = ".".join(directory.relative_to(package.parent).parts)
            if name.startswith(("kernel_builder.cli", "kernel_builder.templates", "kernel_judge.cli")):
                continue
            modules = sorted(path.stem for path in directory.glob("*.py") if not path.stem.startswith("__"))
            parts = [f"# {name}", f"::: {name}\n    options:\n      heading_level: 2\n      members: []"]
            parts += [f"::: {name}.{module}" for module in modules]
            pages[f"reference/{name.replace('.', '/')}.md"] = (name, "\n\n".join(parts) + "\n")
    return pages


def _command_line() -> str:
    options = {"module": "kernel_builder.cli", "command": "main", "prog_name": "kernel-builder", "depth": 1}
    return "\n".join(["# Command line", "", "::: mkdocs-click", *(f"    :{k}: {v}" for k, v in options.items())]) + "\n"
