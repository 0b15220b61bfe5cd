"""`kvtier serve`: the OpenAI-compatible server."""

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.loading import configured, open_llm
from kvtier.cli.logs import setup_logging
from kvtier.cli.session import Session
from kvtier.config import ServerSettings
from kvtier.errors import ConfigError
from kvtier.server import require_server

__all__ = ["serve"]

_Model = Annotated[str | None, typer.Argument(help="Model directory or GGUF file; SmolLM2-135M by default.")]


def serve(
    context: typer.Context,
    model: _Model = None,
    *,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 by default.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port, 8000 by default; 0: any free one.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVTIER_API_KEY", help="Key that callers must know; `ps` shows options.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File of such keys, one a line.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    prefill: Annotated[Path | None, typer.Option(help="Socket of a `kvtier prefill` that computes prompts.")] = None,
) -> None:
    """Serve a model with a tiered KV cache over the OpenAI API. SIGTERM lets what runs end; a second one does not."""
    require_server()
    from kvtier.http.listening import listen  # noqa: PLC0415  # FastAPI is optional
    from kvtier.server.run import serve as run  # noqa: PLC0415

    session: Session = context.obj
    flags = {"host": host, "port": port, "api_key_file": api_key_file, "served_model_name": served_model_name}
    # What another engine has computed is loaded; whether it might be cheaper to compute here is no question then.
    ungated = prefill is not None and session.loaded.origins.get("tiering.recompute_gate") == "default"
    config = configured(session, model, {"server": flags, "tiering": {"recompute_gate": False if ungated else None}})
    if session.loaded.origins["log.level"] == "default":
        # Whoever runs a server wants to see that it listens, and who calls.
        setup_logging("info", config.log.format)
    keys = _keys(api_key, config.server)
    with listen(config.server.host, config.server.port) as taken:
        llm, name = open_llm(config, prefill)
        try:
            run(llm, config.server.served_model_name or name, taken, keys)
        finally:
            llm.close()


def _keys(api_key: str | None, settings: ServerSettings) -> tuple[str, ...]:
    from kvtier.http.keys import read_api_keys  # noqa: PLC0415  # FastAPI is optional

    if api_key is not None and not api_key.strip():
        raise ConfigError("--api-key: expected a key, not an empty text")
    written = () if settings.api_key_file is None else read_api_keys(settings.api_key_file)
    return written if api_key is None else (api_key.strip(), *written)
