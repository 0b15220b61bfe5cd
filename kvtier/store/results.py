"""What the store answers with."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Self, TypeAlias

from kvtier.layout import Span

__all__ = ["Deferred", "Located", "PrefetchResult", "PutOutcome", "PutResult", "StoreMatch"]

PutOutcome: TypeAlias = Literal["stored", "joined", "dropped"]
"""What became of one block: stored, there or in flight already, or dropped."""

Deferred: TypeAlias = Literal["no_space", "timeout", "cancelled", "closed"]


class StoreMatch(NamedTuple):
    """Tier name of each block of the longest leading run that is somewhere. A hint: no lease, no recency.

    A block of several parts counts as being in the slowest tier that holds one of them.
    """

    tiers: tuple[str, ...]


class PutResult(NamedTuple):
    """Of one `put`: blocks newly stored, blocks that were there or in flight already, blocks dropped."""

    stored: int
    joined: int
    dropped: int

    @classmethod
    def of(cls, outcomes: Sequence[PutOutcome]) -> Self:
        """Of so many single ones."""
        return cls(outcomes.count("stored"), outcomes.count("joined"), outcomes.count("dropped"))


class Located(NamedTuple):
    """Where a part lies in host's regions, and the format that its bytes are in."""

    span: Span
    fmt: str


class PrefetchResult(NamedTuple):
    """Of one `prefetch`.

    blocks: leading blocks that are in host now; 0 where there was no space, which is no statement about presence.
    deferred: why it stopped before the end of what was found; None: it did not.
    """

    blocks: int
    deferred: Deferred | None
