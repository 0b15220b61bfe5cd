"""Reading: blocks that one caller holds in host, to be sent without a copy."""

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import xxhash

from kvtier.errors import LeaseError
from kvtier.layout import Span
from kvtier.tiers import AddressableTier, BlockRef, Handle, checksum_head

__all__ = ["Found", "InHost", "Reading"]


class InHost(NamedTuple):
    """A block as it lies in host."""

    host: AddressableTier
    handle: Handle


class Found:
    """One part of one block of a reading.

    Args:
        at: place of its key among those that were asked for.
        key: chain key, as it was asked for.
        part: `group * shards + shard`.
        ref: its record: `depth` in its chain (-1: unknown), and whether it is lossless (`exact`).
        parent: first 16 bytes of the parent's chain key, None for depth 0 or unknown.
        tier: where it was found.
        data: raw bytes, valid until the reading is closed.
        in_host: where in the tenant's shared memory they lie; None: they were decoded, and lie elsewhere.
    """

    __slots__ = ("_digest", "_in_host", "at", "data", "depth", "exact", "key", "nbytes", "parent", "part", "tier")

    def __init__(
        self,
        at: int,
        key: bytes,
        part: int,
        ref: BlockRef,
        parent: bytes | None,
        tier: str,
        data: memoryview,
        in_host: InHost | None = None,
    ) -> None:
        self.at = at
        self.key = key
        self.part = part
        self.depth = ref.depth
        self.parent = parent
        self.exact = ref.exact
        self.tier = tier
        self.data = data
        self.nbytes = data.nbytes
        self._digest: bytes | None = None
        self._in_host = in_host

    @property
    def span(self) -> Span | None:
        """Where `data` lies in the regions of `Cache.regions`, while the reading is open; None: not there."""
        return None if self._in_host is None else self._in_host.host.span(self._in_host.handle)

    @property
    def guard(self) -> tuple[bytes, bytes] | None:
        """A head of 64 bytes and a checksum: xxh3_128(head + `data`) is the checksum; None: they were decoded."""
        handle = None if self._in_host is None else self._in_host.handle
        return None if handle is None else (checksum_head(handle.ref, handle.fmt), handle.checksum)

    @property
    def digest(self) -> bytes:
        """xxh3_128 of the raw bytes, 16 bytes; a pass over them at its first use, while the reading is open."""
        if self._digest is None:
            self._digest = xxhash.xxh3_128_digest(self.data)
        return self._digest


class Reading:
    """Blocks in host, held until `close`. Thread-safe.

    Args:
        blocks: what was found, block-major by part.
        found: whole blocks among them; those that were asked for part by part count as one each.
        end: lets go of the hold; called once.
    """

    def __init__(self, blocks: Sequence[Found], found: int, end: Callable[[], object]) -> None:
        self._blocks = list(blocks)
        self.found = found
        self.nbytes = sum(block.nbytes for block in blocks)
        self._end: list[Callable[[], object]] = [end]
        self._lock = threading.Lock()

    @property
    def blocks(self) -> list[Found]:
        """What was found.

        Raises:
            LeaseError: the reading is closed.
        """
        self._require_open()
        return self._blocks

    @property
    def views(self) -> list[memoryview]:
        """Raw bytes of each of `blocks`, read-only; they must not be touched after `close`.

        Raises:
            LeaseError: the reading is closed.
        """
        self._require_open()
        return [block.data for block in self._blocks]

    @property
    def closed(self) -> bool:
        """Whether it was closed: by its caller, or because its owner is gone."""
        return not self._end

    def close(self) -> None:
        """Let go of the blocks. Idempotent."""
        with self._lock:
            end = self._end.pop() if self._end else None
            self._blocks = []
        if end is not None:
            end()

    def _require_open(self) -> None:
        if self.closed:
            raise LeaseError("this reading is closed: read again")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
