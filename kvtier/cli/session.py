"""What the global options decide for every sub-command."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvtier.cli.logs import setup_logging
from kvtier.config import LoadedConfig, load_config

__all__ = ["Session"]


@dataclass(frozen=True, slots=True)
class Session:
    """One run of the command: its settings are loaded and its log is open."""

    loaded: LoadedConfig

    @classmethod
    def start(cls, file: Path | None, log_level: str | None) -> Self:
        """Read the configuration and open the log.

        Raises:
            ConfigError: a setting is wrong.
        """
        if log_level == "debug":
            setup_logging("debug", "text")  # an error in the configuration itself is then shown in full
        loaded = load_config(cli={"log": {"level": log_level}} if log_level else None, file=file)
        setup_logging(loaded.config.log.level, loaded.config.log.format)
        return cls(loaded)
