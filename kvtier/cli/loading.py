"""What `serve` and `chat` have in common: the settings in force, and a model under them."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvtier.cli.models import ensure_default_model
from kvtier.cli.session import Session
from kvtier.config import Config

if TYPE_CHECKING:
    from kvtier.api import AsyncLLM

__all__ = ["configured", "open_llm"]


def configured(session: Session, model: str | None, flags: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    """The session's settings, with a command's own flags over all else.

    Args:
        session: of this run.
        model: directory or file, if one was named.
        flags: by section; those that are None were not given.

    Raises:
        ConfigError: a flag is wrong.
    """
    cli: dict[str, dict[str, Any]] = {} if model is None else {"model": {"path": model}}
    for section, values in (flags or {}).items():
        cli[section] = {name: value for name, value in values.items() if value is not None}
    return session.load(cli).config


def open_llm(config: Config, prefill: Path | None = None) -> tuple["AsyncLLM", str]:
    """Load the model that `config` names, the default one otherwise; returns it and the name of its directory or file.

    Args:
        config: settings in force.
        prefill: socket of the engine that computes its prompts, if any.

    Raises:
        KVTierError: see `LLM`.
    """
    from kvtier.api import AsyncLLM  # noqa: PLC0415  # torch: a wrong option is told before it loads

    source = config.model.path or str(ensure_default_model(Console(stderr=True)))
    sections = config.model_dump(exclude={"model": {"path"}})
    if prefill is None:
        return AsyncLLM(source, config=sections), Path(source).resolve().name
    from kvtier.disaggregated import PrefilledLLM  # noqa: PLC0415  # likewise

    llm = PrefilledLLM(source, prefill=prefill, config=sections)
    return llm, Path(source).resolve().name
