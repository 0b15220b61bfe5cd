"""Reading: from keys to leases to verified bytes."""

import logging
import time
from collections.abc import Sequence

from kvtier.errors import TierError
from kvtier.nvme.batch import Batch, check_buffer, transfers
from kvtier.nvme.counting import Counts
from kvtier.nvme.holds import NvmeHandle
from kvtier.nvme.io import BlockIO, Transfer
from kvtier.nvme.opening import Opened
from kvtier.tiers import Completions, Handle, Owner, Status, Ticket, block_checksum, expired

__all__ = ["Reader"]

_log = logging.getLogger(__name__)

_LOOKUPS = 256


class Reader:
    """The reading verbs of `kvtier.tiers.Tier`. Thread-safe."""

    def __init__(self, opened: Opened, blocks: BlockIO, completions: Completions, counts: Counts) -> None:
        self._index = opened.index
        self._recency = opened.recency
        self._space = opened.space
        self._holds = opened.holds
        self._lock = opened.space.lock
        self._blocks = blocks
        self._completions = completions
        self._counts = counts

    def contains(self, keys: Sequence[bytes], deadline: float | None = None) -> Ticket:
        """See `Tier.contains`."""
        self._holds.require_open()
        if expired(deadline):
            return self._completions.finish(Ticket(), [Status.TIMEOUT] * len(keys))
        with self._index.read() as ledger:
            statuses = [Status.OK if ledger.has(key) else Status.MISS for key in keys]
        return self._completions.finish(Ticket(), statuses)

    def acquire(self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None) -> Ticket:
        """See `Tier.acquire`. Verifies that the blocks are indexed; `read` verifies their bytes."""
        self._holds.require_open()
        if expired(deadline):
            return self._completions.finish(Ticket(), [Status.TIMEOUT] * len(keys))
        handles: list[NvmeHandle] = []
        rows: list[int] = []
        with self._counts.timed("acquire"):
            for start in range(0, len(keys), _LOOKUPS):
                batch = keys[start : start + _LOOKUPS]
                handles += self._lease(batch, owner, rows)
                if len(handles) < start + len(batch):
                    break
            self._recency.renew(rows)
        self._counts.add(self._counts.metrics.hit_blocks, len(handles))
        self._counts.add(self._counts.metrics.missed_blocks, len(keys) - len(handles))
        missing = [Status.MISS] * (len(keys) - len(handles))
        return self._completions.finish(Ticket(), [Status.OK] * len(handles) + missing, handles)

    def _lease(self, keys: Sequence[bytes], owner: Owner, rows: list[int]) -> list[NvmeHandle]:
        handles: list[NvmeHandle] = []
        with self._index.read(self._lock) as ledger:
            self._holds.require_open()
            for key in keys:
                record = ledger.get(key)
                if record is None or self._holds.is_doomed(record):
                    break
                ref, fmt = ledger.ref(key, record), ledger.fmt(record)
                handle = NvmeHandle(ref, record.nbytes, fmt, owner, record.extents, record.checksum)
                self._holds.lease(handle, record.row)
                handles.append(handle)
                rows.append(record.row)
        return handles

    def read(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """See `Tier.read`."""
        for handle, out in items:
            check_buffer(handle, out, writable=True)
        with self._lock:
            self._holds.require_open()
            handles = self._holds.require([handle for handle, _ in items], leased=True)
            self._holds.hold(handles)
        moving = transfers(handles, [out for _, out in items])
        ticket, start = Ticket(), time.perf_counter()

        def move(window: list[int]) -> list[Status]:
            errors = self._blocks.read([moving[at] for at in window])
            return [self._verified(handles[at], moving[at], error) for at, error in zip(window, errors, strict=True)]

        def done(statuses: list[Status]) -> None:
            try:
                with self._lock:
                    freed = self._holds.unhold(handles)
                good = [h.nbytes for h, status in zip(handles, statuses, strict=True) if status is Status.OK]
                self._counts.add(self._counts.metrics.read_bytes, sum(good))
                self._counts.took("read", start)
                self._space.free(freed)
            finally:
                self._completions.finish(ticket, statuses)

        Batch(self._blocks, moving, deadline, move, done, Status.MISS).start()
        return ticket

    def _verified(self, handle: NvmeHandle, transfer: Transfer, error: OSError | None) -> Status:
        if error is not None:
            self._counts.failed("read", error)
            return Status.MISS
        if block_checksum(handle.ref, handle.fmt, transfer.data[: handle.nbytes].data) == handle.checksum:
            return Status.OK
        try:
            return self._remove_damaged(handle)
        except TierError as failure:
            _log.warning("%s: a damaged block stays in the index: %s", self._counts.name, failure)
            return Status.CORRUPT

    def _remove_damaged(self, handle: NvmeHandle) -> Status:
        key = handle.ref.key
        with self._space.changing() as change:
            record = change.ledger.get(key)
            if record is None or record.page != handle.page or record.checksum != handle.checksum:
                # Another process dropped the record and reused its pages: a race, no damage.
                return Status.MISS
            change.drop(key, record, spare_leased=False)
        self._space.forget_plan()
        self._counts.add(self._counts.metrics.corrupt_blocks, 1)
        return Status.CORRUPT

    def release(self, handles: Sequence[Handle]) -> None:
        """See `Tier.release`. After `close`, which ended all leases, nothing happens."""
        with self._lock:
            if self._holds.closed:
                return
            freed = self._holds.end_leases(self._holds.require(handles, leased=True))
        self._space.free(freed)
