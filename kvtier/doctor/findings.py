"""What is examined, and what is found."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.config import Config
from kvtier.layout import Layout

__all__ = ["Finding", "Level", "ModelFacts", "Subject", "ok", "problem", "shown_size", "warning"]


class Level(enum.StrEnum):
    """How bad it is. Only a `PROBLEM` keeps a tier from being of use."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of what is so, and, unless it is `OK`, one line of what to do."""

    check: str
    level: Level
    what: str
    remedy: str = ""


class ModelFacts(NamedTuple):
    """The KV of the configured model, as the engine would lay it out.

    own_dtype: of the checkpoint. max_tokens: of one request, prompt and output.
    """

    name: str
    layout: Layout
    own_dtype: str
    max_tokens: int

    @property
    def block_bytes(self) -> int:
        """Raw bytes of one block."""
        return sum(self.layout.block_bytes(group) for group in range(len(self.layout.groups)))

    @property
    def token_bytes(self) -> float:
        """Raw KV bytes of one token."""
        return self.block_bytes / self.layout.block_size


@dataclass(frozen=True, slots=True)
class Subject:
    """What is examined.

    Args:
        config: the settings in force.
        model: None where the model's files are not here.
        prefill_tokens_per_second: measured or given, None if neither.
    """

    config: Config
    model: ModelFacts | None = None
    prefill_tokens_per_second: float | None = None


def ok(check: str, what: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Level.OK, what)


def warning(check: str, what: str, remedy: str) -> Finding:
    """It works, but not as well as it could, or not as the user may think."""
    return Finding(check, Level.WARNING, what, remedy)


def problem(check: str, what: str, remedy: str) -> Finding:
    """It does not work, or does more harm than good."""
    return Finding(check, Level.PROBLEM, what, remedy)


def shown_size(nbytes: float) -> str:
    """Bytes for people: three digits and a binary unit."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024:
            break
        nbytes, unit = nbytes / 1024, larger
    return f"{nbytes:.3g} {unit}" if nbytes < 1000 else f"{nbytes:.0f} {unit}"
