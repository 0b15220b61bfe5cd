"""Writing: from reserved pages to complete bytes to index entries."""

import errno
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.errors import FormatMismatch, LeaseError, TierFull
from kvtier.keys import STORE_KEY_BYTES
from kvtier.nvme.batch import Batch, check_buffer, transfers
from kvtier.nvme.counting import Counts
from kvtier.nvme.extents import PAGE, Extent, pages_for
from kvtier.nvme.holds import NvmeHandle
from kvtier.nvme.io import BlockIO
from kvtier.nvme.ledger import Ledger, Record
from kvtier.nvme.opening import Opened
from kvtier.nvme.space import Change
from kvtier.tiers import (
    BlockRef,
    Completions,
    Exists,
    Full,
    Handle,
    Owner,
    Reservation,
    Status,
    Ticket,
    block_checksum,
)

__all__ = ["Writer"]

_FMT_CHARS = 16  # the width that `block_checksum` gives a format id
_MAX_BYTES = 2**32 - 1


class _Placed(NamedTuple):
    """Extents of the leading records that found room, and why the others did not."""

    extents: list[tuple[Extent, ...]]
    reason: str


class Writer:
    """The writing verbs of `kvtier.tiers.Tier`. Thread-safe.

    Args:
        opened: the directory.
        blocks: moves the bytes.
        completions: where finished tickets go.
        counts: where to count.
        durable: bytes reach the disk before the index names them.
    """

    def __init__(
        self, opened: Opened, blocks: BlockIO, completions: Completions, counts: Counts, *, durable: bool
    ) -> None:
        self._index = opened.index
        self._recency = opened.recency
        self._segments = opened.segments
        self._space = opened.space
        self._holds = opened.holds
        self._lock = opened.space.lock
        self._writer = opened.directory.writer
        self._blocks = blocks
        self._completions = completions
        self._counts = counts
        self._durable = durable

    def reserve(
        self, refs: Sequence[BlockRef], sizes: Sequence[int], fmts: Sequence[str], owner: Owner
    ) -> list[Reservation]:
        """See `Tier.reserve`. An exact record may be reserved over a lossy one and replaces it at `commit`.

        Raises:
            FormatMismatch: a size, format or key that no record can have.
        """
        _check_records(refs, sizes, fmts)
        self._holds.require_open()
        with self._counts.timed("reserve"):
            results = self._claim(refs, sizes)
            wanted = [at for at, result in enumerate(results) if result is None]
            placed = _Placed([], "tier_error")
            try:
                if wanted:
                    placed = self._place([refs[at] for at in wanted], [pages_for(sizes[at]) for at in wanted])
            finally:
                with self._lock:
                    for at, extents in zip(wanted, placed.extents, strict=False):
                        results[at] = handle = NvmeHandle(refs[at], sizes[at], fmts[at], owner, extents)
                        self._holds.reserve(handle)
                    for at in wanted[len(placed.extents) :]:
                        self._holds.pending.discard((refs[at].key, refs[at].exact))
        return self._refused(refs, results, placed.reason)

    def _claim(self, refs: Sequence[BlockRef], sizes: Sequence[int]) -> list[Reservation | None]:
        """What needs no room gets its answer; the keys of the others (None) are this thread's to write."""
        results: list[Reservation | None] = []
        refused: set[bytes] = set()
        with self._index.read(self._lock) as ledger:
            limit = ledger.state.total * PAGE
            for ref, nbytes in zip(refs, sizes, strict=True):
                result: Reservation | None = self._existing(ledger, ref)
                if result is None and ref.parent in refused:
                    result = Full("parent_refused")
                elif result is None and nbytes > limit:
                    result = Full("oversized")
                if result is None:
                    self._holds.pending.add((ref.key, ref.exact))
                if isinstance(result, Full):
                    refused.add(ref.key)
                results.append(result)
        return results

    def _existing(self, ledger: Ledger, ref: BlockRef) -> Exists | None:
        record = ledger.get(ref.key)
        if record is not None and record.exact >= ref.exact:
            return Exists(ready=True)
        pending = self._holds.pending
        if (ref.key, True) in pending or (not ref.exact and (ref.key, False) in pending):
            return Exists(ready=False)
        return None

    def _place(self, refs: Sequence[BlockRef], pages: Sequence[int]) -> _Placed:
        """Reserve pages for as many leading records as the space allows."""

        def protected(ledger: Ledger) -> set[bytes]:
            return set(ledger.ancestors(refs[0].parent))

        placed: list[tuple[Extent, ...]] = []
        scattered = False
        try:
            while len(placed) < len(pages):
                rest = pages[len(placed) :]
                reason = self._space.make(sum(rest), protected, more=scattered)
                with self._index.write() as ledger:
                    taken = ledger.reserve(rest, self._writer)
                    state = ledger.state
                self._counts.sums(state)
                placed += taken
                if reason:
                    return _Placed(placed, reason)
                scattered = not taken
        except TierFull as error:
            self._counts.failed("reserve", error)
            return _Placed(placed, "index_full")
        return _Placed(placed, "")

    def _refused(
        self, refs: Sequence[BlockRef], results: Sequence[Reservation | None], reason: str
    ) -> list[Reservation]:
        """The results, with what found no room and its descendants refused."""
        final: list[Reservation] = []
        refused: set[bytes] = set()
        for ref, result in zip(refs, results, strict=True):
            answer = result or Full("parent_refused" if ref.parent in refused else reason)
            if isinstance(answer, Full):
                refused.add(ref.key)
            final.append(answer)
        for why, count in Counter(answer.reason for answer in final if isinstance(answer, Full)).items():
            self._counts.dropped(why, count)
        return final

    def write(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """See `Tier.write`. The buffers must stay as they are until the ticket is done."""
        for handle, data in items:
            check_buffer(handle, data, writable=False)
        with self._lock:
            self._holds.require_open()
            handles = self._holds.require([handle for handle, _ in items], leased=False)
            for handle in handles:
                handle.checksum = b""
                handle.moves += 1
        moving = transfers(handles, [data for _, data in items])
        checksums = [b""] * len(handles)
        ticket, start = Ticket(), time.perf_counter()

        def move(window: list[int]) -> list[Status]:
            for at in window:
                handle = handles[at]
                checksums[at] = block_checksum(handle.ref, handle.fmt, moving[at].data[: handle.nbytes].data)
            return [self._written(error) for error in self._blocks.write([moving[at] for at in window])]

        def done(statuses: list[Status]) -> None:
            try:
                self._counts.took("write", start)
                self._space.free(self._end_moves(handles, checksums, statuses))
            finally:
                self._completions.finish(ticket, statuses)

        Batch(self._blocks, moving, deadline, move, done, Status.FULL).start()
        return ticket

    def _written(self, error: OSError | None) -> Status:
        if error is None:
            return Status.OK
        self._counts.failed("write", error)
        reason = "no_space_on_device" if error.errno == errno.ENOSPC else "io_error"
        self._counts.dropped(reason, 1)
        return Status.FULL

    def _end_moves(
        self, handles: Sequence[NvmeHandle], checksums: Sequence[bytes], statuses: Sequence[Status]
    ) -> list[int]:
        """Note what is complete; returns the pages of reservations that were aborted meanwhile."""
        freed: list[int] = []
        with self._lock:
            for handle, checksum, status in zip(handles, checksums, statuses, strict=True):
                handle.moves -= 1
                if status is Status.OK:
                    handle.checksum = checksum
                if not handle.moves and handle not in self._holds.reservations:
                    freed.append(handle.page)
        return freed

    def commit(self, handles: Sequence[Handle]) -> None:
        """See `Tier.commit`. What the index cannot take is dropped and counted."""
        with self._lock:
            self._holds.require_open()
            reserved = self._holds.require(handles, leased=False)
            unwritten = next((handle for handle in reserved if handle.moves or not handle.checksum), None)
            if unwritten is not None:
                raise LeaseError(f"block {unwritten.ref.key.hex()} was never completely written: write it or abort")
            self._holds.reservations.difference_update(reserved)
        try:
            self._commit(reserved)
        finally:
            with self._lock:
                for handle in reserved:
                    self._holds.end_reservation(handle)

    def _commit(self, reserved: Sequence[NvmeHandle]) -> None:
        if not reserved:
            return
        try:
            if self._durable:
                self._segments.sync()
            with self._counts.timed("commit"), self._space.changing() as change:
                stored = self._enter(change, reserved)
        except (TierFull, OSError) as error:
            self._counts.failed("commit", error)
            self._counts.dropped("commit_failed", len(reserved))
            self._space.free([handle.page for handle in reserved])
        else:
            self._counts.add(self._counts.metrics.written_bytes, sum(handle.nbytes for handle in stored))

    def _enter(self, change: Change, reserved: Sequence[NvmeHandle]) -> list[NvmeHandle]:
        """Turn reservations into records; returns those that others had not stored before."""
        ledger = change.ledger
        rows = self._recency.take(ledger, len(reserved))
        stored: list[tuple[int, NvmeHandle]] = []
        for handle, row in zip(reserved, rows, strict=True):
            ref = handle.ref
            extents = ledger.end_hold(handle.page, self._writer)
            old = ledger.get(ref.key)
            if not extents or (old is not None and old.exact >= ref.exact):
                ledger.release(extents)
                change.rows.append(row)
                continue
            if old is not None:
                change.drop(ref.key, old, spare_leased=False)
            fmt, ns = ledger.format(handle.fmt), ledger.namespace(ref.ns)
            record = Record(extents, handle.nbytes, fmt, ref.exact, ref.depth, ns, row, ref.parent, handle.checksum)
            ledger.insert(ref.key, record)
            stored.append((row, handle))
        self._recency.fill([row for row, _ in stored], [handle.ref for _, handle in stored])
        return [handle for _, handle in stored]

    def abort(self, handles: Sequence[Handle]) -> None:
        """See `Tier.abort`. After `close`, which ended all reservations, nothing happens."""
        freed: list[int] = []
        with self._lock:
            if self._holds.closed:
                return
            for handle in handles:
                if isinstance(handle, NvmeHandle) and handle in self._holds.reservations:
                    self._holds.end_reservation(handle)
                    if not handle.moves:
                        freed.append(handle.page)
        self._space.free(freed)


def _check_records(refs: Sequence[BlockRef], sizes: Sequence[int], fmts: Sequence[str]) -> None:
    if not len(refs) == len(sizes) == len(fmts):
        raise FormatMismatch(f"{len(refs)} refs, {len(sizes)} sizes, {len(fmts)} formats: expected as many of each")
    for ref, nbytes, fmt in zip(refs, sizes, fmts, strict=True):
        if (
            not 1 <= nbytes < 1 << 32
            or len(ref.key) != STORE_KEY_BYTES
            or not (0 < len(fmt) <= _FMT_CHARS and fmt.isascii())
        ):
            raise FormatMismatch(
                f"record of {nbytes} bytes, format {fmt!r}, key of {len(ref.key)} bytes: expected 1 byte to 4 GiB, "
                f"1..{_FMT_CHARS} ASCII characters and {STORE_KEY_BYTES} bytes"
            )
