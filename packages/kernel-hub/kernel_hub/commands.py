"""`kernel-builder hub serve` and `hub token`."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import click

from kernel_format.errors import ConfigError
from kernel_hub.root_commands import AS_JSON, LARGE_FILES, ROOT

TOKEN_FILE = click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The token file that `kernel-builder hub token add` writes.",
)


def _bytes(megabytes: int | None) -> int | None:
    return None if megabytes is None else megabytes * 1_000_000


@click.command()
@ROOT
@LARGE_FILES
@click.option("--host", default="127.0.0.1", show_default=True, help="The host name or address to listen on.")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="The port; 0 chooses a free one.")
@TOKEN_FILE
@click.option("--read-only", is_flag=True, help="Refuse every change.")
@click.option("--trust", "trusted", multiple=True, metavar="ORG", help="Kernels of ORG load without trust_remote_code.")
@click.option(
    "--idle-timeout",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Seconds without data after which a request is ended.",
)
@click.option(
    "--max-file-size",
    default=50_000,
    show_default=True,
    type=click.IntRange(min=1),
    help="The largest file, in MB.",
)
@click.option(
    "--quota",
    "server",
    metavar="MB",
    type=click.IntRange(min=1),
    help="The most that the Hub stores.  [default: no limit]",
)
@click.option(
    "--organization-quota", "organization", metavar="MB", type=click.IntRange(min=1), help="… in each organisation."
)
@click.option(
    "--repository-quota", "repository", metavar="MB", type=click.IntRange(min=1), help="… in each repository."
)
@click.option(
    "--max-connections-per-address",
    "connections_by_address",
    default=512,
    show_default=True,
    type=click.IntRange(min=1),
    help="The most connections of one address. A proxy, which FORWARDED_ALLOW_IPS names, is not counted.",
)
@click.option(
    "--audit-log",
    metavar="FILE",
    help="Append a line of JSON for every write and every denied access; '-' is stdout. SIGHUP opens FILE again.",
)
@click.option(
    "--mirror", metavar="URL", help="Copy kernels from this Hub when they are asked for: https://huggingface.co"
)
@click.option(
    "--mirror-organization",
    "mirrored",
    multiple=True,
    metavar="ORG",
    help="Copy the kernels of ORG. Names in other organisations are not sent to the other Hub.",
)
@click.option(
    "--mirror-refresh",
    default=300.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Seconds until the other Hub is asked again for new versions.",
)
@click.option(
    "--mirror-signer",
    "signers",
    multiple=True,
    metavar="URL|FILE",
    help="The workflow that signs the copied packages, or a file with a public key; may be repeated.  "
    "[default: the workflows that the public client trusts]",
)
@click.option("--mirror-require-signature", is_flag=True, help="Serve no copied packages without a signature.")
@click.option(
    "--log-level", default="info", show_default=True, type=click.Choice(["debug", "info", "warning", "error"])
)
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON.")
def serve(
    root: Path,
    large_files: str | None,
    host: str,
    port: int,
    token_file: Path | None,
    read_only: bool,
    trusted: tuple[str, ...],
    idle_timeout: float,
    max_file_size: int,
    server: int | None,
    organization: int | None,
    repository: int | None,
    connections_by_address: int,
    audit_log: str | None,
    mirror: str | None,
    mirrored: tuple[str, ...],
    mirror_refresh: float,
    signers: tuple[str, ...],
    mirror_require_signature: bool,
    log_level: str,
    as_json: bool,
) -> None:
    """Serve the Hub in ROOT until a signal ends it.

    Without --token-file any token may write, and only this machine can connect. When the Hub listens, its address is
    printed on stdout; the log goes to stderr.

    \b
    kernel-builder hub serve --port 8000 --trust my-org
    kernel-builder hub serve --host 0.0.0.0 --port 8000 --token-file tokens.json
    kernel-builder hub serve --port 8000 --trust kernels-community \\
        --mirror https://huggingface.co --mirror-organization kernels-community
    """
    gc.disable()  # what is imported stays: looking for garbage meanwhile would take an eighth of the start
    from kernel_hub.serve import serve as run
    from kernel_hub.settings import ConnectionLimits, MirrorSettings, Quotas, RequestLimits, Settings

    gc.enable()
    if mirror is not None or mirrored:
        _check_mirror(mirror, mirrored, signers)

    def ready(url: str) -> None:
        click.echo(json.dumps({"url": url, "root": str(root.resolve())}) if as_json else f"serving {root} at {url}")

    settings = Settings(
        root=root.resolve(),
        large_files=large_files,
        token_file=token_file,
        read_only=read_only,
        trusted=frozenset(trusted),
        limits=RequestLimits(file_bytes=max_file_size * 1_000_000, idle_seconds=idle_timeout),
        quotas=Quotas(_bytes(repository), _bytes(organization), _bytes(server)),
        connections=ConnectionLimits(connections_by_address=connections_by_address),
        audit_log=audit_log,
        mirror=MirrorSettings(mirror, frozenset(mirrored), mirror_refresh, signers, mirror_require_signature)
        if mirror
        else None,
    )
    run(settings, host=host, port=port, log_level=log_level, ready=ready)


def _check_mirror(url: str | None, organizations: tuple[str, ...], signers: tuple[str, ...]) -> None:
    from kernel_format.signatures import read_signers

    if url is None or not url.startswith(("https://", "http://")):
        raise ConfigError(
            "expected the address of a Hub", where=f"--mirror {url or ''}", hint="--mirror https://huggingface.co"
        )
    if not organizations:
        raise ConfigError(
            "expected the organisations to copy from",
            where="--mirror-organization",
            hint="--mirror-organization kernels-community; names in other organisations stay on this Hub",
        )
    read_signers(signers)


def _token_file(path: Path | None) -> Path:
    if path is None:
        raise ConfigError("expected a token file", where="--token-file", hint="--token-file hub-tokens.json")
    return path


@click.group()
def token() -> None:
    """Manage the tokens that may read and write.

    The token file holds only their hashes.
    """


@token.command()
@click.argument("name")
@click.option(
    "--read",
    multiple=True,
    metavar="ORG[/NAME]",
    help="May read ORG's private kernels, or one of them; '*': every organisation's.",
)
@click.option(
    "--write",
    multiple=True,
    metavar="ORG[/NAME]",
    help="May also publish in ORG, or one repository of it; '*': in every organisation.",
)
@click.option("--expires", metavar="DAY|DAYSd", help="When the token ends: 2030-01-31, or 90d.  [default: never]")
@TOKEN_FILE
@AS_JSON
def add(
    name: str,
    read: tuple[str, ...],
    write: tuple[str, ...],
    expires: str | None,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """Create a token and print it.

    It cannot be shown again: the token file holds only its hash.

    \b
    kernel-builder hub token add ci --write my-org --token-file tokens.json
    kernel-builder hub token add ci --write my-org/my-kernel --expires 90d --token-file tokens.json
    """
    from kernel_hub import tokens

    end = tokens.parse_end(expires) if expires else None
    secret = tokens.add(_token_file(token_file), name, read=read, write=write, expires=end)
    click.echo(json.dumps({"name": name, "token": secret}) if as_json else secret)


@token.command("remove")
@click.argument("name")
@TOKEN_FILE
def remove(name: str, token_file: Path | None) -> None:
    """Remove a token; running servers refuse it from then on."""
    from kernel_hub import tokens

    tokens.remove(_token_file(token_file), name)


@token.command("list")
@TOKEN_FILE
@AS_JSON
def list_tokens(token_file: Path | None, as_json: bool) -> None:
    """List the tokens, their scopes and when they end."""
    from kernel_hub import tokens

    known = tokens.TokenFile(_token_file(token_file)).tokens()
    if as_json:
        described = [{"name": token.name, "scopes": dict(token.scopes), "expires": token.expires} for token in known]
        click.echo(json.dumps(described, indent=2))
        return
    for token in known:
        scopes = ", ".join(f"{what}: {scope}" for what, scope in token.scopes.items())
        click.echo(f"{token.name}  {scopes}" + (f"  until {tokens.day(token.expires)}" if token.expires else ""))
