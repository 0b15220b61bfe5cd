"""StagingRegion: where a worker puts what it saves, before the store's owner checks and copies it."""

import threading
from collections.abc import Sequence

from kvtier.cpu.region import MemoryRegion, round_up
from kvtier.errors import CapacityError, LeaseError
from kvtier.layout import Span
from kvtier.tiers import RegionShare

__all__ = ["StagingRegion"]


class StagingRegion:
    """Equal, 4 KiB aligned slots that another process may write. Thread-safe; never the cache's own memory.

    Args:
        slot_bytes: length of one slot's span.
        slots: how many.
        name: shows in errors and in /proc/<pid>/maps.

    Raises:
        CapacityError: no slot, or more memory than this machine has.
    """

    def __init__(self, slot_bytes: int, slots: int, *, name: str = "staging") -> None:
        if slot_bytes < 1 or slots < 1:
            raise CapacityError(f"{name}: {slots} slots of {slot_bytes} bytes: expected at least one byte in one slot")
        self.slot_bytes = slot_bytes
        self._stride = round_up(slot_bytes)
        self._region = MemoryRegion(self._stride * slots, name=name, writable=True)
        self._lock = threading.Lock()
        self._free = [at * self._stride for at in reversed(range(slots))]
        self._used: set[int] = set()

    @property
    def free_slots(self) -> int:
        """Slots that `allocate` can still give."""
        return len(self._free)

    def allocate(self, count: int) -> list[Span]:
        """Up to `count` slots: fewer, or none, when the region has no more."""
        with self._lock:
            offsets = [self._free.pop() for _ in range(min(count, len(self._free)))]
            self._used.update(offsets)
        return [self._region.span(offset, self.slot_bytes) for offset in offsets]

    def free(self, spans: Sequence[Span]) -> None:
        """Give slots back.

        Raises:
            LeaseError: a span is no allocated slot of this region, or appears twice. Nothing is freed then.
        """
        offsets = [span.offset for span in spans]
        with self._lock:
            foreign = [span for span in spans if span.region != self._region.id or span.offset not in self._used]
            if foreign or len(set(offsets)) < len(offsets):
                raise LeaseError(f"{(foreign or list(spans))[0]} is no allocated staging slot: free each slot once")
            self._used.difference_update(offsets)
            self._free.extend(offsets)

    def view(self, span: Span) -> memoryview:
        """The slot's memory, writable.

        Raises:
            LeaseError: the span is no allocated slot of this region.
        """
        if span.region != self._region.id or span.offset not in self._used or span.nbytes > self._stride:
            raise LeaseError(f"{span} is no allocated staging slot of region {self._region.id}")
        return self._region.view(span.offset, span.nbytes)

    def regions(self) -> list[RegionShare]:
        """What to send to the worker that fills the slots."""
        return [self._region.share()]

    def close(self) -> None:
        """Let go of the memory. Idempotent; it goes with its last view."""
        self._region.close()
