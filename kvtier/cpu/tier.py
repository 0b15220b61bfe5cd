"""HostTier: blocks in this machine's memory, the gateway between the device and everything below."""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat

from prometheus_client import Counter as Metric

from kvtier.cpu.holds import HostHandle
from kvtier.cpu.records import RecordTable
from kvtier.cpu.region import PAGE
from kvtier.cpu.slab import HostSlab
from kvtier.errors import FormatMismatch, LeaseError, TierUnavailable
from kvtier.hints import NO_HINT, Hint
from kvtier.keys import STORE_KEY_BYTES
from kvtier.layout import Span
from kvtier.metrics import Metrics
from kvtier.native.checksum import copy_checksum
from kvtier.policies import EvictionPolicy, LruPolicy
from kvtier.tiers import (
    OWN_WORK,
    BlockRef,
    Completions,
    Done,
    Full,
    Handle,
    Owner,
    RegionShare,
    Reservation,
    Status,
    Ticket,
    TierCaps,
    checksum_head,
    expired,
)

__all__ = ["HostTier"]

_FMT_CHARS = 16  # the width that `block_checksum` gives a format id


class HostTier:
    """Implements `kvtier.tiers.AddressableTier` over one slab of shared memory.

    All work runs in the caller's thread: tickets are complete when they are returned. Copies and checksums run
    outside the lock and without the GIL, so threads move bytes in parallel.

    Args:
        capacity_bytes: hard limit, rounded down to 4 KiB pages; every record takes whole pages.
        policy: who leaves first; tail-first LRU by default. The tier is its only user.
        metrics: where to count.
        name: the tier's name in metrics and errors.

    Raises:
        CapacityError: less than one page, or more than this machine has.
        TierUnavailable: the kernel refuses the memory.
    """

    caps = TierCaps(align=PAGE)

    def __init__(
        self,
        capacity_bytes: int,
        *,
        policy: EvictionPolicy | None = None,
        metrics: Metrics | None = None,
        name: str = "host",
    ) -> None:
        self.name = name
        self._slab = HostSlab(capacity_bytes, name=name)
        self._table = RecordTable(self._slab, policy or LruPolicy())
        self._lock = threading.Lock()
        self._completions = Completions()
        self._closed = False
        self._corrupt = 0
        self._metrics = metrics or Metrics()
        self._occupied = self._metrics.occupied_bytes.labels(name)
        self._metrics.capacity_bytes.labels(name).set(self._slab.nbytes)
        if not self._slab.region.hugepages:
            self._metrics.fallbacks.labels(name, "hugepages").inc()

    # ---- readers

    def contains(self, keys: Sequence[bytes], deadline: float | None = None, *, exact: bool = False) -> Ticket:
        """See `Tier.contains`."""
        if expired(deadline):
            return self._finish([Status.TIMEOUT] * len(keys))
        with self._state():
            nodes = self._table.nodes
            if exact:
                good = [(node := nodes.get(key)) is not None and node.extent.ref.exact for key in keys]
            else:
                good = [key in nodes for key in keys]
        return self._finish([Status.OK if found else Status.MISS for found in good])

    def acquire(
        self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None, *, exact: bool = False
    ) -> Ticket:
        """See `Tier.acquire`: verifies the checksum of every block that it hands out.

        The store's own work (`tiers.OWN_WORK`) renews no recency, and counts neither hits nor misses.
        """
        if expired(deadline):
            return self._finish([Status.TIMEOUT] * len(keys))
        with self._timed("acquire"):
            with self._state():
                handles = self._table.lease(keys, owner, exact=exact, renew=not owner.startswith(OWN_WORK))
            statuses = self._verify_run(handles, deadline, repeat(None))
            good = statuses.count(Status.OK)
            if good < len(handles):
                self._give_back(handles[good:])
        self._count_asked(len(keys), good, owner)
        return self._finish(statuses + [_rest(statuses)] * (len(keys) - len(statuses)), handles[:good])

    def _count_asked(self, asked: int, found: int, owner: Owner) -> None:
        if not owner.startswith(OWN_WORK):
            self._count(self._metrics.hit_blocks, found)
            self._count(self._metrics.missed_blocks, asked - found)

    def _verify_run(
        self, handles: Sequence[HostHandle], deadline: float | None, outs: Iterable[memoryview | None]
    ) -> list[Status]:
        """Statuses up to and including the first that is not OK; `outs`: where to copy each, None for nowhere."""
        statuses: list[Status] = []
        for handle, out in zip(handles, outs, strict=False):
            if expired(deadline):
                statuses.append(Status.TIMEOUT)
                break
            statuses.append(self._verify(handle, out))
            if statuses[-1] is not Status.OK:
                break
        return statuses

    def _verify(self, handle: HostHandle, out: memoryview | None) -> Status:
        """Checksum a record, copying it to `out` in the same pass."""
        extent = handle.extent
        head = checksum_head(extent.ref, extent.fmt)
        if copy_checksum(head, _exactly(extent.memory, handle.nbytes), out) == extent.checksum:
            return Status.OK
        with self._changed():
            if extent.node is not None:
                self._table.drop(extent.node)
                self._corrupt += 1
                self._count(self._metrics.corrupt_blocks, 1)
        return Status.CORRUPT

    def _give_back(self, handles: Sequence[HostHandle]) -> None:
        with self._changed():
            # `close` or `release_owner` may have ended these leases meanwhile.
            self._table.release([handle for handle in handles if handle.holder is self._table])

    def read(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """See `Tier.read`. The copy is what is verified, not the original."""
        for handle, out in items:
            _check_buffer(handle, out, writable=True)
        with self._state():
            handles = self._table.require([handle for handle, _ in items], leased=True)
            self._table.hold(handles)
        statuses: list[Status] = []
        try:
            with self._timed("read"):
                for handle, (_, out) in zip(handles, items, strict=True):
                    statuses.append(Status.TIMEOUT if expired(deadline) else self._verify(handle, out))
        finally:
            with self._changed():
                self._table.unhold(handles)
        self._count_bytes(self._metrics.read_bytes, handles, statuses)
        return self._finish(statuses)

    def copy_out(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        owner: Owner,
        deadline: float | None = None,
        *,
        exact: bool = False,
    ) -> Ticket:
        """`acquire`, `read` and `release` of the longest leading run, in one pass over the bytes.

        Each buffer has room for the record of its key.

        Raises:
            FormatMismatch: a record does not fit its buffer, or not as many buffers as keys.
        """
        if len(keys) != len(buffers):
            raise FormatMismatch(f"{len(keys)} keys, {len(buffers)} buffers: expected as many of each")
        with self._timed("read"), self._leased(keys, owner, exact=exact) as handles:
            for handle, out in zip(handles, buffers, strict=False):
                _check_buffer(handle, out, writable=True)
            statuses = self._verify_run(handles, deadline, buffers)
            self._count_bytes(self._metrics.read_bytes, handles[: len(statuses)], statuses)
        self._count_asked(len(keys), statuses.count(Status.OK), owner)
        return self._finish(statuses + [_rest(statuses)] * (len(keys) - len(statuses)))

    @contextmanager
    def _leased(self, keys: Sequence[bytes], owner: Owner, *, exact: bool) -> Iterator[list[HostHandle]]:
        with self._state():
            handles = self._table.lease(keys, owner, exact=exact, renew=not owner.startswith(OWN_WORK))
            self._table.hold(handles)
        try:
            yield handles
        finally:
            self._give_back(handles)
            with self._changed():
                self._table.unhold(handles)

    def release(self, handles: Sequence[Handle]) -> None:
        """See `Tier.release`. After `close`, which ended all leases, nothing happens."""
        with self._changed():
            if not self._closed:
                self._table.release(self._table.require(handles, leased=True))

    def release_owner(self, owner: Owner) -> None:
        """See `Tier.release_owner`."""
        with self._changed():
            held = self._table.held_by(owner)
            self._table.release([handle for handle in held if handle.leased])
            self._table.abort(held)

    # ---- writers

    def reserve(
        self,
        refs: Sequence[BlockRef],
        sizes: Sequence[int],
        fmts: Sequence[str],
        owner: Owner,
        hints: Sequence[Hint] | None = None,
    ) -> list[Reservation]:
        """See `Tier.reserve`. A version of higher fidelity may be reserved over a record; `commit` replaces it then.

        Raises:
            FormatMismatch: a size, format or key that no record can have, or not as many hints.
        """
        wanted = [NO_HINT] * len(refs) if hints is None else hints
        _check_records(refs, sizes, fmts, wanted)
        with self._changed():
            self._require_open()
            evicted = self._table.evicted
            results = self._table.reserve(refs, sizes, fmts, owner, wanted)
            evicted = self._table.evicted - evicted
        if evicted:
            self._metrics.evicted_blocks.labels(self.name, "capacity").inc(evicted)
        for reason, count in Counter(full.reason for full in results if isinstance(full, Full)).items():
            self._metrics.dropped_blocks.labels(self.name, reason).inc(count)
        return results

    def write(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """See `Tier.write`."""
        for handle, data in items:
            _check_buffer(handle, data, writable=False)
        with self._timed("write"):
            statuses = self._fill([handle for handle, _ in items], [data for _, data in items], None, deadline)
        return self._finish(statuses)

    def seal(self, handles: Sequence[Handle], checksums: Sequence[bytes] | None = None) -> None:
        """See `AddressableTier.seal`."""
        self._fill(handles, [None] * len(handles), checksums, None)

    def _fill(
        self,
        handles: Sequence[Handle],
        sources: Sequence[memoryview | None],
        known: Sequence[bytes] | None,
        deadline: float | None,
    ) -> list[Status]:
        """Copy each source (None: the bytes are in place already) and checksum the record, unless it is known."""
        with self._state():
            reserved = self._table.require(handles, leased=False)
            for handle in reserved:
                handle.extent.checksum = b""
            self._table.hold(reserved)
        checksums: list[bytes] = []
        try:
            for handle, source, checksum in zip(reserved, sources, known or repeat(b""), strict=False):
                if expired(deadline):
                    break
                checksums.append(_fill(handle, source, checksum))
        finally:
            with self._changed():
                for handle, checksum in zip(reserved, checksums, strict=False):
                    handle.extent.checksum = checksum
                self._table.unhold(reserved)
        return [Status.OK] * len(checksums) + [Status.TIMEOUT] * (len(reserved) - len(checksums))

    def commit(self, handles: Sequence[Handle]) -> None:
        """See `Tier.commit`."""
        with self._changed():
            self._require_open()
            reserved = self._table.require(handles, leased=False)
            unwritten = next((handle for handle in reserved if not handle.extent.checksum), None)
            if unwritten is not None:
                raise LeaseError(f"block {unwritten.ref.key.hex()} was never completely written: write it or abort")
            self._table.commit(reserved)
        self._count_bytes(self._metrics.written_bytes, reserved, [Status.OK] * len(reserved))

    def abort(self, handles: Sequence[Handle]) -> None:
        """See `Tier.abort`."""
        with self._changed():
            self._table.abort(handle for handle in handles if isinstance(handle, HostHandle))

    # ---- order

    def hint(self, keys: Sequence[bytes], hints: Sequence[Hint]) -> None:
        """See `Tier.hint`.

        Raises:
            FormatMismatch: not as many hints as keys.
        """
        if len(keys) != len(hints):
            raise FormatMismatch(f"{len(keys)} keys, {len(hints)} hints: expected as many of each")
        with self._state():
            self._table.hint(keys, hints)

    def duplicate(self, keys: Sequence[bytes], *, above: bool) -> None:
        """The device holds these records too (or does not any more): while it does, they leave before all others.

        Keys that are absent are ignored.
        """
        with self._state():
            self._table.duplicate(keys, above=above)

    def coldest(self, count: int) -> list[bytes]:
        """Keys of up to `count` records that would be evicted next, in that order. None is."""
        with self._state():
            return self._table.coldest(count)

    def take_evicted(self) -> list[bytes]:
        """Keys of the records evicted since the last call, the latest 65,536 at most."""
        with self._state():
            evictions = list(self._table.evictions)
            self._table.evictions.clear()
        return evictions

    # ---- removal

    def remove(self, keys: Sequence[bytes]) -> Ticket:
        """See `Tier.remove`."""
        with self._changed():
            self._require_open()
            statuses = [Status.OK if key in self._table.nodes else Status.MISS for key in keys]
            self._table.drop_keys(keys)
        return self._finish(statuses)

    def clear(self, ns: int | None = None) -> Ticket:
        """See `Tier.clear`. Reservations stay."""
        with self._changed():
            self._require_open()
            self._drop_namespace(ns)
        return self._finish([Status.OK])

    def _drop_namespace(self, ns: int | None) -> None:
        nodes = self._table.nodes.items()
        self._table.drop_keys([key for key, node in nodes if ns is None or node.extent.ref.ns == ns])

    # ---- memory

    def buffer(self, handle: Handle) -> memoryview:
        """See `AddressableTier.buffer`."""
        live = self._live(handle)
        view = live.extent.memory
        return view.toreadonly() if live.leased else view

    def span(self, handle: Handle) -> Span:
        """See `AddressableTier.span`. Its length is `nbytes`, without padding."""
        return self._slab.region.span(self._live(handle).extent.offset, handle.nbytes)

    def regions(self) -> list[RegionShare]:
        """What `kvtier.cpu.send_regions` sends to a worker, which can only map it for reading."""
        return [self._slab.region.share()]

    # ---- the whole

    def poll(self) -> list[Done]:
        """See `Tier.poll`."""
        return self._completions.poll()

    def stats(self) -> dict[str, int]:
        """Blocks ready; bytes occupied (whole pages; reservations, and removed records that are leased, included);
        capacity_bytes, leases, reservations; evicted and corrupt blocks so far.
        """
        with self._lock:
            return {
                "blocks": len(self._table.nodes),
                "bytes": self._slab.used_bytes,
                "capacity_bytes": self._slab.nbytes,
                "leases": self._table.leases,
                "reservations": self._table.reservations,
                "evicted": self._table.evicted,
                "corrupt": self._corrupt,
            }

    def check(self) -> None:
        """Verify the tier's bookkeeping.

        Raises:
            TierError: an invariant is broken.
        """
        with self._lock:
            self._table.check()

    def flush(self) -> None:
        """See `Tier.flush`: memory is as durable as it gets."""

    def close(self) -> None:
        """See `Tier.close`. Ends all holds; memory that somebody still views goes with the last view."""
        with self._changed():
            if self._closed:
                return
            self._closed = True
            for owner in self._table.owners():
                held = self._table.held_by(owner)
                self._table.release([handle for handle in held if handle.leased])
                self._table.abort(held)
            self._drop_namespace(None)
            self._slab.close()

    @contextmanager
    def _changed(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            finally:
                self._occupied.set(self._slab.used_bytes)

    @contextmanager
    def _state(self) -> Iterator[None]:
        with self._lock:
            self._require_open()
            yield

    @contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._metrics.seconds.labels(self.name, operation).observe(time.perf_counter() - start)

    def _require_open(self) -> None:
        if self._closed:
            raise TierUnavailable(f"tier {self.name} is closed: open another one")

    def _live(self, handle: Handle) -> HostHandle:
        with self._lock:
            return self._table.require([handle])[0]

    def _finish(self, statuses: Sequence[Status], handles: Sequence[Handle] = ()) -> Ticket:
        return self._completions.finish(Ticket(), statuses, handles)

    def _count(self, metric: Metric, amount: int) -> None:
        if amount:
            metric.labels(self.name).inc(amount)

    def _count_bytes(self, metric: Metric, handles: Sequence[Handle], statuses: Sequence[Status]) -> None:
        done = zip(handles, statuses, strict=True)
        self._count(metric, sum(handle.nbytes for handle, status in done if status is Status.OK))


def _rest(statuses: Sequence[Status]) -> Status:
    """What follows a run that ended with these."""
    return Status.TIMEOUT if statuses[-1:] == [Status.TIMEOUT] else Status.MISS


def _fill(handle: HostHandle, source: memoryview | None, known: bytes) -> bytes:
    """Put bytes in place if they are not, clear the padding, and return the checksum, which may be known."""
    target = handle.extent.memory
    if handle.nbytes < target.nbytes:
        # Lower tiers write whole pages: what an earlier record left behind must not reach a disk.
        target[handle.nbytes :] = bytes(target.nbytes - handle.nbytes)
        target = target[: handle.nbytes]
    if known:
        return known
    head = checksum_head(handle.ref, handle.fmt)
    if source is None:
        return copy_checksum(head, target)
    return copy_checksum(head, _exactly(source, handle.nbytes), target)


def _exactly(buffer: memoryview, nbytes: int) -> memoryview:
    return buffer if buffer.nbytes == nbytes else buffer.cast("B")[:nbytes]


def _check_buffer(handle: Handle, data: memoryview, *, writable: bool) -> None:
    if data.nbytes < handle.nbytes or not data.c_contiguous or (writable and data.readonly):
        kind = "writable, contiguous" if writable else "contiguous"
        raise FormatMismatch(
            f"buffer of {data.nbytes} bytes (contiguous={data.c_contiguous}, readonly={data.readonly}): "
            f"this block needs a {kind} one of at least {handle.nbytes} bytes"
        )


def _check_records(refs: Sequence[BlockRef], sizes: Sequence[int], fmts: Sequence[str], hints: Sequence[Hint]) -> None:
    if not len(refs) == len(sizes) == len(fmts) == len(hints):
        raise FormatMismatch(
            f"{len(refs)} refs, {len(sizes)} sizes, {len(fmts)} formats, {len(hints)} hints: expected as many of each"
        )
    known = {fmt for fmt in set(fmts) if 0 < len(fmt) <= _FMT_CHARS and fmt.isascii()}
    for ref, nbytes, fmt in zip(refs, sizes, fmts, strict=True):
        if nbytes < 1 or len(ref.key) != STORE_KEY_BYTES or fmt not in known:
            raise FormatMismatch(
                f"record of {nbytes} bytes, format {fmt!r}, key of {len(ref.key)} bytes: expected at least 1 byte, "
                f"1..{_FMT_CHARS} ASCII characters and {STORE_KEY_BYTES} bytes"
            )
