"""HostTier: blocks in this machine's memory, the gateway between the device and everything below."""

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import Counter as Metric

from kvtier.cpu.batches import check_buffers, check_records, leading, rest, windows
from kvtier.cpu.holds import Extent, HostHandle, Lease
from kvtier.cpu.records import Changes, RecordTable
from kvtier.cpu.region import PAGE, round_up
from kvtier.cpu.slab import HostSlab
from kvtier.errors import FormatMismatch, LeaseError, TierUnavailable
from kvtier.events import EventLog
from kvtier.hints import NO_HINT, Hint
from kvtier.layout import Span
from kvtier.metrics import Metrics
from kvtier.native.checksum import Bytes, copy_checksums
from kvtier.policies import EvictionPolicy, LruPolicy
from kvtier.tiers import (
    OWN_WORK,
    RECEIVING,
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
    checksum_heads,
    counted,
    expired,
    namespaces_in,
)

__all__ = ["HostTier"]

_SHRINK_BATCH = 256
_DISCARD_BYTES = 32 << 20


class HostTier:
    """Implements `kvtier.tiers.AddressableTier` over one slab of shared memory.

    All work runs in the caller's thread: tickets are complete when they are returned. Copies and checksums run
    outside the lock and without the GIL, so threads move bytes in parallel.

    Args:
        capacity_bytes: hard limit, rounded down to 4 KiB pages; every record takes whole pages.
        policy: who leaves first; tail-first LRU by default. The tier is its only user.
        metrics: where to count.
        name: the tier's name in metrics, events and errors.
        events: told what becomes ready here and what goes, in the order in which it happens.
        limit_bytes: address space, so that `resize` can go as far; `capacity_bytes` by default.

    Raises:
        CapacityError: less than one page, more than this machine has, or more than the limit.
        TierUnavailable: the kernel refuses the memory.
    """

    caps = TierCaps(align=PAGE, listing=True)

    def __init__(
        self,
        capacity_bytes: int,
        *,
        policy: EvictionPolicy | None = None,
        metrics: Metrics | None = None,
        name: str = "host",
        events: EventLog | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self.name = name
        self._slab = HostSlab(capacity_bytes, name=name, limit=limit_bytes)
        self._table = RecordTable(self._slab, policy or LruPolicy())
        self._lock = threading.Lock()
        self._events = events
        if events is not None:
            self._table.changes = Changes([], [])
        self._completions = Completions()
        self._closed = False
        self._corrupt = 0
        self._metrics = metrics or Metrics()
        self._occupied = self._metrics.occupied_bytes.labels(name)
        self._occupied_told = -1
        self._seconds = {verb: self._metrics.seconds.labels(name, verb) for verb in ("acquire", "read", "write")}
        self._written = self._metrics.written_bytes.labels(name)
        self._metrics.capacity_bytes.labels(name).set(self._slab.capacity)
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
        """See `Tier.acquire`: verifies the checksum of every block that it hands out."""
        if expired(deadline):
            return self._finish([Status.TIMEOUT] * len(keys))
        with self._timed("acquire"):
            with self._state():
                handles = self._table.lease(keys, owner, exact=exact, renew=not owner.startswith(OWN_WORK))
            statuses = leading(self._verify(handles, [None] * len(handles), deadline))
            good = statuses.count(Status.OK)
            if good < len(handles):
                self._give_back(handles[good:])
        self._count_asked(len(keys), good, owner)
        return self._finish(statuses + [rest(statuses)] * (len(keys) - len(statuses)), handles[:good])

    def lease(
        self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None, *, exact: bool = False
    ) -> Ticket:
        """See `GatewayTier.lease`."""
        if expired(deadline):
            return self._finish([Status.TIMEOUT] * len(keys))
        with self._state():
            handles = self._table.lease(keys, owner, exact=exact, renew=not owner.startswith(OWN_WORK))
        self._count_asked(len(keys), len(handles), owner)
        return self._finish([Status.OK] * len(handles) + [Status.MISS] * (len(keys) - len(handles)), handles)

    def _count_asked(self, asked: int, found: int, owner: Owner) -> None:
        if counted(owner):
            self._count(self._metrics.hit_blocks, found)
            self._count(self._metrics.missed_blocks, asked - found)

    def _verify(
        self, handles: Sequence[Lease], outs: Sequence[memoryview | None], deadline: float | None
    ) -> Iterator[Status]:
        """Checksum records, copying each to its place in `outs`, if it has one, in the same pass."""
        for window in windows(handles):
            some = handles[window]
            if expired(deadline):
                yield from [Status.TIMEOUT] * len(some)
                continue
            memories: list[Bytes] = list(self._memories(some))
            sizes = [handle.nbytes for handle in some]
            found = copy_checksums(checksum_heads(some), memories, list(outs[window]), sizes)
            for handle, checksum in zip(some, found, strict=True):
                yield Status.OK if checksum == handle.extent.checksum else self._drop_damaged(handle.extent)

    def _drop_damaged(self, extent: Extent) -> Status:
        with self._changed("damaged"):
            if extent.node is not None:
                self._table.drop(extent.node)
                self._corrupt += 1
                self._count(self._metrics.corrupt_blocks, 1)
        return Status.CORRUPT

    def _give_back(self, handles: Sequence[Lease]) -> None:
        with self._changed():
            # `close` or `release_owner` may have ended these leases meanwhile.
            self._table.release([handle for handle in handles if handle.holder is self._table])

    def read(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """See `Tier.read`. The copy is what is verified, not the original."""
        check_buffers(items, writable=True)
        with self._state():
            handles = self._table.require([handle for handle, _ in items], Lease)
            self._table.hold(handles)
        try:
            with self._timed("read"):
                statuses = list(self._verify(handles, [out for _, out in items], deadline))
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
            check_buffers(zip(handles, buffers, strict=False), writable=True)
            statuses = leading(self._verify(handles, buffers[: len(handles)], deadline))
            self._count_bytes(self._metrics.read_bytes, handles[: len(statuses)], statuses)
        self._count_asked(len(keys), statuses.count(Status.OK), owner)
        return self._finish(statuses + [rest(statuses)] * (len(keys) - len(statuses)))

    @contextmanager
    def _leased(self, keys: Sequence[bytes], owner: Owner, *, exact: bool) -> Iterator[list[Lease]]:
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
        """See `Tier.reserve`. A version of higher fidelity may be reserved over a record; `commit` replaces it then.

        Raises:
            FormatMismatch: a size, format or key that no record can have, or not as many hints.
        """
        wanted = [NO_HINT] * len(refs) if hints is None else hints
        check_records(refs, sizes, fmts, wanted)
        with self._state():
            evicted = self._table.evicted
            try:
                results = self._table.reserve(refs, sizes, fmts, owner, wanted)
            finally:
                self._tell_changes("capacity")
            evicted = self._table.evicted - evicted
            self._tell_occupied()
        self._count_evicted(evicted)
        refused = [result.reason for result in results if isinstance(result, Full) and owner != RECEIVING]
        for reason in set(refused):
            self._metrics.dropped_blocks.labels(self.name, reason).inc(refused.count(reason))
        return results

    def write(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """See `Tier.write`."""
        check_buffers(items, writable=False)
        with self._timed("write"):
            statuses = self._fill([handle for handle, _ in items], [data for _, data in items], deadline)
        return self._finish(statuses)

    def seal(self, handles: Sequence[Handle], checksums: Sequence[bytes] | None = None) -> None:
        """See `AddressableTier.seal`."""
        known = checksums or [b""] * len(handles)
        due = [handle for handle, checksum in zip(handles, known, strict=True) if not checksum]
        if due:
            self._fill(due, [None] * len(due), None)
        with self._state():
            reserved = self._table.require(handles, Extent)
            self._clear_padding(reserved)
            for extent, checksum in zip(reserved, known, strict=True):
                extent.checksum = checksum or extent.checksum

    def rename(
        self, handles: Sequence[Handle], refs: Sequence[BlockRef], owner: Owner, hints: Sequence[Hint]
    ) -> list[Reservation]:
        """See `GatewayTier.rename`."""
        check_records(refs, [handle.nbytes for handle in handles], [handle.fmt for handle in handles], hints)
        with self._state():
            return self._table.rename(self._table.require(handles, Extent), refs, owner, hints)

    def _fill(
        self,
        handles: Sequence[Handle],
        sources: Sequence[memoryview | None],
        deadline: float | None,
    ) -> list[Status]:
        """Copy each source (None: the bytes are in place already) and checksum the record."""
        with self._state():
            reserved = self._table.require(handles, Extent)
            for extent in reserved:
                extent.checksum = b""
            self._table.hold(reserved)
        checksums: list[bytes] = []
        try:
            for window in windows(reserved):
                if expired(deadline):
                    break
                checksums += self._fill_window(reserved[window], sources[window])
        finally:
            with self._lock:
                for extent, checksum in zip(reserved, checksums, strict=False):
                    extent.checksum = checksum
                self._table.unhold(reserved)
                self._tell_occupied()
        return [Status.OK] * len(checksums) + [Status.TIMEOUT] * (len(reserved) - len(checksums))

    def _fill_window(self, extents: Sequence[Extent], sources: Sequence[memoryview | None]) -> list[bytes]:
        """Put bytes in place where they are not, clear the padding, and return the checksums."""
        self._clear_padding(extents)
        inputs: list[Bytes] = []
        outputs: list[Bytes | None] = []
        for source, memory in zip(sources, self._memories(extents), strict=True):
            inputs.append(memory if source is None else source)
            outputs.append(None if source is None else memory)
        return copy_checksums(checksum_heads(extents), inputs, outputs, [extent.nbytes for extent in extents])

    def _clear_padding(self, extents: Sequence[Extent]) -> None:
        """Lower tiers write whole pages: what an earlier record left behind must not reach a disk."""
        padded = [extent for extent in extents if extent.nbytes % PAGE]
        for extent, memory in zip(padded, self._memories(padded), strict=True):
            memory[extent.nbytes :] = bytes(memory.nbytes - extent.nbytes)

    def commit(self, handles: Sequence[Handle]) -> None:
        """See `Tier.commit`."""
        with self._changed():
            self._require_open()
            reserved = self._table.require(handles, Extent)
            unwritten = [extent for extent in reserved if not extent.checksum]
            if unwritten:
                raise LeaseError(f"block {unwritten[0].ref.key.hex()} was never completely written: write it or abort")
            self._table.commit(reserved)
        self._written.inc(sum([extent.nbytes for extent in reserved]))

    def abort(self, handles: Sequence[Handle]) -> None:
        """See `Tier.abort`."""
        with self._changed():
            self._table.abort(handle for handle in handles if isinstance(handle, HostHandle))

    # ---- order

    def hint(self, keys: Sequence[bytes], hints: Sequence[Hint]) -> None:
        """See `Tier.hint`. Raises `FormatMismatch` for another number of hints than of keys."""
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

    def refs(self, keys: Sequence[bytes]) -> list[BlockRef | None]:
        """See `GatewayTier.refs`."""
        with self._state():
            return [None if (node := self._table.nodes.get(key)) is None else node.extent.ref for key in keys]

    def coldest(self, count: int) -> list[bytes]:
        """Keys of up to `count` records that would be evicted next, in that order. None is."""
        with self._state():
            return self._table.coldest(count)

    def take_evicted(self) -> list[bytes]:
        """Keys of the records evicted since the last call, the latest 4,096 at most."""
        with self._state():
            evictions = list(self._table.evictions)
            self._table.evictions.clear()
        return evictions

    # ---- at run time

    def resize(self, capacity_bytes: int) -> int:
        """Change the capacity, in whole pages up to the limit. What does not fit any more is evicted, as its policy
        says; what is leased or reserved stays until it is let go, and is evicted then.

        The memory goes back to the system, unless other processes have mapped it: then what was touched is used again
        first, and goes with the tier.

        Returns:
            Bytes that are still used beyond the capacity.

        Raises:
            CapacityError: less than a page, or more than the limit.
        """
        with self._state():
            self._slab.resize(capacity_bytes)
            self._metrics.capacity_bytes.labels(self.name).set(self._slab.capacity)
        more = True
        while more:
            with self._changed("capacity"):
                self._require_open()
                more = self._shrink()
        at: int | None = 0
        while at is not None:
            with self._state():
                shrunk = self._slab.capacity < self._slab.nbytes
                at = self._slab.discard(at, _DISCARD_BYTES) if shrunk else None
        with self._lock:
            return max(self._slab.used_bytes - self._slab.capacity, 0)

    def _shrink(self) -> bool:
        """Evict some of what does not fit; whether there is more to do."""
        before = self._table.evicted
        more = self._table.shrink(_SHRINK_BATCH)
        self._count_evicted(self._table.evicted - before)
        return more

    def _count_evicted(self, count: int) -> None:
        if count:
            self._metrics.evicted_blocks.labels(self.name, "capacity").inc(count)

    def set_policy(self, policy: EvictionPolicy) -> None:
        """Let another policy decide who leaves. It learns the order of the records and their hints, not more.

        The records that device memory holds too are ordinary ones for it, until they are told again.
        """
        with self._state():
            self._table.replace_policy(policy)

    def usage(self) -> dict[int, tuple[int, int]]:
        """Records that are ready, and their bytes, by namespace."""
        with self._lock:
            return {ns: (records, nbytes) for ns, (records, nbytes) in self._table.usage.items()}

    def listed(self, ns: int) -> Iterator[list[bytes]]:
        """See `ListingTier.listed`."""
        with self._state():
            found = self._table.keys_in((ns,))
        yield found

    # ---- removal

    def remove(self, keys: Sequence[bytes]) -> Ticket:
        """See `Tier.remove`."""
        with self._changed("removed"):
            self._require_open()
            statuses = [Status.OK if key in self._table.nodes else Status.MISS for key in keys]
            self._table.drop_keys(keys)
        return self._finish(statuses)

    def clear(self, ns: int | Collection[int] | None = None) -> Ticket:
        """See `Tier.clear`. Reservations stay."""
        with self._changed():
            self._require_open()
            self._drop_namespaces(namespaces_in(ns), "cleared")
        return self._finish([Status.OK])

    def _drop_namespaces(self, spaces: frozenset[int] | None, reason: str) -> None:
        self._table.drop_keys(self._table.keys_in(spaces))
        changes = self._table.changes
        if self._events is not None and changes is not None:
            # A descendant in another namespace, which a wrong ref can make, is told by itself.
            changes.removed[:] = [(of, key) for of, key in changes.removed if spaces is not None and of not in spaces]
            for ns in (None,) if spaces is None else sorted(spaces):
                self._events.cleared(self.name, ns, reason)
            self._tell_changes(reason)

    # ---- memory

    def buffer(self, handle: Handle) -> memoryview:
        """See `AddressableTier.buffer`."""
        return self.buffers([handle])[0]

    def buffers(self, handles: Sequence[Handle]) -> list[memoryview]:
        """See `AddressableTier.buffers`."""
        with self._lock:
            live = self._table.live(handles)
        views = zip(live, self._memories(live), strict=True)
        return [view.toreadonly() if handle.leased else view for handle, view in views]

    def span(self, handle: Handle) -> Span:
        """See `AddressableTier.span`. Its length is `nbytes`, without padding."""
        with self._lock:
            (live,) = self._table.live([handle])
        return self._slab.region.span(live.extent.offset, handle.nbytes)

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
                "capacity_bytes": self._slab.capacity,
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
                self._table.release_owner(owner)
            self._drop_namespaces(None, "closed")
            self._slab.close()

    @contextmanager
    def _changed(self, reason: str = "") -> Iterator[None]:
        """A change under the lock; `reason`: why records go, where they may."""
        with self._lock:
            try:
                yield
            finally:
                self._tell_changes(reason)
                if self._slab.over and not self._closed:
                    self._shrink()
                    self._tell_changes("capacity")
                self._tell_occupied()

    def _tell_changes(self, reason: str = "") -> None:
        changes = self._table.changes
        if self._events is None or changes is None:
            return
        if changes.removed:
            self._events.removed(self.name, changes.removed, reason)
            changes.removed.clear()
        if changes.stored:
            self._events.stored(self.name, changes.stored)
            changes.stored.clear()

    def _tell_occupied(self) -> None:
        if self._slab.used_bytes != self._occupied_told:
            self._occupied_told = self._slab.used_bytes
            self._occupied.set(self._occupied_told)

    @contextmanager
    def _state(self) -> Iterator[None]:
        with self._lock:
            self._require_open()
            yield

    @contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[operation].observe(time.perf_counter() - start)

    def _require_open(self) -> None:
        if self._closed:
            raise TierUnavailable(f"tier {self.name} is closed: open another one")

    def _memories(self, handles: Sequence[HostHandle]) -> list[memoryview]:
        """Each record's own memory: whole pages."""
        return self._slab.region.views([(handle.extent.offset, round_up(handle.nbytes)) for handle in handles])

    def _finish(self, statuses: Sequence[Status], handles: Sequence[Handle] = ()) -> Ticket:
        return self._completions.finish(Ticket(), statuses, handles)

    def _count(self, metric: Metric, amount: int) -> None:
        if amount:
            metric.labels(self.name).inc(amount)

    def _count_bytes(self, metric: Metric, handles: Sequence[Handle], statuses: Sequence[Status]) -> None:
        done = zip(handles, statuses, strict=True)
        self._count(metric, sum(handle.nbytes for handle, status in done if status is Status.OK))
