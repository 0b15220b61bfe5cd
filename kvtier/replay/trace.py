"""A trace as the replay sees it: requests over numbered blocks, each block numbered by its whole prefix."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError

__all__ = ["Prefixes", "ReadOptions", "Trace", "TraceRequest", "block_tokens_of", "fold", "malformed"]

_EXCERPT = 60


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One prompt.

    Args:
        at: seconds since the trace began.
        tokens: prompt tokens.
        blocks: numbers of its blocks, first block of the prompt first; the last may be partly filled.
        session: conversation that it is a turn of, where the trace says so.
        ends_session: no further turn of this session follows in the trace.
        output_tokens: of its answer, where the trace says so.
    """

    at: float
    tokens: int
    blocks: tuple[int, ...]
    session: str | None = None
    ends_session: bool = False
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of time over blocks 0 .. `blocks` - 1.

    Args:
        kind: which reader made it.
        block_tokens: tokens per block.
        notes: what the figures cannot say, in one sentence each.
    """

    kind: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    blocks: int
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.tokens for request in self.requests)

    @property
    def touches(self) -> int:
        """Blocks of all requests."""
        return sum(len(request.blocks) for request in self.requests)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a trace.

    Args:
        block_tokens: tokens per block, a multiple of the trace's own; None: 512, or what the trace says.
        limit: requests to read; None: all.
        sessions: conversations at a time that are made up where a trace has lengths only; None: none are.
        seed: of whatever is drawn at random.
    """

    block_tokens: int | None = None
    limit: int | None = None
    sessions: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("block_tokens", "limit", "sessions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name.replace('_', '-')} {value}: expected at least 1")


class Prefixes:
    """Numbers blocks by prefix: equal labels behind equal prefixes are one block, anything else is another."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def chain(self, labels: Iterable[Hashable]) -> tuple[int, ...]:
        """Numbers of a prompt's blocks, given something that tells each block's own content."""
        numbers = self._numbers
        parent = -1
        found = []
        for label in labels:
            parent = numbers.setdefault((parent, label), len(numbers))
            found.append(parent)
        return tuple(found)


def fold(labels: Sequence[Hashable], width: int, *, partial: bool) -> Sequence[Hashable]:
    """Labels of blocks that are `width` times larger; `partial` keeps a last one that is not full."""
    if width == 1:
        return labels
    stop = len(labels) if partial else len(labels) - len(labels) % width
    return [tuple(labels[at : at + width]) for at in range(0, stop, width)]


def block_tokens_of(wanted: int | None, own: int, default: int) -> int:
    """Tokens per block of the replay.

    Raises:
        ConfigError: not a multiple of the trace's own.
    """
    chosen = default if wanted is None else wanted
    if chosen % own:
        raise ConfigError(f"block-tokens {chosen}: this trace names blocks of {own} tokens, expected a multiple of it")
    return chosen


def malformed(path: Path, line: int | None, value: object, expected: str) -> ConfigError:
    """What a reader raises: where, which value, what was expected."""
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    # A terminal obeys what a file of any other kind may contain.
    text = "".join(char if char.isprintable() else "\ufffd" for char in text[: _EXCERPT + 1])
    excerpt = text if len(text) <= _EXCERPT else text[:_EXCERPT] + "…"
    return ConfigError(f"{path}{'' if line is None else f':{line}'}: {excerpt}: expected {expected}")
