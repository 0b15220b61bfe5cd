"""NvmeTier: blocks in segment files, named by an index, shared by all processes on a directory.

put     reserve (index: free -> held) -> write (bytes) -> commit (index: held -> record)
get     acquire (index look-ups) -> read (bytes, checksum)

An index entry is made after its bytes are written, and nowhere else: whatever process dies at whatever instant,
what the index names is complete, and what is held by nobody alive is reclaimed.
"""

import errno
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from prometheus_client import Counter as Metric

from kvtier.errors import FormatMismatch, LeaseError, TierError, TierFull, TierUnavailable
from kvtier.keys import STORE_KEY_BYTES
from kvtier.metrics import Metrics
from kvtier.nvme.batch import Batch
from kvtier.nvme.checking import check_directory
from kvtier.nvme.extents import PAGE, Extent, pages_for
from kvtier.nvme.holds import NvmeHandle
from kvtier.nvme.io import BlockIO, Transfer
from kvtier.nvme.ledger import Ledger, Record
from kvtier.nvme.opening import NvmeOptions, open_directory
from kvtier.nvme.space import Change
from kvtier.tiers import (
    BlockRef,
    Completions,
    Done,
    Exists,
    Full,
    Handle,
    Owner,
    Reservation,
    Status,
    Ticket,
    TierCaps,
    block_checksum,
    expired,
)

__all__ = ["NvmeTier"]

_log = logging.getLogger(__name__)

_FMT_CHARS = 16  # the width that `block_checksum` gives a format id
_LOOKUPS = 256
_DROPS = 512


class _Placed(NamedTuple):
    """Extents of the leading records that found room, and why the others did not."""

    extents: list[tuple[Extent, ...]]
    reason: str


class NvmeTier:
    """Implements `kvtier.tiers.Tier` on a directory that outlives the process and that others may share.

    Look-ups run in the caller's thread; bytes move and are verified in the tier's own. Several processes may open
    one directory: they share its capacity and its blocks, while leases bind this process only. A block that another
    process evicted between look-up and read fails its checksum and is a miss.

    Closure is lazy: a block below a removed one stays in the index, unreachable for `acquire`, and is evicted first.

    Args:
        path: the directory, made if absent. One tier per directory and process.
        capacity_bytes: hard limit for all processes together, in whole 4 KiB pages, at least 1 MiB. A smaller one
            than before drops what lies beyond it. The index comes on top, about 0.3 KiB per block.
        options: see `NvmeOptions`.
        metrics: where to count.
        name: the tier's name in metrics and errors.

    Raises:
        CapacityError, ConfigError, TierUnavailable: see `open_directory`.
    """

    caps = TierCaps(variable_size=True, durable=True, shared=True, align=PAGE)

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        options: NvmeOptions | None = None,
        *,
        metrics: Metrics | None = None,
        name: str = "nvme",
    ) -> None:
        options = options or NvmeOptions()
        self.name = name
        self._metrics = metrics or Metrics()
        self._opened = open_directory(Path(path), capacity_bytes, options, self._metrics, name)
        self._index = self._opened.index
        self._recency = self._opened.recency
        self._segments = self._opened.segments
        self._space = self._opened.space
        self._holds = self._opened.holds
        self._lock = self._space.lock
        self._writer = self._opened.directory.writer
        self._durable = options.durable
        self._blocks = BlockIO(self._segments, options.io_threads, f"kvtier-{name}")
        self._completions = Completions()
        self._closed = False

    # ---- readers

    def contains(self, keys: Sequence[bytes], deadline: float | None = None) -> Ticket:
        """See `Tier.contains`."""
        self._require_open()
        if expired(deadline):
            return self._finish([Status.TIMEOUT] * len(keys))
        with self._index.read() as ledger:
            statuses = [Status.OK if ledger.has(key) else Status.MISS for key in keys]
        return self._finish(statuses)

    def acquire(self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None) -> Ticket:
        """See `Tier.acquire`. Verifies that the blocks are indexed; `read` verifies their bytes."""
        self._require_open()
        if expired(deadline):
            return self._finish([Status.TIMEOUT] * len(keys))
        handles: list[NvmeHandle] = []
        rows: list[int] = []
        with self._timed("acquire"):
            for start in range(0, len(keys), _LOOKUPS):
                batch = keys[start : start + _LOOKUPS]
                handles += self._lease(batch, owner, rows)
                if len(handles) < start + len(batch):
                    break
            self._recency.renew(rows)
        self._count(self._metrics.hit_blocks, len(handles))
        self._count(self._metrics.missed_blocks, len(keys) - len(handles))
        missing = [Status.MISS] * (len(keys) - len(handles))
        return self._finish([Status.OK] * len(handles) + missing, handles)

    def _lease(self, keys: Sequence[bytes], owner: Owner, rows: list[int]) -> list[NvmeHandle]:
        handles: list[NvmeHandle] = []
        with self._index.read(self._lock) as ledger:
            self._require_open()
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
            _check_buffer(handle, out, writable=True)
        with self._lock:
            self._require_open()
            handles = self._holds.require([handle for handle, _ in items], leased=True)
            self._holds.hold(handles)
        transfers = _transfers(handles, [out for _, out in items])
        ticket, start = Ticket(), time.perf_counter()

        def move(window: list[int]) -> list[Status]:
            errors = self._blocks.read([transfers[at] for at in window])
            return [self._verified(handles[at], transfers[at], error) for at, error in zip(window, errors, strict=True)]

        def done(statuses: list[Status]) -> None:
            try:
                with self._lock:
                    freed = self._holds.unhold(handles)
                self._count_bytes(self._metrics.read_bytes, handles, statuses)
                self._observe("read", start)
                self._free(freed)
            finally:
                self._completions.finish(ticket, statuses)

        Batch(self._blocks, transfers, deadline, move, done, Status.MISS).start()
        return ticket

    def _verified(self, handle: NvmeHandle, transfer: Transfer, error: OSError | None) -> Status:
        if error is not None:
            self._io_error("read", error)
            return Status.MISS
        if block_checksum(handle.ref, handle.fmt, transfer.data[: handle.nbytes].data) == handle.checksum:
            return Status.OK
        try:
            return self._remove_damaged(handle)
        except TierError as failure:
            _log.warning("%s: a damaged block stays in the index: %s", self.name, failure)
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
        self._count(self._metrics.corrupt_blocks, 1)
        return Status.CORRUPT

    def release(self, handles: Sequence[Handle]) -> None:
        """See `Tier.release`. After `close`, which ended all leases, nothing happens."""
        with self._lock:
            if self._closed:
                return
            freed = self._holds.end_leases(self._holds.require(handles, leased=True))
        self._free(freed)

    # ---- writers

    def reserve(
        self, refs: Sequence[BlockRef], sizes: Sequence[int], fmts: Sequence[str], owner: Owner
    ) -> list[Reservation]:
        """See `Tier.reserve`. An exact record may be reserved over a lossy one and replaces it at `commit`.

        Raises:
            FormatMismatch: a size, format or key that no record can have.
        """
        _check_records(refs, sizes, fmts)
        self._require_open()
        with self._timed("reserve"):
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
                self._space.publish(state)
                placed += taken
                if reason:
                    return _Placed(placed, reason)
                scattered = not taken
        except TierFull as error:
            self._metrics.errors.labels(self.name, "reserve").inc()
            _log.warning("%s: no room in the index: %s", self.name, error)
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
            self._metrics.dropped_blocks.labels(self.name, why).inc(count)
        return final

    def write(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """See `Tier.write`. The buffers must stay as they are until the ticket is done."""
        for handle, data in items:
            _check_buffer(handle, data, writable=False)
        with self._lock:
            self._require_open()
            handles = self._holds.require([handle for handle, _ in items], leased=False)
            for handle in handles:
                handle.checksum = b""
                handle.moves += 1
        transfers = _transfers(handles, [data for _, data in items])
        checksums = [b""] * len(handles)
        ticket, start = Ticket(), time.perf_counter()

        def move(window: list[int]) -> list[Status]:
            for at in window:
                handle = handles[at]
                checksums[at] = block_checksum(handle.ref, handle.fmt, transfers[at].data[: handle.nbytes].data)
            return [self._written(error) for error in self._blocks.write([transfers[at] for at in window])]

        def done(statuses: list[Status]) -> None:
            try:
                self._observe("write", start)
                self._free(self._end_moves(handles, checksums, statuses))
            finally:
                self._completions.finish(ticket, statuses)

        Batch(self._blocks, transfers, deadline, move, done, Status.FULL).start()
        return ticket

    def _written(self, error: OSError | None) -> Status:
        if error is None:
            return Status.OK
        self._io_error("write", error)
        reason = "no_space_on_device" if error.errno == errno.ENOSPC else "io_error"
        self._metrics.dropped_blocks.labels(self.name, reason).inc()
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
            self._require_open()
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
            with self._timed("commit"), self._space.changing() as change:
                stored = self._enter(change, reserved)
        except (TierFull, OSError) as error:
            self._io_error("commit", error)
            self._metrics.dropped_blocks.labels(self.name, "commit_failed").inc(len(reserved))
            self._free([handle.page for handle in reserved])
        else:
            self._count(self._metrics.written_bytes, sum(handle.nbytes for handle in stored))

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
                ledger.free.add(extents)
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
        """See `Tier.abort`."""
        freed: list[int] = []
        with self._lock:
            for handle in handles:
                if isinstance(handle, NvmeHandle) and handle in self._holds.reservations:
                    self._holds.end_reservation(handle)
                    if not handle.moves:
                        freed.append(handle.page)
        self._free(freed)

    # ---- removal

    def remove(self, keys: Sequence[bytes]) -> Ticket:
        """See `Tier.remove`. Descendants become unreachable for `acquire` now, and are the next to be evicted."""
        self._require_open()
        statuses: list[Status] = []
        for start in range(0, len(keys), _DROPS):
            with self._space.changing() as change:
                for key in keys[start : start + _DROPS]:
                    record = change.ledger.get(key)
                    if record is not None:
                        change.drop(key, record, spare_leased=False)
                    statuses.append(Status.MISS if record is None else Status.OK)
        self._space.forget_plan()
        return self._finish(statuses)

    def clear(self, ns: int | None = None) -> Ticket:
        """See `Tier.clear`. Reservations stay."""
        self._require_open()
        start = bytes(STORE_KEY_BYTES)
        while start:
            with self._space.changing() as change:
                page = list(islice(change.ledger.records(start), _DROPS))
                for key, record in page:
                    if ns is None or change.ledger.ref(key, record).ns == ns:
                        change.drop(key, record, spare_leased=False)
            start = page[-1][0] + b"\0" if len(page) == _DROPS else b""
        self._space.forget_plan()
        return self._finish([Status.OK])

    # ---- the whole

    def poll(self) -> list[Done]:
        """See `Tier.poll`."""
        return self._completions.poll()

    def stats(self) -> dict[str, int]:
        """Of all processes: blocks; bytes occupied (whole pages; reservations, and removed records that are leased,
        included), capacity_bytes, free_bytes of the capacity, segments, index_bytes. Of this one: leases, reservations.
        """
        self._require_open()
        with self._index.read() as ledger:
            state, blocks = ledger.state, ledger.blocks
        with self._lock:
            leases, reservations = len(self._holds.leases), len(self._holds.reservations)
        return {
            "blocks": blocks,
            "bytes": state.occupied * PAGE,
            "capacity_bytes": state.total * PAGE,
            "free_bytes": (state.total - state.occupied) * PAGE,
            "segments": self._segments.count(),
            "index_bytes": self._index.nbytes(),
            "leases": leases,
            "reservations": reservations,
        }

    def check(self, *, verify: bool = False) -> dict[str, int]:
        """Count pages and what is wrong with them; see `kvtier.nvme.checking`. `verify`: read every block too."""
        self._require_open()
        return check_directory(self._opened, self._blocks, verify=verify)

    def flush(self) -> None:
        """See `Tier.flush`: everything committed survives a power loss. What the disk refuses is counted."""
        self._require_open()
        self._sync()

    def _sync(self) -> bool:
        try:
            self._segments.sync()
            self._index.flush()
            self._recency.flush()
        except (OSError, TierFull) as error:
            self._io_error("flush", error)
            return False
        return True

    def close(self) -> None:
        """See `Tier.close`. Ends all holds; the last process leaves the directory marked clean."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._blocks.close()
        opened = self._opened
        try:
            self._space.close()
            with opened.directory.exclusive():
                self._space.reclaim_from({self._writer})
                opened.directory.leave(clean=self._sync(), damaged=self._index.damaged)
        except (TierError, OSError) as error:
            self._io_error("close", error)
            with opened.directory.exclusive():
                opened.directory.leave(clean=False, damaged=self._index.damaged)
        finally:
            self._index.close()
            self._recency.close()
            self._segments.close()
            opened.directory.drop()

    def _require_open(self) -> None:
        if self._closed:
            raise TierUnavailable(f"tier {self.name} is closed: open another one")

    def _free(self, pages: Sequence[int]) -> None:
        if pages:
            self._space.free(pages)

    def _finish(self, statuses: Sequence[Status], handles: Sequence[Handle] = ()) -> Ticket:
        return self._completions.finish(Ticket(), statuses, handles)

    @contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._observe(operation, start)

    def _observe(self, operation: str, start: float) -> None:
        self._metrics.seconds.labels(self.name, operation).observe(time.perf_counter() - start)

    def _io_error(self, operation: str, error: Exception) -> None:
        self._metrics.errors.labels(self.name, operation).inc()
        _log.warning("%s: %s failed: %s", self.name, operation, error)

    def _count(self, metric: Metric, amount: int) -> None:
        if amount:
            metric.labels(self.name).inc(amount)

    def _count_bytes(self, metric: Metric, handles: Sequence[Handle], statuses: Sequence[Status]) -> None:
        done = zip(handles, statuses, strict=True)
        self._count(metric, sum(handle.nbytes for handle, status in done if status is Status.OK))


def _transfers(handles: Sequence[NvmeHandle], buffers: Sequence[memoryview]) -> list[Transfer]:
    return [
        Transfer(handle.extents, handle.nbytes, np.frombuffer(buffer, np.uint8))
        for handle, buffer in zip(handles, buffers, strict=True)
    ]


def _check_buffer(handle: Handle, data: memoryview, *, writable: bool) -> None:
    if data.nbytes < handle.nbytes or not data.c_contiguous or (writable and data.readonly):
        kind = "writable, contiguous" if writable else "contiguous"
        raise FormatMismatch(
            f"buffer of {data.nbytes} bytes (contiguous={data.c_contiguous}, readonly={data.readonly}): "
            f"this block needs a {kind} one of at least {handle.nbytes} bytes"
        )


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
