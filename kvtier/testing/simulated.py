"""SimulatedTier: a tier that keeps no bytes, on a medium of a given speed, in any time you like.

Capacity, eviction, leases, closure and fidelity are those of the host tier's own record table; only bytes are not
there: what a read brings back follows from the record (by default `kvtier.testing.blocks.content`). So a tier of
many terabytes fits into a test or a replay.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np
from prometheus_client import Counter as Metric

from kvtier.cpu.holds import Extent, HostHandle, Lease
from kvtier.cpu.records import RecordTable
from kvtier.cpu.region import PAGE, round_up
from kvtier.cpu.slab import HostSlab
from kvtier.errors import CapacityError, FormatMismatch, LeaseError, TierUnavailable
from kvtier.hints import NO_HINT, Hint
from kvtier.metrics import Metrics
from kvtier.policies import EvictionPolicy, LruPolicy
from kvtier.testing.blocks import content
from kvtier.tiers import (
    OWN_WORK,
    BlockRef,
    Completions,
    Done,
    Full,
    Handle,
    Owner,
    Reservation,
    Status,
    Ticket,
    TierCaps,
    counted,
    expired,
    namespaces_in,
)

__all__ = ["Medium", "SimulatedTier"]

_WRITTEN, _DAMAGED = b"written", b"damaged"


class Medium:
    """One queue of a given speed: transfers run one after the other. Thread-safe.

    Args:
        bytes_per_second, latency_seconds: of each transfer.
        clock: seconds, in whose time transfers take place.
        time_scale: callers wait for their transfers, so many times faster than they take; None: transfers are
            accounted for and nobody waits.

    Raises:
        CapacityError: no such speed.
    """

    def __init__(
        self,
        bytes_per_second: float = 6e9,
        latency_seconds: float = 1e-4,
        *,
        clock: Callable[[], float] = time.monotonic,
        time_scale: float | None = None,
    ) -> None:
        if not bytes_per_second > 0 or not latency_seconds >= 0 or not (time_scale is None or time_scale > 0):
            raise CapacityError(
                f"medium of {bytes_per_second} B/s, {latency_seconds} s, time scale {time_scale}: expected a rate and "
                "a scale above 0 and a latency of at least 0"
            )
        self.busy_seconds = 0.0
        self._rate = bytes_per_second
        self._latency = latency_seconds
        self._clock = clock
        self._scale = time_scale
        self._free_at = 0.0
        self._lock = threading.Lock()

    def transfer(self, nbytes: int, deadline: float | None = None) -> bool:
        """Move bytes; False where they would arrive after the deadline, and then nothing is moved."""
        took = self._latency + nbytes / self._rate
        with self._lock:
            now = self._clock()
            end = max(now, self._free_at) + took
            wait = 0.0 if self._scale is None else (end - now) / self._scale
            if deadline is not None and time.monotonic() + wait > deadline:
                return False
            self._free_at = end
            self.busy_seconds += took
        if wait:
            time.sleep(wait)
        return True


class _Ledger:
    """Stands where the record table expects a slab: counts pages, and has none."""

    over = False  # it is never made smaller

    def __init__(self, nbytes: int) -> None:
        self.nbytes = self.capacity = nbytes - nbytes % PAGE
        self.used_bytes = 0
        self._offset = 0
        self._live: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int | None:
        offsets = self.allocate_many(nbytes, 1)
        return offsets[0] if offsets else None

    def allocate_many(self, nbytes: int, count: int) -> list[int]:
        size = round_up(nbytes)
        count = min(count, (self.nbytes - self.used_bytes) // size)
        offsets = list(range(self._offset, self._offset + count * size, size))
        self._offset += count * size
        self.used_bytes += count * size
        self._live.update(dict.fromkeys(offsets, size))
        return offsets

    def free(self, offset: int) -> None:
        self.used_bytes -= self._live.pop(offset)

    def check(self) -> None:
        """Nothing to verify: the two counts cannot disagree."""


class SimulatedTier:
    """Implements `kvtier.tiers.Tier` without bytes. All work runs in the caller's thread.

    It passes all of `TierSuite`, whose bytes are `content`. What it cannot show is what it has not: padding,
    checksums of real data, and bytes other than those that `fill` makes.

    Args:
        capacity_bytes: hard limit; every record takes whole 4 KiB pages.
        medium: how fast it is.
        policy: who leaves first; tail-first LRU by default.
        metrics: where to count.
        name: the tier's name in metrics and errors.
        fill: writes the bytes of a record into a buffer of the record's length.
    """

    caps = TierCaps(variable_size=True)

    def __init__(
        self,
        capacity_bytes: int,
        *,
        medium: Medium | None = None,
        policy: EvictionPolicy | None = None,
        metrics: Metrics | None = None,
        name: str = "nvme",
        fill: Callable[[BlockRef, memoryview], None] | None = None,
    ) -> None:
        if capacity_bytes < PAGE:
            raise CapacityError(f"{name}: capacity of {capacity_bytes} bytes: expected at least {PAGE}")
        self.name = name
        self.medium = medium or Medium()
        self._fill = fill or _fill_with_content
        self._ledger = _Ledger(capacity_bytes)
        self._table = RecordTable(cast("HostSlab", self._ledger), policy or LruPolicy())
        self._lock = threading.Lock()
        self._completions = Completions()
        self._metrics = metrics or Metrics()
        self._metrics.capacity_bytes.labels(name).set(self._ledger.nbytes)
        self._corrupt = 0
        self._closed = False

    # ---- readers

    def contains(self, keys: Sequence[bytes], deadline: float | None = None, *, exact: bool = False) -> Ticket:
        """See `Tier.contains`."""
        if expired(deadline):
            return self._finish([Status.TIMEOUT] * len(keys))
        with self._open():
            nodes = [self._table.nodes.get(key) for key in keys]
            found = [node is not None and (node.extent.ref.exact or not exact) for node in nodes]
        return self._finish([Status.OK if here else Status.MISS for here in found])

    def acquire(
        self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None, *, exact: bool = False
    ) -> Ticket:
        """See `Tier.acquire`."""
        if expired(deadline):
            return self._finish([Status.TIMEOUT] * len(keys))
        with self._open():
            handles = self._table.lease(keys, owner, exact=exact, renew=not owner.startswith(OWN_WORK))
        for handle in handles:
            handle.checksum = b""  # the table's marks are no checksums
        missed = len(keys) - len(handles)
        if counted(owner):
            self._metrics.hit_blocks.labels(self.name).inc(len(handles))
            self._metrics.missed_blocks.labels(self.name).inc(missed)
        return self._finish([Status.OK] * len(handles) + [Status.MISS] * missed, handles)

    def read(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """See `Tier.read`. A record that `damage` named is CORRUPT."""
        for handle, out in items:
            if out.readonly or out.nbytes < handle.nbytes:
                raise FormatMismatch(f"buffer of {out.nbytes} bytes: expected a writable one of {handle.nbytes} bytes")
        with self._open():
            handles = self._table.require([handle for handle, _ in items], Lease)
            self._table.hold(handles)
        try:
            statuses = [self._read(handle, out, deadline) for handle, (_, out) in zip(handles, items, strict=True)]
        finally:
            with self._changed():
                self._table.unhold(handles)
        self._count_bytes(self._metrics.read_bytes, handles, statuses)
        return self._finish(statuses)

    def _read(self, handle: Lease, out: memoryview, deadline: float | None) -> Status:
        if not self.medium.transfer(handle.nbytes, deadline):
            return Status.TIMEOUT
        if handle.extent.checksum != _DAMAGED:
            self._fill(handle.ref, out[: handle.nbytes])
            return Status.OK
        with self._changed():
            if handle.extent.node is not None:
                self._table.drop(handle.extent.node)
                self._corrupt += 1
                self._metrics.corrupt_blocks.labels(self.name).inc()
        return Status.CORRUPT

    def release(self, handles: Sequence[Handle]) -> None:
        """See `Tier.release`. After `close`, which ended all leases, nothing happens."""
        with self._changed():
            if not self._closed:
                self._table.release(self._table.require(handles, Lease))

    def release_owner(self, owner: Owner) -> None:
        """See `Tier.release_owner`."""
        with self._changed():
            self._table.release_owner(owner)

    # ---- writers

    def reserve(
        self,
        refs: Sequence[BlockRef],
        sizes: Sequence[int],
        fmts: Sequence[str],
        owner: Owner,
        hints: Sequence[Hint] | None = None,
    ) -> list[Reservation]:
        """See `Tier.reserve`."""
        with self._changed():
            self._require_open()
            evicted = self._table.evicted
            results = self._table.reserve(refs, sizes, fmts, owner, [NO_HINT] * len(refs) if hints is None else hints)
            evicted = self._table.evicted - evicted
        if evicted:
            self._metrics.evicted_blocks.labels(self.name, "capacity").inc(evicted)
        for reason, count in Counter(full.reason for full in results if isinstance(full, Full)).items():
            self._metrics.dropped_blocks.labels(self.name, reason).inc(count)
        return results

    def write(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """See `Tier.write`. The bytes are timed, and not kept."""
        for handle, data in items:
            if data.nbytes < handle.nbytes:
                raise FormatMismatch(f"buffer of {data.nbytes} bytes: expected at least {handle.nbytes} bytes")
        with self._open():
            reserved = self._table.require([handle for handle, _ in items], Extent)
        statuses = []
        for extent in reserved:
            arrived = self.medium.transfer(extent.nbytes, deadline)
            extent.checksum = _WRITTEN if arrived else b""
            statuses.append(Status.OK if arrived else Status.TIMEOUT)
        return self._finish(statuses)

    def commit(self, handles: Sequence[Handle]) -> None:
        """See `Tier.commit`."""
        with self._changed():
            self._require_open()
            reserved = self._table.require(handles, Extent)
            unwritten = next((extent for extent in reserved if not extent.checksum), None)
            if unwritten is not None:
                raise LeaseError(f"block {unwritten.ref.key.hex()} was never completely written: write it or abort")
            self._table.commit(reserved)
        self._count_bytes(self._metrics.written_bytes, reserved, [Status.OK] * len(reserved))

    def abort(self, handles: Sequence[Handle]) -> None:
        """See `Tier.abort`."""
        with self._changed():
            self._table.abort(handle for handle in handles if isinstance(handle, HostHandle))

    def hint(self, keys: Sequence[bytes], hints: Sequence[Hint]) -> None:
        """See `Tier.hint`."""
        with self._open():
            self._table.hint(keys, hints)

    # ---- removal

    def remove(self, keys: Sequence[bytes]) -> Ticket:
        """See `Tier.remove`."""
        with self._changed():
            self._require_open()
            statuses = [Status.OK if key in self._table.nodes else Status.MISS for key in keys]
            self._table.drop_keys(keys)
        return self._finish(statuses)

    def clear(self, ns: int | Collection[int] | None = None) -> Ticket:
        """See `Tier.clear`. Reservations stay."""
        with self._changed():
            self._require_open()
            self._drop_namespaces(namespaces_in(ns))
        return self._finish([Status.OK])

    def _drop_namespaces(self, spaces: frozenset[int] | None) -> None:
        nodes = self._table.nodes.items()
        self._table.drop_keys([key for key, node in nodes if spaces is None or node.extent.ref.ns in spaces])

    def damage(self, key: bytes) -> None:
        """From now on the bytes of a ready record are wrong; ignored where it is absent."""
        with self._open():
            node = self._table.nodes.get(key)
            if node is not None:
                node.extent.checksum = _DAMAGED

    # ---- the whole

    def poll(self) -> list[Done]:
        """See `Tier.poll`."""
        return self._completions.poll()

    def stats(self) -> dict[str, int]:
        """As `HostTier.stats`."""
        with self._lock:
            return {
                "blocks": len(self._table.nodes),
                "bytes": self._ledger.used_bytes,
                "capacity_bytes": self._ledger.nbytes,
                "leases": self._table.leases,
                "reservations": self._table.reservations,
                "evicted": self._table.evicted,
                "corrupt": self._corrupt,
            }

    def flush(self) -> None:
        """See `Tier.flush`: there is nothing to make durable."""

    def close(self) -> None:
        """See `Tier.close`."""
        with self._changed():
            self._closed = True
            for owner in self._table.owners():
                self._table.release_owner(owner)
            self._drop_namespaces(None)

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            self._require_open()
            yield

    @contextmanager
    def _changed(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            finally:
                self._metrics.occupied_bytes.labels(self.name).set(self._ledger.used_bytes)

    def _require_open(self) -> None:
        if self._closed:
            raise TierUnavailable(f"tier {self.name} is closed: open another one")

    def _finish(self, statuses: Sequence[Status], handles: Sequence[Handle] = ()) -> Ticket:
        return self._completions.finish(Ticket(), statuses, handles)

    def _count_bytes(self, metric: Metric, handles: Sequence[Handle], statuses: Sequence[Status]) -> None:
        done = zip(handles, statuses, strict=True)
        metric.labels(self.name).inc(sum(handle.nbytes for handle, status in done if status is Status.OK))


def _fill_with_content(ref: BlockRef, out: memoryview) -> None:
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(content(ref, out.nbytes), np.uint8))
