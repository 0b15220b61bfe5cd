"""`kvtier prefill`: an engine that computes prompts for `kvtier serve --prefill`."""

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.loading import configured, open_llm
from kvtier.cli.logs import setup_logging
from kvtier.cli.session import Session

__all__ = ["prefill"]

_Model = Annotated[str | None, typer.Argument(help="Model directory or GGUF file; SmolLM2-135M by default.")]


def prefill(
    context: typer.Context,
    model: _Model = None,
    *,
    socket: Annotated[Path, typer.Option(help="Unix socket to listen on, which only you may connect to.")],
) -> None:
    """Compute prompts for the servers that share tiering.nvme.path with this one, until SIGTERM."""
    session: Session = context.obj
    config = configured(session, model)
    if session.loaded.origins["log.level"] == "default":
        # Whoever runs a server wants to see that it listens.
        setup_logging("info", config.log.format)
    from kvtier.disaggregated import serve_prefill, shared_directory  # noqa: PLC0415  # torch

    # Before a model is loaded in vain.
    shared_directory(config)
    llm, _ = open_llm(config)
    try:
        serve_prefill(llm, socket)
    finally:
        llm.close()
