"""What goes into the verbs and comes out of them. Keys are chain keys, 16 to 32 bytes; digests are xxh3_128."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.hints import Hint
from kvtier.layout import Layout

__all__ = ["Block", "Event", "Found", "Gap", "Head", "Match", "Namespace", "Pin", "Prefetch", "PutOutcome"]


class Block(NamedTuple):
    """One part of one block, to be put.

    data: raw bytes, C-contiguous; they must stay as they are until the put returns. part: `group * shards + shard`.
    parent: chain key of the block before, None for the first. depth: position in its chain, 0 first, -1 unknown.
    exact: the bytes, and all KV that they were computed from, are lossless. hint: what is known of its future.
    """

    key: bytes
    data: bytes | bytearray | memoryview
    part: int = 0
    parent: bytes | None = None
    depth: int = -1
    exact: bool = True
    hint: Hint | None = None


class PutOutcome(enum.StrEnum):
    """What became of a block. DROPPED: quota or back-pressure, nothing was stored."""

    STORED = "stored"
    EXISTS = "exists"
    DROPPED = "dropped"


class Head(NamedTuple):
    """What is known of a stored part; tier: where it lies."""

    key: bytes
    part: int
    parent: bytes | None
    depth: int
    exact: bool
    nbytes: int
    tier: str
    digest: bytes


class Found(NamedTuple):
    """A part that was read: its bytes were compared with their digest.

    Over shared memory nothing travels: the service has verified the bytes where they lie, and `digest` is b"".
    """

    key: bytes
    part: int
    parent: bytes | None
    depth: int
    exact: bool
    tier: str
    digest: bytes
    data: memoryview


class Match(NamedTuple):
    """The longest leading run: one tier per block. keys: of all full blocks, as far as they were told or computed."""

    tiers: tuple[str, ...]
    keys: tuple[bytes, ...]


class Pin(NamedTuple):
    """Blocks that stay in host. blocks: how many. expires: seconds since the epoch."""

    id: str
    blocks: int
    expires: float


class Prefetch(NamedTuple):
    """Blocks on their way into host. state: as the service calls it. blocks: how many are in host by it."""

    id: str
    state: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace as the service has it.

    Args:
        name: its own, unique in its tenant.
        layout: None for an opaque one, whose blocks may have any size.
        model, numerics, lora, scheme: see `kvtier.keys.Namespace`.
        created: seconds since the epoch.
        fingerprint: of the layout, b"" for an opaque one.
        parts: per block.
        block_bytes: size of each part, () for an opaque one.
        counts: what the service counts of it.
    """

    name: str
    layout: Layout | None
    model: str
    numerics: str
    lora: str
    scheme: str
    created: float
    fingerprint: bytes
    parts: int
    block_bytes: tuple[int, ...]
    counts: Mapping[str, int]


class Event(NamedTuple):
    """One change of one tier.

    id: resumes after it. sequence: one higher than the one before, or a `Gap` came between. time: seconds since the
    epoch. kind: stored, removed or cleared. namespace: None where all were cleared. keys: heads of chain keys, 16
    bytes. reason: of removed and cleared.
    """

    id: str
    sequence: int
    time: float
    kind: str
    tier: str
    namespace: str | None
    part: int
    keys: tuple[bytes, ...]
    reason: str


class Gap(NamedTuple):
    """Events were lost, or the service began anew: what is known of its tiers is void.

    id: resumes after it. sequence: of the last event that is lost; the next one is one higher.
    """

    id: str
    sequence: int
