"""`kvtier cache`: the cache service, and the tokens that open it."""

import json
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.loading import configured
from kvtier.cli.logs import setup_logging
from kvtier.cli.session import Session
from kvtier.errors import ConfigError
from kvtier.server import require_server

if TYPE_CHECKING:
    from kvtier.service.cache import TokenEntry, Tokens

__all__ = ["app"]

app = typer.Typer(add_completion=False, help="The cache service: one store for all engines of a machine.")
_tokens = typer.Typer(add_completion=False, help="Tokens that open the service; SIGHUP makes it read them again.")
app.add_typer(_tokens, name="token")

_DAY = 86400.0


@app.callback()
def _root() -> None:
    """The cache service: one store for all engines of a machine."""


@app.command()
def serve(
    context: typer.Context,
    *,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 by default.")] = None,
    port: Annotated[
        int | None, typer.Option(help="TCP port of the REST API, 7700 by default; 0: any free one.")
    ] = None,
    data_port: Annotated[str | None, typer.Option(help="TCP port for block bytes, 7701 by default, or none.")] = None,
    socket: Annotated[Path | None, typer.Option(help="Unix socket for block bytes and shared memory.")] = None,
    state: Annotated[Path | None, typer.Option(help="Directory of the tenants' secrets and namespaces.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="File of `kvtier cache token`.")] = None,
    capacity: Annotated[str | None, typer.Option(help="Host memory for blocks, such as 8GiB.")] = None,
) -> None:
    """Serve the tiers. SIGTERM lets what runs end and flushes; a second one stops at once. SIGHUP rereads tokens."""
    # Until somebody looks after it, SIGHUP ends a process: `systemctl reload` may come at once.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    require_server()
    from kvtier.service.run import serve as run  # noqa: PLC0415  # FastAPI is optional

    session: Session = context.obj
    service = {
        "host": host,
        "port": port,
        "data_port": data_port,
        "socket": socket,
        "state": state,
        "tokens": tokens,
    }
    flags = {"service": service} | ({} if capacity is None else {"tiering": {"host": {"capacity": capacity}}})
    config = configured(session, None, flags)
    if session.loaded.origins["log.level"] == "default":
        setup_logging("info", config.log.format)
    code = run(config.service, config.tiering)
    if code:
        raise typer.Exit(code)


def _open(context: typer.Context, file: Path | None) -> "Tokens":
    from kvtier.service.cache.tokens import Tokens  # noqa: PLC0415  # torch: a wrong option is told before it loads

    session: Session = context.obj
    path = file or session.loaded.config.service.tokens
    if path is None:
        raise ConfigError("service.tokens = none: set it (KVTIER_SERVICE__TOKENS), or name the file with --file")
    return Tokens.open(path)


_File = Annotated[Path | None, typer.Option(help="File of tokens; service.tokens by default.")]


@_tokens.command()
def create(
    context: typer.Context,
    *,
    tenant: Annotated[str, typer.Option(help="Whose blocks it opens.")] = "default",
    scope: Annotated[
        list[str] | None, typer.Option(help="read, write or admin, once for each; read and write by default.")
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(help="Namespaces that it opens, with * and ?, once for each; all of the tenant's by default."),
    ] = None,
    days: Annotated[float | None, typer.Option(help="Days until it expires; never by default.")] = None,
    file: _File = None,
) -> None:
    """Make a token and print it: it is not kept anywhere."""
    from kvtier.service.cache.callers import Scope  # noqa: PLC0415  # as above

    wanted = scope or ["read", "write"]
    unknown = set(wanted) - set(Scope)
    if unknown:
        raise ConfigError(f"--scope {' '.join(sorted(unknown))}: expected {', '.join(Scope)}")
    lifetime = None if days is None else days * _DAY
    tokens = _open(context, file)
    typer.echo(tokens.create(tenant, map(Scope, wanted), namespace or None, lifetime=lifetime))


@_tokens.command("list")
def list_tokens(
    context: typer.Context,
    *,
    file: _File = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """Print the tokens by their public ids."""
    entries = _open(context, file).entries()
    if as_json:
        typer.echo(json.dumps([_row(entry) for entry in entries]))
        return
    for entry in entries:
        names = ",".join(entry.namespaces or ["*"])
        ends = "never" if entry.expires is None else _date(entry.expires)
        typer.echo("\t".join((entry.id, entry.tenant, ",".join(entry.scopes), names, ends)))


def _row(entry: "TokenEntry") -> dict[str, object]:
    return {
        "id": entry.id,
        "tenant": entry.tenant,
        "scopes": entry.scopes,
        "namespaces": entry.namespaces,
        "created": _date(entry.created),
        "expires": None if entry.expires is None else _date(entry.expires),
    }


@_tokens.command()
def revoke(
    context: typer.Context,
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As `list` prints it.")],
    *,
    file: _File = None,
) -> None:
    """Forget a token."""
    _open(context, file).revoke(token_id)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
