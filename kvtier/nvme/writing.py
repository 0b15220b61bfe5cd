"""Writing: from reserved pages to complete bytes to index entries."""

import errno
import time
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import cast

from kvtier.errors import FormatMismatch, LeaseError, TierFull
from kvtier.formats import fidelity
from kvtier.hints import Hint
from kvtier.keys import STORE_KEY_BYTES
from kvtier.native.checksum import copy_checksums
from kvtier.nvme.batch import Batch, Deadlines, check_buffers
from kvtier.nvme.counting import Counts
from kvtier.nvme.extents import PAGE, Extent, merged, pages_for
from kvtier.nvme.grouping import GroupCommit
from kvtier.nvme.holds import NvmeHandle, Rank, record_rank
from kvtier.nvme.io import BlockIO, transfers
from kvtier.nvme.ledger import Ledger, Record
from kvtier.nvme.opening import Opened
from kvtier.nvme.segments import Late
from kvtier.nvme.space import Change, Placed
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
    checksum_heads,
)

__all__ = ["Writer"]

_FMT_CHARS = 16  # the width that `block_checksum` gives a format id
_SIZES = 1 << 32  # which a record's bytes are counted in


class _Disowned(TierFull):
    """Somebody removed this writer's lock file, and others took its pages."""


class Writer:
    """The writing verbs of `kvtier.tiers.Tier`. Thread-safe.

    Args:
        opened: the directory.
        blocks: moves the bytes.
        deadlines: ends what did not begin in time.
        completions: where finished tickets go.
        counts: where to count.
        durable: bytes reach the disk before the index names them.
    """

    def __init__(
        self,
        opened: Opened,
        blocks: BlockIO,
        deadlines: Deadlines,
        completions: Completions,
        counts: Counts,
        *,
        durable: bool,
    ) -> None:
        self._index = opened.index
        self._recency = opened.recency
        self._segments = opened.segments
        self._space = opened.space
        self._holds = opened.holds
        self._lock = opened.space.lock
        self._writer = opened.directory.writer
        self._blocks = blocks
        self._deadlines = deadlines
        self._completions = completions
        self._counts = counts
        self._durable = durable
        self._group = GroupCommit(self._commit)
        self._per_day = 0.0

    def reserve(
        self,
        refs: Sequence[BlockRef],
        sizes: Sequence[int],
        fmts: Sequence[str],
        owner: Owner,
        hints: Sequence[Hint] | None = None,
    ) -> list[Reservation]:
        """See `Tier.reserve`.

        Raises:
            FormatMismatch: a size, format or key that no record can have.
        """
        _check_records(refs, sizes, fmts, hints)
        self._holds.require_open()
        with self._counts.timed("reserve"):
            fidelities = {fmt: fidelity(fmt) for fmt in set(fmts)}
            ranks = [(ref.exact, fidelities[fmt]) for ref, fmt in zip(refs, fmts, strict=True)]
            results = self._claim(refs, sizes, ranks)
            wanted = [at for at, result in enumerate(results) if result is None]
            placed = Placed([], "tier_error")
            try:
                if wanted:
                    pages, keys = [pages_for(sizes[at]) for at in wanted], {refs[at].key for at in wanted}
                    parents = {parent for at in wanted if (parent := refs[at].parent) is not None}
                    placed = self._space.place(pages, parents - keys)
            finally:
                with self._lock:
                    for at, extents in zip(wanted, placed.extents, strict=False):
                        hint = hints[at] if hints else None
                        handle = NvmeHandle(refs[at], sizes[at], fmts[at], owner, extents, hint=hint, rank=ranks[at])
                        results[at] = handle
                        self._holds.reservations.add(handle)
                    for at in wanted[len(placed.extents) :]:
                        self._holds.break_promise(refs[at].key, ranks[at])
        return self._refused(refs, results, placed.reason)

    def _claim(self, refs: Sequence[BlockRef], sizes: Sequence[int], ranks: Sequence[Rank]) -> list[Reservation | None]:
        """What needs no room gets its answer; the keys of the others (None) are this thread's to write."""
        results: list[Reservation | None] = []
        refused: set[bytes] = set()
        with self._index.read(self._lock) as ledger:
            limit = ledger.total * PAGE
            found = ledger.find([ref.key for ref in refs])
            for ref, nbytes, rank, record in zip(refs, sizes, ranks, found, strict=True):
                result: Reservation | None = None
                if record is not None and record_rank(record.exact, ledger.fmt(record)) >= rank:
                    result = Exists(ready=True)
                elif ref.parent in refused:
                    result = Full("parent_refused")
                elif nbytes > limit:
                    result = Full("oversized")
                elif not self._holds.promise(ref.key, rank):
                    result = Exists(ready=False)
                if type(result) is Full:
                    refused.add(ref.key)
                results.append(result)
        return results

    def _refused(self, refs: Sequence[BlockRef], results: list[Reservation | None], reason: str) -> list[Reservation]:
        """The results, with what found no room and its descendants refused."""
        if all(type(result) is NvmeHandle for result in results):
            return cast("list[Reservation]", results)
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
        check_buffers(items, writable=False)
        # Here and not in the workers, which have the batch before on the disk meanwhile.
        heads, sizes = checksum_heads([handle for handle, _ in items]), [handle.nbytes for handle, _ in items]
        buffers = [data for _, data in items]
        checksums = copy_checksums(heads, list(buffers), [None] * len(buffers), sizes)
        with self._lock:
            self._holds.require_open()
            handles = self._holds.require([handle for handle, _ in items], leased=False)
            for handle in handles:
                handle.checksum = b""
                handle.moves += 1
        moving = transfers([handle.extents for handle in handles], sizes, buffers)
        ticket, start = Ticket(), time.perf_counter()

        def move(share: list[int]) -> list[Status]:
            return [self._written(error) for error in self._blocks.write([moving[at] for at in share], deadline)]

        def done(statuses: list[Status]) -> None:
            try:
                self._counts.took("write", start)
                self._space.free(self._end_moves(handles, checksums, statuses))
            finally:
                self._completions.finish(ticket, statuses)

        Batch(self._blocks, moving, deadline, move, done, Status.FULL).start(self._deadlines)
        return ticket

    def _written(self, error: OSError | None) -> Status:
        if error is None:
            return Status.OK
        if isinstance(error, Late):
            return Status.TIMEOUT
        self._counts.failed("write", error)
        reason = "no_space_on_device" if error.errno == errno.ENOSPC else "io_error"
        self._counts.dropped(reason, 1)
        return Status.FULL

    def _end_moves(
        self, handles: Sequence[NvmeHandle], checksums: Sequence[bytes], statuses: Sequence[Status]
    ) -> list[Extent]:
        """Note what is complete; returns the pages of reservations that were aborted meanwhile."""
        freed: list[Extent] = []
        with self._lock:
            for handle, checksum, status in zip(handles, checksums, statuses, strict=True):
                handle.moves -= 1
                if status is Status.OK:
                    handle.checksum = checksum
                if not handle.moves and handle not in self._holds.reservations:
                    freed += handle.extents
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
            if reserved:
                self._group(reserved)
        finally:
            with self._lock:
                self._holds.end_reservations(reserved)

    def _commit(self, reserved: Sequence[NvmeHandle]) -> None:
        try:
            if self._durable:
                self._segments.sync()
            with self._counts.timed("commit"), self._space.changing() as change:
                stored = self._enter(change, reserved)
        except (TierFull, OSError) as error:
            self._counts.failed("commit", error)
            self._counts.dropped("commit_failed", len(reserved))
            if isinstance(error, _Disowned):
                self._space.disown()
            else:
                self._space.free([extent for handle in reserved for extent in handle.extents])
        else:
            self._counts.add(self._counts.metrics.written_bytes, sum(handle.nbytes for handle in stored))

    def _enter(self, change: Change, reserved: Sequence[NvmeHandle]) -> list[NvmeHandle]:
        """Turn reservations into records; returns those that others had not stored before."""
        ledger = change.ledger
        lost = [
            run
            for run in merged(extent for handle in reserved for extent in handle.extents)
            if not ledger.unhold(run, self._writer)
        ]
        if lost:
            raise _Disowned(
                f"pages {lost[0].page}..{lost[0].end - 1} were reclaimed from this writer as from a dead one"
            )
        stored = self._settle(change, reserved)
        rows = self._recency.take(ledger, len(stored))
        fmts = {fmt: ledger.format(fmt) for fmt in {handle.fmt for handle in stored}}
        spaces = {ns: ledger.namespace(ns) for ns in {handle.ref.ns for handle in stored}}
        for handle, row in zip(stored, rows, strict=True):
            key, ns, depth, parent, exact = handle.ref
            fmt, space = fmts[handle.fmt], spaces[ns]
            record = Record(handle.extents, handle.nbytes, fmt, exact, depth, space, row, parent, handle.checksum)
            ledger.insert(key, record)
        change.stored = [handle.ref for handle in stored]
        self._recency.fill(ledger, rows, change.stored, [handle.hint for handle in stored])
        self._space.stock_up(change, sum(pages_for(handle.nbytes) for handle in reserved))
        self._charge(ledger, sum(handle.nbytes for handle in reserved))
        return stored

    @staticmethod
    def _settle(change: Change, reserved: Sequence[NvmeHandle]) -> list[NvmeHandle]:
        """Those that become records: better than what is there, and the best of those with their key."""
        ledger = change.ledger
        stored: dict[bytes, NvmeHandle] = {}
        found = ledger.find([handle.ref.key for handle in reserved])
        for handle, old in zip(reserved, found, strict=True):
            key = handle.ref.key
            if key in stored:
                worse, stored[key] = sorted((stored[key], handle), key=attrgetter("rank"))
                change.freed += worse.extents
            elif old is None or record_rank(old.exact, ledger.fmt(old)) < handle.rank:
                if old is not None:
                    change.drop(key, old, spare_leased=False)
                stored[key] = handle
            else:
                change.freed += handle.extents
        return list(stored.values())

    def _charge(self, ledger: Ledger, nbytes: int) -> None:
        """Count bytes written against the directory's budget, if any process ever had one."""
        meter = ledger.meter
        per_day = self._per_day or meter.per_day
        if per_day:
            ledger.meter = meter._replace(per_day=per_day).charged(nbytes, time.time())

    def ahead(self, bytes_per_day: int) -> float:
        """See `MeteredTier.ahead`."""
        self._holds.require_open()
        self._per_day = float(bytes_per_day)
        with self._index.read() as ledger:
            meter = ledger.meter
        # Not before: what another process wrote meanwhile is no clock that was set back.
        now = time.time()
        if meter.per_day == 0 or now < meter.since:
            # Processes without a budget count from the first one on, which may be idle itself. And where the clock was
            # set back, nothing accrues until somebody says so, and if nothing may be written nobody does.
            with self._index.write() as ledger:
                self._charge(ledger, 0)
        return meter._replace(per_day=self._per_day).at(now).ahead

    def abort(self, handles: Sequence[Handle]) -> None:
        """See `Tier.abort`. After `close`, which ended all reservations, nothing happens."""
        freed: list[Extent] = []
        with self._lock:
            if self._holds.closed:
                return
            ended = {handle for handle in handles if isinstance(handle, NvmeHandle)} & self._holds.reservations
            self._holds.end_reservations(ended)
            for handle in ended:
                if not handle.moves:
                    freed += handle.extents
        self._space.free(freed)


def _check_records(
    refs: Sequence[BlockRef], sizes: Sequence[int], fmts: Sequence[str], hints: Sequence[Hint] | None
) -> None:
    if not len(refs) == len(sizes) == len(fmts) == len(refs if hints is None else hints):
        given = len(refs) if hints is None else len(hints)
        raise FormatMismatch(
            f"{len(refs)} refs, {len(sizes)} sizes, {len(fmts)} formats, {given} hints: expected as many of each"
        )
    known = {fmt for fmt in set(fmts) if 0 < len(fmt) <= _FMT_CHARS and fmt.isascii()}
    fits = min(sizes, default=1) >= 1 and max(sizes, default=1) < _SIZES
    if fits and {len(ref.key) for ref in refs} <= {STORE_KEY_BYTES} and known.issuperset(fmts):
        return
    for ref, nbytes, fmt in zip(refs, sizes, fmts, strict=True):
        if not 1 <= nbytes < _SIZES or len(ref.key) != STORE_KEY_BYTES or fmt not in known:
            raise FormatMismatch(
                f"record of {nbytes} bytes, format {fmt!r}, key of {len(ref.key)} bytes: expected 1 byte to 4 GiB, "
                f"1..{_FMT_CHARS} ASCII characters and {STORE_KEY_BYTES} bytes"
            )
