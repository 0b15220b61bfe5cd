"""`kvtier router`: a prefix-aware router in front of several engines."""

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.loading import configured
from kvtier.cli.logs import setup_logging
from kvtier.cli.session import Session
from kvtier.router import require_router

__all__ = ["router"]


def router(
    context: typer.Context,
    *,
    engine: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="An OpenAI-compatible engine; give it once for each.")
    ] = None,
    events: Annotated[
        list[str] | None,
        typer.Option(metavar="ENDPOINT", help="Where the nth engine publishes its block events (ZMQ); - for nowhere."),
    ] = None,
    replay: Annotated[
        list[str] | None,
        typer.Option(metavar="ENDPOINT", help="Where the nth engine replays those that were lost; - for nowhere."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="engine (its /tokenize, the default), a model's directory, or text.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on, 127.0.0.1 by default; others need TLS.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="TCP port, 8080 by default; 0: any free one.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File of keys that callers must know, one a line.")] = None,
) -> None:
    """Send each request to the engine that has most of its prompt already, unless that one has too much to do.

    Engines that publish no events are known by what was sent to them.
    """
    require_router()
    from kvtier.http.exposure import check_tls  # noqa: PLC0415  # these are optional
    from kvtier.http.keys import read_api_keys  # noqa: PLC0415
    from kvtier.http.listening import listen  # noqa: PLC0415
    from kvtier.router.app import Router  # noqa: PLC0415
    from kvtier.router.fleet import addresses  # noqa: PLC0415
    from kvtier.router.run import serve  # noqa: PLC0415

    session: Session = context.obj
    flags = {
        "engines": ",".join(engine) if engine else None,
        "events": ",".join(events) if events else None,
        "replays": ",".join(replay) if replay else None,
        "tokenizer": tokenizer,
        "host": host,
        "port": port,
        "api_key_file": api_key_file,
    }
    config = configured(session, None, {"router": flags})
    settings = config.router
    if session.loaded.origins["log.level"] == "default":
        # Whoever runs a router wants to see that it listens, and where requests go.
        setup_logging("info", config.log.format)
    keys = () if settings.api_key_file is None else read_api_keys(settings.api_key_file, "router.api_key_file")
    places = addresses(_listed(settings.engines), _listed(settings.events), _listed(settings.replays))
    check_tls(settings, "router", "keys, prompts and answers")
    with listen(settings.host, settings.port, "router") as taken:
        serve(Router(places, settings), taken, keys)


def _listed(text: str | None) -> list[str]:
    return [one.strip() for one in text.split(",")] if text else []
