"""`kernel-builder hub check` and `hub gc`, which work on the directory of a Hub."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from kernel_format.errors import ConfigError, HubError

ROOT = click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("hub"),
    show_default=True,
    help="The directory of the Hub.",
)
LARGE_FILES = click.option(
    "--large-files",
    metavar="URL",
    help="The store of large files: a directory, or a URL that fsspec supports, e.g. s3://bucket/prefix.  "
    "[default: ROOT/large]",
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def require_root(root: Path) -> None:
    """Raise an error unless a Hub has been served from a directory."""
    if not (root / "repositories").is_dir():
        raise ConfigError(
            "this directory is not a Hub", where=str(root), hint="`kernel-builder hub serve --root ROOT` creates one"
        )


@click.command()
@ROOT
@LARGE_FILES
@click.option("--digests", is_flag=True, help="Read every large file and compare its SHA-256 with its name.")
@click.option("--dry-run", is_flag=True, help="Only print what would be mended.")
@AS_JSON
def check(root: Path, large_files: str | None, digests: bool, dry_run: bool, as_json: bool) -> None:
    """Mend the traces of crashes, and report damage.

    Servers of ROOT may run meanwhile. The exit code is 0 if everything found was mended, else 9.

    \b
    kernel-builder hub check --root hub --dry-run
    kernel-builder hub check --root hub --digests
    """
    from kernel_hub.hub_service import Hub
    from kernel_hub.mend import find_defects
    from kernel_hub.settings import Settings

    require_root(root)
    defects = []
    for defect in find_defects(Hub(Settings(root.resolve(), large_files)), digests=digests, mend=not dry_run):
        defects.append(defect)
        if not as_json:
            click.echo(f"{defect.where}: {defect.what}", nl=False)
            click.secho("  (mended)" if defect.mended else "", fg="green")
    if as_json:
        click.echo(json.dumps([asdict(defect) for defect in defects], indent=2))
    lost = sum(not defect.mended for defect in defects)
    if not as_json:
        click.echo(f"{len(defects)} found, {len(defects) - lost} mended")
    if lost:
        sys.exit(HubError.exit_code)


@click.command()
@ROOT
@LARGE_FILES
@click.option(
    "--unused",
    "days",
    metavar="DAYS",
    default=7.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Free only what is older. Uploads that take longer may fail, and have to be sent again.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be freed.")
@AS_JSON
def gc(root: Path, large_files: str | None, days: float, dry_run: bool, as_json: bool) -> None:
    """Free the space of what no branch, tag or pull request needs.

    These are large files and git objects of deleted branches and repositories, of uploads without a commit, and of
    permanently deleted files. Parts of Xet uploads are freed after four weeks. Servers of ROOT may run meanwhile.

    \b
    kernel-builder hub gc --root hub --dry-run
    kernel-builder hub gc --root hub --unused 30
    """
    from kernel_hub.hub_service import Hub
    from kernel_hub.retention import collect
    from kernel_hub.settings import Settings

    require_root(root)
    hub = Hub(Settings(root.resolve(), large_files))
    freed = []
    for item in collect(hub, unused_seconds=days * 86400, dry_run=dry_run):
        freed.append(item)
        if not as_json:
            click.echo(f"{item.where}: {item.what}" + (f" ({item.size / 1e6:.1f} MB)" if item.size else ""))
    size = sum(item.size for item in freed)
    if as_json:
        click.echo(json.dumps({"freed": [asdict(item) for item in freed], "bytes": size}, indent=2))
    else:
        click.echo(f"{size / 1e6:.1f} MB {'would be freed' if dry_run else 'freed'}")
