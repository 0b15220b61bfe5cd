"""What the global options decide for every sub-command."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvtier.cli.logs import setup_logging
from kvtier.config import LoadedConfig, load_config, settings

__all__ = ["Session"]


@dataclass(frozen=True, slots=True)
class Session:
    """One run of the command: its settings are loaded and its log is open.

    Args:
        loaded: what is in force before a command's own flags.
        assigned: `section.field=value`, of `--set`.
    """

    loaded: LoadedConfig
    assigned: tuple[str, ...] = ()

    @classmethod
    def start(cls, file: Path | None, log_level: str | None, assigned: tuple[str, ...] = ()) -> Self:
        """Read the configuration and open the log.

        Raises:
            ConfigError: a setting is wrong.
        """
        if log_level == "debug":
            setup_logging("debug", "text")  # an error in the configuration itself is then shown in full
        if log_level:
            assigned = (*assigned, f"log.level={log_level}")
        loaded = load_config(file=file, assigned=assigned)
        setup_logging(loaded.config.log.level, loaded.config.log.format)
        return cls(loaded, assigned)

    def load(self, flags: Mapping[str, Any] | None = None, file: Path | None = None) -> LoadedConfig:
        """The settings again, with a command's own flags over the global ones.

        Args:
            flags: by section.
            file: instead of the one that was read.

        Raises:
            ConfigError: a setting is wrong.
        """
        return load_config(cli=flags, file=file or self.loaded.file, assigned=self.assigned)

    def environ(self) -> dict[str, str]:
        """Variables that give a child process the file and the global options of this one."""
        assigned = (text.partition("=") for text in self.assigned)
        found = {settings()[name.strip()].variable: value.strip() for name, _, value in assigned}
        return found if self.loaded.file is None else found | {"KVTIER_CONFIG": str(self.loaded.file.absolute())}
