"""The command `kernel-hub`, whose commands are also those of `kernel-builder hub`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from kernel_format.errors import ConfigError, HubError, KernelBuilderError, system_error
from kernel_hub import tokens
from kernel_hub.hub_service import Hub
from kernel_hub.maintenance import collect, find_defects
from kernel_hub.serve import serve as run
from kernel_hub.settings import Settings

ROOT = click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("hub"),
    show_default=True,
    help="The directory of the Hub.",
)
TOKEN_FILE = partial(
    click.option,
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The token file that `kernel-hub token add` writes.",
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


class _Main(click.Group):
    """A group that prints errors of users without a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except (KernelBuilderError, OSError) as raised:
            error = system_error(raised) if isinstance(raised, OSError) else raised
            click.echo(f"error: {error}" + (f"\n  hint: {error.hint}" if error.hint else ""), err=True)
            sys.exit(error.exit_code)


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="torch-kernel-hub")
def main() -> None:
    """Serve and maintain a private Hub for kernels."""


@main.command()
@ROOT
@click.option("--host", default="127.0.0.1", show_default=True, help="The host name or address to listen on.")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="The port; 0 chooses a free one.")
@TOKEN_FILE()
@click.option("--read-only", is_flag=True, help="Refuse every change.")
@click.option("--trust", "trusted", multiple=True, metavar="ORG", help="Kernels of ORG load without trust_remote_code.")
@click.option(
    "--quota", metavar="MB", type=click.IntRange(min=1), help="The most that the Hub stores.  [default: no limit]"
)
@click.option(
    "--audit-log", metavar="FILE", help="Append a line of JSON for every write and every denied access; '-' is stdout."
)
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON.")
def serve(
    root: Path, host: str, port: int, trusted: tuple[str, ...], quota: int | None, as_json: bool, **options: Any
) -> None:
    """Serve the Hub in ROOT until a signal ends the server.

    Without --token-file any token may write, and only this machine can connect. When the Hub listens, its address is
    printed on stdout; the log goes to stderr.

    \b
    kernel-hub serve --port 8000 --trust my-org
    kernel-hub serve --host 0.0.0.0 --port 8000 --token-file tokens.json
    """

    def ready(url: str) -> None:
        click.echo(json.dumps({"url": url, "root": str(root.resolve())}) if as_json else f"serving {root} at {url}")

    quota_bytes = None if quota is None else quota * 1_000_000
    settings = Settings(root.resolve(), trusted=frozenset(trusted), quota_bytes=quota_bytes, **options)
    run(settings, host=host, port=port, ready=ready)


def _open_hub(root: Path) -> Hub:
    if not (root / "repositories").is_dir():
        hint = "`kernel-hub serve --root ROOT` creates a Hub"
        raise ConfigError("this directory is not a Hub", where=str(root), hint=hint)
    return Hub(Settings(root.resolve()))


@main.command()
@ROOT
@click.option("--digests", is_flag=True, help="Read every large file and compare its SHA-256 with its name.")
@click.option("--dry-run", is_flag=True, help="Report without repairing.")
@AS_JSON
def check(root: Path, digests: bool, dry_run: bool, as_json: bool) -> None:
    """Repair the traces of crashes, and report damage.

    Servers of ROOT may run meanwhile. The exit code is 0 if every defect was repaired, else 9.

    \b
    kernel-hub check --root hub --dry-run
    kernel-hub check --root hub --digests
    """
    defects = []
    for defect in find_defects(_open_hub(root), digests=digests, repair=not dry_run):
        defects.append(defect)
        if not as_json:
            click.echo(f"{defect.where}: {defect.problem}" + ("  (repaired)" if defect.repaired else ""))
    remaining = sum(not defect.repaired for defect in defects)
    if as_json:
        click.echo(json.dumps([asdict(defect) for defect in defects], indent=2))
    else:
        click.echo(f"{len(defects)} found, {len(defects) - remaining} repaired")
    if remaining:
        sys.exit(HubError.exit_code)


@main.command()
@ROOT
@click.option(
    "--unused",
    "days",
    metavar="DAYS",
    default=7.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Free only older files. An upload that takes longer may fail, and has to be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Report without freeing.")
@AS_JSON
def gc(root: Path, days: float, dry_run: bool, as_json: bool) -> None:
    """Free the space of files that no branch, tag or pull request needs.

    Frees large files and git objects of deleted branches, and of uploads without a commit. Servers of ROOT may run
    meanwhile.

    \b
    kernel-hub gc --root hub --dry-run
    kernel-hub gc --root hub --unused 30
    """
    freed = []
    for item in collect(_open_hub(root), unused_seconds=days * 86400, dry_run=dry_run):
        freed.append(item)
        if not as_json:
            click.echo(f"{item.where}: {item.reason}" + (f" ({item.size / 1e6:.1f} MB)" if item.size else ""))
    size = sum(item.size for item in freed)
    if as_json:
        click.echo(json.dumps({"freed": [asdict(item) for item in freed], "bytes": size}, indent=2))
    else:
        click.echo(f"{size / 1e6:.1f} MB {'would be freed' if dry_run else 'freed'}")


@main.group()
def token() -> None:
    """Manage the tokens that may read and write. The token file has only their hashes."""


@token.command()
@click.argument("name")
@click.option(
    "--read",
    multiple=True,
    metavar="ORG[/NAME]",
    help="May read ORG's private kernels, or a single one; '*': every organization's.",
)
@click.option(
    "--write",
    multiple=True,
    metavar="ORG[/NAME]",
    help="May also publish in ORG, or in a single repository; '*': in every organization.",
)
@click.option(
    "--group",
    "groups",
    multiple=True,
    metavar="GROUP=ORG",
    help="For a proxy with single sign-on: the users of GROUP read ORG's private kernels.",
)
@click.option("--expires", metavar="DAY|DAYSd", help="The end of the token: 2030-01-31, or 90d.  [default: never]")
@TOKEN_FILE(required=True)
def add(name: str, expires: str | None, token_file: Path, **scopes: tuple[str, ...]) -> None:
    """Create a token and print it.

    It cannot be shown again: the token file has only its hash.

    \b
    kernel-hub token add ci --write my-org --token-file tokens.json
    kernel-hub token add ci --write my-org/my-kernel --expires 90d --token-file tokens.json
    """
    end = tokens.parse_end(expires) if expires else None
    click.echo(tokens.add(token_file, name, expires=end, **scopes))


@token.command()
@click.argument("name")
@TOKEN_FILE(required=True)
def remove(name: str, token_file: Path) -> None:
    """Remove a token; running servers refuse it from then on."""
    tokens.remove(token_file, name)


@token.command("list")
@TOKEN_FILE(required=True)
def list_tokens(token_file: Path) -> None:
    """List the tokens, their scopes and their ends."""
    for known in tokens.TokenFile(token_file).tokens():
        groups = {f"group {group}": " ".join(read) for group, read in (known.groups or {}).items()}
        scopes = ", ".join(f"{name}: {scope}" for name, scope in {**known.scopes, **groups}.items())
        click.echo(f"{known.name}  {scopes}" + (f"  until {tokens.day(known.expires)}" if known.expires else ""))
