"""Reading: from keys to leases to verified bytes.

A block that the disk does not give back, or gives back damaged, is a miss, and so is one whose record was altered. Its
record goes: the next look-up says so at once, and the next put stores the block anew. If its whole segment file is
gone, so do all records in there.
"""

import errno
import logging
import time
from collections.abc import Collection, Sequence

from kvtier.errors import FormatMismatch, TierError
from kvtier.hints import Hint
from kvtier.nvme.batch import Batch, Deadlines, check_buffers
from kvtier.nvme.counting import Counts
from kvtier.nvme.holds import NvmeHandle
from kvtier.nvme.io import BlockIO, Transfer, transfers
from kvtier.nvme.opening import Opened
from kvtier.nvme.segments import Late, SegmentLost
from kvtier.tiers import (
    OWN_WORK,
    BlockRef,
    Completions,
    Handle,
    Owner,
    Status,
    Ticket,
    checksum_heads,
    counted,
    expired,
)

__all__ = ["Reader"]

_log = logging.getLogger(__name__)

_LOOKUPS = 256
_LOST_ERRNOS = frozenset({errno.EIO, errno.EUCLEAN, errno.ENODATA, errno.EBADMSG, errno.EREMOTEIO})


class Reader:
    """The reading verbs of `kvtier.tiers.Tier`. Thread-safe."""

    def __init__(
        self, opened: Opened, blocks: BlockIO, deadlines: Deadlines, completions: Completions, counts: Counts
    ) -> None:
        self._index = opened.index
        self._recency = opened.recency
        self._space = opened.space
        self._holds = opened.holds
        self._lock = opened.space.lock
        self._segments = opened.segments
        self._blocks = blocks
        self._deadlines = deadlines
        self._completions = completions
        self._counts = counts

    def contains(self, keys: Sequence[bytes], deadline: float | None = None, *, exact: bool = False) -> Ticket:
        """See `Tier.contains`."""
        self._holds.require_open()
        if expired(deadline):
            return self._completions.finish(Ticket(), [Status.TIMEOUT] * len(keys))
        with self._index.read() as ledger:
            statuses = [Status.OK if there else Status.MISS for there in ledger.present(keys, exact=exact)]
        return self._completions.finish(Ticket(), statuses)

    def acquire(
        self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None, *, exact: bool = False
    ) -> Ticket:
        """See `Tier.acquire`. Verifies that the blocks are indexed; `read` verifies their bytes."""
        self._holds.require_open()
        if expired(deadline):
            return self._completions.finish(Ticket(), [Status.TIMEOUT] * len(keys))
        handles: list[NvmeHandle] = []
        rows: list[int] = []
        with self._counts.timed("acquire"):
            for start in range(0, len(keys), _LOOKUPS):
                batch = keys[start : start + _LOOKUPS]
                handles += self._lease(batch, owner, rows, exact=exact)
                if len(handles) < start + len(batch):
                    break
            if not owner.startswith(OWN_WORK):
                self._recency.renew(rows)
        if counted(owner):
            self._counts.add(self._counts.metrics.hit_blocks, len(handles))
            self._counts.add(self._counts.metrics.missed_blocks, len(keys) - len(handles))
        missing = [Status.MISS] * (len(keys) - len(handles))
        return self._completions.finish(Ticket(), [Status.OK] * len(handles) + missing, handles)

    def _lease(self, keys: Sequence[bytes], owner: Owner, rows: list[int], *, exact: bool) -> list[NvmeHandle]:
        handles: list[NvmeHandle] = []
        found: list[int] = []
        spaces: dict[int, int] = {}
        fmts: dict[int, str] = {}
        holds = self._holds
        with self._index.read(self._lock) as ledger:
            holds.require_open()
            for key in keys:
                record = ledger.get(key)
                if record is None or (exact and not record.exact) or holds.is_doomed(record):
                    break
                extents, nbytes, fmt, whole, depth, ns, row, parent, checksum = record
                # A batch has few of either.
                if ns not in spaces:
                    spaces[ns] = ledger.ref(key, record).ns
                if fmt not in fmts:
                    fmts[fmt] = ledger.fmt(record)
                ref = BlockRef(key, spaces[ns], depth, parent, whole)
                handles.append(NvmeHandle(ref, nbytes, fmts[fmt], owner, extents, checksum=checksum))
                found.append(row)
            holds.lease(handles, found)
            broken = ledger.broken
        rows += found
        if broken:
            self._drop_broken(broken)
        return handles

    def _drop_broken(self, keys: Collection[bytes]) -> None:
        try:
            self._space.drop_broken(keys)
            self._space.forget_plan()
        except TierError as failure:
            _log.warning("%s: altered entries stay in the index: %s", self._counts.name, failure)

    def read(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """See `Tier.read`."""
        check_buffers(items, writable=True)
        with self._lock:
            self._holds.require_open()
            handles = self._holds.require([handle for handle, _ in items], leased=True)
            self._holds.hold(handles)
        sizes = [handle.nbytes for handle in handles]
        moving = transfers([handle.extents for handle in handles], sizes, [out for _, out in items])
        ticket, start = Ticket(), time.perf_counter()

        def move(share: list[int]) -> list[Status]:
            return self._verified([handles[at] for at in share], [moving[at] for at in share], deadline)

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

        Batch(self._blocks, moving, deadline, move, done, Status.MISS).start(self._deadlines)
        return ticket

    def _verified(
        self, handles: Sequence[NvmeHandle], moving: Sequence[Transfer], deadline: float | None
    ) -> list[Status]:
        heads = checksum_heads(handles)
        statuses = []
        for at, checksum in enumerate(self._blocks.read(moving, heads, deadline)):
            handle = handles[at]
            if isinstance(checksum, OSError) and checksum.errno in _LOST_ERRNOS and len(moving) > 1:
                # One bad sector fails all that was read with it in one run.
                (checksum,) = self._blocks.read(moving[at : at + 1], heads[at : at + 1], deadline)  # noqa: PLW2901
            if isinstance(checksum, OSError):
                statuses.append(self._unreadable(handle, checksum))
            else:
                statuses.append(Status.OK if checksum == handle.checksum else self._damaged(handle))
        return statuses

    def _unreadable(self, handle: NvmeHandle, error: OSError) -> Status:
        if isinstance(error, Late):
            return Status.TIMEOUT
        self._counts.failed("read", error)
        self._heal(handle, error)
        return Status.MISS

    def _damaged(self, handle: NvmeHandle) -> Status:
        try:
            dropped = self._drop(handle)
        except TierError as failure:
            _log.warning("%s: a damaged block stays in the index: %s", self._counts.name, failure)
            return Status.CORRUPT
        self._counts.add(self._counts.metrics.corrupt_blocks, dropped)
        # Another process may have dropped the record and reused its pages: a race, no damage.
        return Status.CORRUPT if dropped else Status.MISS

    def _heal(self, handle: NvmeHandle, error: OSError) -> None:
        """Drop what cannot be read again."""
        try:
            if isinstance(error, SegmentLost):
                dropped = self._drop(handle)
                if not dropped:  # healed before: what lies there now is whole
                    return
                lost = dropped + self._space.drop_between(*self._segments.pages_of(error.number))
                self._segments.forget(error.number)
                self._counts.evicted("segment_lost", lost)
            elif error.errno in _LOST_ERRNOS and self._drop(handle):
                self._counts.evicted("read_error", 1)
        except TierError as failure:
            _log.warning("%s: an unreadable block stays in the index: %s", self._counts.name, failure)

    def _drop(self, handle: NvmeHandle) -> int:
        """Drop the record that the handle stands for; 0 if it is another's by now."""
        key = handle.ref.key
        with self._space.changing(reason="damaged") as change:
            record = change.ledger.get(key)
            if record is None or record.page != handle.page or record.checksum != handle.checksum:
                return 0
            change.drop(key, record, spare_leased=False)
        self._space.forget_plan()
        return 1

    def release(self, handles: Sequence[Handle]) -> None:
        """See `Tier.release`. After `close`, which ended all leases, nothing happens."""
        with self._lock:
            if self._holds.closed:
                return
            freed = self._holds.end_leases(self._holds.require(handles, leased=True))
        self._space.free(freed)

    def hint(self, keys: Sequence[bytes], hints: Sequence[Hint]) -> None:
        """See `Tier.hint`. For what counts here see `Recency.fill`."""
        if len(keys) != len(hints):
            raise FormatMismatch(f"{len(keys)} keys, {len(hints)} hints: expected as many of each")
        self._holds.require_open()
        with self._index.read() as ledger:
            found = [(record.row, hint) for key, hint in zip(keys, hints, strict=True) if (record := ledger.get(key))]
        self._recency.hint([row for row, _ in found], [hint for _, hint in found])
