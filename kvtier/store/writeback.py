"""Write-back: copies committed host blocks to the lower tiers, in the background.

The queue is bounded in bytes. What does not fit is a dropped demotion, counted by reason: a slow or full tier
never holds up whoever puts blocks, and never pins more than the bound of the host tier.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence

from kvtier.metrics import Metrics
from kvtier.store.writing import write_reserved
from kvtier.tiers import AddressableTier, BlockRef, Handle, Tier

__all__ = ["WriteBack"]

_OWNER = "store.writeback"
_log = logging.getLogger(__name__)


class WriteBack:
    """One thread that demotes from `host` to each tier in `lower`.

    Args:
        host: where the blocks are read in place, under a lease.
        lower: tiers that get a copy of every block that they do not hold yet.
        bound: bytes of host blocks that may wait here.
        metrics: `dropped_blocks{tier, reason}` counts what was not taken.
    """

    def __init__(self, host: AddressableTier, lower: Sequence[Tier], bound: int, metrics: Metrics) -> None:
        self._host = host
        self._lower = tuple(lower)
        self._bound = bound
        self._metrics = metrics
        self._queue: deque[list[Handle]] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvtier-writeback", daemon=True)
        if self._lower:
            self._thread.start()

    def submit(self, keys: Sequence[bytes]) -> None:
        """Queue the leading blocks of `keys` that host holds; returns at once."""
        if not self._lower or not keys:
            return
        handles = self._host.acquire(keys, _OWNER).wait().handles
        taken = self._enqueue(handles)
        self._host.release(handles[taken:])
        self._drop("evicted_before_write", len(keys) - len(handles))
        self._drop("queue_full", len(handles) - taken)

    def _enqueue(self, handles: Sequence[Handle]) -> int:
        """Queue the leading blocks that fit, and at least one where nothing waits; returns how many."""
        taken = 0
        with self._changed:
            for handle in () if self._closed else handles:
                if self._bytes and self._bytes + handle.nbytes > self._bound:
                    break
                self._bytes += handle.nbytes
                taken += 1
            if taken:
                self._queue.append(list(handles[:taken]))
                self._changed.notify_all()
        return taken

    def drain(self) -> None:
        """Wait until everything queued so far is written or dropped."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes == 0)

    @property
    def waiting_bytes(self) -> int:
        """Bytes queued or being written."""
        return self._bytes

    def close(self) -> None:
        """Write what is queued, then end the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _drop(self, reason: str, count: int) -> None:
        for tier in self._lower if count else ():
            self._metrics.dropped_blocks.labels(tier.name, reason).inc(count)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                handles = self._queue.popleft()
            for tier in self._lower:
                self._write(tier, handles)
            self._host.release(handles)
            with self._changed:
                self._bytes -= sum(handle.nbytes for handle in handles)
                self._changed.notify_all()

    def _write(self, tier: Tier, handles: Sequence[Handle]) -> None:
        try:
            self._copy_down(tier, handles)
        except Exception:  # noqa: BLE001  the thread's top level: one bad batch must not end it
            self._metrics.dropped_blocks.labels(tier.name, "tier_error").inc(len(handles))
            _log.exception("demotion of %d blocks to %s dropped", len(handles), tier.name)

    def _copy_down(self, tier: Tier, handles: Sequence[Handle]) -> None:
        refs: list[BlockRef] = [handle.ref for handle in handles]
        sizes = [handle.nbytes for handle in handles]
        slots = tier.reserve(refs, sizes, [handle.fmt for handle in handles], _OWNER)
        pairs = [(slot, source) for slot, source in zip(slots, handles, strict=True) if isinstance(slot, Handle)]
        write_reserved(tier, [(slot, self._host.buffer(source)) for slot, source in pairs])
