"""What callers hand over and get back: blocks to be put, their outcomes, pins, prefetches."""

import enum
from typing import Literal, NamedTuple, TypeAlias

from kvtier.hints import Hint
from kvtier.store import Received

__all__ = ["BlockPut", "PinInfo", "PrefetchInfo", "PrefetchState", "PutOutcome"]


class BlockPut(NamedTuple):
    """One part of one block, to be stored.

    Args:
        key: chain key, 16 to 32 bytes, of which the first 16 count.
        part: `group * shards + shard`.
        parent: chain key of the block before; None for depth 0, or if unknown.
        depth: position in the chain, 0 first; -1: the parent is unknown.
        exact: whether the bytes, and all KV that they were computed from, are lossless.
        data: raw bytes; they stay as they are until the outcome is there.
        hint: what is known of its future.
        owned: what `data` lies in, of a `Room`: that memory becomes the block's, without a copy.
    """

    key: bytes
    part: int
    parent: bytes | None
    depth: int
    exact: bool
    data: memoryview
    hint: Hint | None = None
    owned: Received | None = None


class PutOutcome(enum.StrEnum):
    """What became of one `BlockPut`."""

    STORED = "stored"
    EXISTS = "exists"  # there already at equal or higher fidelity, or being stored by another call
    DROPPED = "dropped"  # no room, or its parent was dropped: nothing is stored


class PinInfo(NamedTuple):
    """A pin. blocks: leading ones that stay in host; expires: seconds since 1970."""

    id: str
    blocks: int
    expires: float


PrefetchState: TypeAlias = Literal["running", "done", "no_space", "timeout", "cancelled", "closed"]


class PrefetchInfo(NamedTuple):
    """A prefetch. blocks: leading ones that are in host now, once it is over."""

    id: str
    state: PrefetchState
    blocks: int
