"""TieredStore: look up, lease, promote and put blocks over a host tier and the tiers below it.

One block's way down: put -> host (reserved, written, committed) -> write-back -> every lower tier.
Its way up: match -> acquire (leased where it lies) -> fetch (promoted into host, leased there) -> read in place.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from kvtier.errors import ConfigError, KVTierError
from kvtier.layout import Span
from kvtier.metrics import Metrics
from kvtier.store.inflight import InFlight
from kvtier.store.lookup import leading_run
from kvtier.store.writeback import WriteBack
from kvtier.store.writing import write_reserved
from kvtier.tiers import AddressableTier, BlockRef, Exists, Handle, Owner, Status, Tier

__all__ = ["Lease", "PutResult", "StoreMatch", "TieredStore"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class StoreMatch(NamedTuple):
    """Tier name of each block of the longest leading run that is somewhere. A hint: no lease, no recency."""

    tiers: tuple[str, ...]


class PutResult(NamedTuple):
    """Of one `put`: blocks newly stored, blocks that were there or in flight already, blocks dropped."""

    stored: int
    joined: int
    dropped: int


@dataclass(slots=True)
class Lease:
    """A hold on a run of blocks, each in one tier. Ends by `TieredStore.release`."""

    owner: Owner
    blocks: list[tuple[Tier, Handle]] = field(default_factory=list)

    def tiers(self) -> list[str]:
        """Where each block lies now."""
        return [tier.name for tier, _ in self.blocks]


class TieredStore:
    """A block store over `host` and the tiers below it. Thread-safe.

    Work that moves bytes or touches a disk runs in the store's threads and returns a `Future`; `match` and
    `release` only touch indices and run in the caller's. A tier's failure degrades to a miss or a drop.

    Args:
        host: the gateway: whatever moves between the device and lower tiers passes through it.
        lower: tiers below, fastest first; each gets a copy of every block put (write-through in the background).
        metrics: shared with the tiers.
        writeback_bytes: how much of host may wait to be written down.

    Invariants:
        1. A key is written once per tier, however many put or load it at the same time: the others join.
        2. Only exact blocks are leased unless `accept_lossy`.
        3. Every acquired lease is released exactly once, also when its tier failed meanwhile.
    """

    def __init__(
        self,
        host: AddressableTier,
        lower: Sequence[Tier] = (),
        *,
        metrics: Metrics | None = None,
        writeback_bytes: int = 1 << 28,
        accept_lossy: bool = False,
    ) -> None:
        self.host = host
        self.lower = tuple(lower)
        self.metrics = metrics or Metrics()
        self._accept_lossy = accept_lossy
        self._inflight = InFlight()
        self._writeback = WriteBack(host, lower, writeback_bytes, self.metrics)
        # Loads are somebody's latency and must not queue behind puts; puts keep their order, parents first.
        self._loads = ThreadPoolExecutor(2, thread_name_prefix="kvtier-load")
        self._puts = ThreadPoolExecutor(1, thread_name_prefix="kvtier-put")

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All tiers, fastest first."""
        return (self.host, *self.lower)

    # ---- looking up

    def match(self, keys: Sequence[bytes]) -> StoreMatch:
        """Where the longest leading run of `keys` lies. Index probes only: no bytes, no lease, no recency."""
        found: list[str] = []
        progress = True
        while progress and len(found) < len(keys):
            before = len(found)
            for tier in self.tiers:
                found += [tier.name] * self._run_in(tier, keys[len(found) :])
            progress = len(found) > before
        return StoreMatch(tuple(found))

    def _run_in(self, tier: Tier, keys: Sequence[bytes]) -> int:
        return self._degrade(tier, "match", lambda: leading_run(tier, keys), 0)

    def acquire(self, keys: Sequence[bytes], owner: Owner) -> "Future[Lease]":
        """Lease the longest leading run of `keys`, each block in the fastest tier that has it.

        Host blocks are checksummed now, blocks of lower tiers when they are fetched.
        """
        return self._submit(self._loads, Lease(owner), self._acquire, list(keys), owner)

    def _acquire(self, keys: list[bytes], owner: Owner) -> Lease:
        lease = Lease(owner)
        try:
            self._lease_everywhere(lease, keys)
        except BaseException:
            self.release(lease)
            raise
        self._cut_inexact(lease)
        return lease

    def _lease_everywhere(self, lease: Lease, keys: list[bytes]) -> None:
        progress = True
        while progress and len(lease.blocks) < len(keys):
            before = len(lease.blocks)
            for tier in self.tiers:
                rest = keys[len(lease.blocks) :]
                handles = self._lease_run(tier, rest, lease.owner) if rest else ()
                lease.blocks += [(tier, handle) for handle in handles]
            progress = len(lease.blocks) > before

    def _lease_run(self, tier: Tier, keys: Sequence[bytes], owner: Owner) -> tuple[Handle, ...]:
        return self._degrade(tier, "acquire", lambda: tier.acquire(keys, owner).wait().handles, ())

    def _cut_inexact(self, lease: Lease) -> None:
        if self._accept_lossy:
            return
        for at, (_, handle) in enumerate(lease.blocks):
            if not handle.ref.exact:
                self._release_blocks(lease.blocks[at:])
                del lease.blocks[at:]
                return

    def release(self, lease: Lease) -> None:
        """End a lease. Idempotent."""
        blocks, lease.blocks = lease.blocks, []
        self._release_blocks(blocks)

    def _release_blocks(self, blocks: Sequence[tuple[Tier, Handle]]) -> None:
        for tier in {id(tier): tier for tier, _ in blocks}.values():
            tier.release([handle for held_in, handle in blocks if held_in is tier])

    # ---- the way up

    def fetch(self, lease: Lease, start: int, stop: int) -> "Future[int]":
        """Bring blocks [start, stop) of a lease into host, leased there.

        Returns:
            How many leading ones of them are now in host and verified. The lease keeps holding all of its blocks.
        """
        return self._submit(self._loads, 0, self._fetch, lease, start, stop)

    def _fetch(self, lease: Lease, start: int, stop: int) -> int:
        at = start
        while at < stop:
            tier = lease.blocks[at][0]
            end = at + 1
            while end < stop and lease.blocks[end][0] is tier:
                end += 1
            if tier is not self.host:
                promoted = self._promote(tier, lease, at, end)
                if promoted < end - at:
                    return at + promoted - start
            at = end
        return stop - start

    def _promote(self, tier: Tier, lease: Lease, start: int, stop: int) -> int:
        sources = [handle for _, handle in lease.blocks[start:stop]]
        keys = [source.ref.key for source in sources]
        mine, theirs = self._inflight.claim(keys)
        claimed = [source for source, own in zip(sources, mine, strict=True) if own]
        try:
            self._degrade(tier, "promote", lambda: self._copy_up(tier, claimed), None)
        finally:
            self._inflight.finish([source.ref.key for source in claimed])
        for event in theirs:
            event.wait()
        if theirs:
            self.metrics.joined.labels("load").inc(len(theirs))
        promoted = self._lease_run(self.host, keys, lease.owner)
        tier.release(sources[: len(promoted)])
        lease.blocks[start : start + len(promoted)] = [(self.host, handle) for handle in promoted]
        return len(promoted)

    def _copy_up(self, tier: Tier, sources: Sequence[Handle]) -> None:
        slots = self.host.reserve(
            [source.ref for source in sources],
            [source.nbytes for source in sources],
            [source.fmt for source in sources],
            "store.promote",
        )
        pairs = [(slot, source) for slot, source in zip(slots, sources, strict=True) if isinstance(slot, Handle)]
        targets = [slot for slot, _ in pairs]
        try:
            items = [(source, self.host.buffer(slot)) for slot, source in pairs]
            statuses = tier.read(items).wait().statuses if items else ()
            bad = next((at for at, status in enumerate(statuses) if status is not Status.OK), len(statuses))
            self.host.seal(targets[:bad])
            self.host.commit(targets[:bad])
        finally:
            # What was committed is no reservation any more; the rest (a bad block and its descendants) goes.
            self.host.abort(targets)

    def spans(self, lease: Lease, start: int, stop: int) -> list[Span]:
        """Where blocks [start, stop) of a fetched lease lie in host's regions."""
        return [self.host.span(handle) for _, handle in lease.blocks[start:stop]]

    # ---- the way down

    def put(self, items: Sequence[tuple[BlockRef, memoryview]], fmt: str = "raw") -> "Future[PutResult]":
        """Store blocks of one chain, parents first. The buffers must stay as they are until the result is there."""
        return self._submit(self._puts, PutResult(0, 0, len(items)), self._put, list(items), fmt)

    def _put(self, items: list[tuple[BlockRef, memoryview]], fmt: str) -> PutResult:
        mine, _ = self._inflight.claim([ref.key for ref, _ in items])
        claimed = [item for item, own in zip(items, mine, strict=True) if own]
        try:
            result = self._degrade(
                self.host, "put", lambda: self._write_host(claimed, fmt), PutResult(0, 0, len(claimed))
            )
        finally:
            self._inflight.finish([ref.key for ref, _ in claimed])
        joined = result.joined + len(items) - len(claimed)
        if joined:
            self.metrics.joined.labels("put").inc(joined)
        self._writeback.submit(self._not_below([ref.key for ref, _ in items]))
        return PutResult(result.stored, joined, result.dropped)

    def _write_host(self, items: Sequence[tuple[BlockRef, memoryview]], fmt: str) -> PutResult:
        refs = [ref for ref, _ in items]
        slots = self.host.reserve(refs, [data.nbytes for _, data in items], [fmt] * len(items), "store.put")
        pairs = [(slot, data) for slot, (_, data) in zip(slots, items, strict=True) if isinstance(slot, Handle)]
        good = write_reserved(self.host, pairs)
        existing = sum(isinstance(slot, Exists) for slot in slots)
        return PutResult(good, existing, len(items) - existing - good)

    def _not_below(self, keys: list[bytes]) -> list[bytes]:
        """Keys from the first one on that some lower tier lacks."""
        if not self.lower:
            return []
        return keys[min(self._run_in(tier, keys) for tier in self.lower) :]

    # ---- the whole

    def flush(self) -> None:
        """Wait for all puts and write-backs so far, and make every tier as durable as it can be."""
        self._settle()
        for tier in self.tiers:
            tier.flush()

    def _settle(self) -> None:
        self._submit(self._puts, None, lambda: None).result()
        self._writeback.drain()

    def clear(self, tier_name: str | None = None, ns: int | None = None) -> None:
        """Remove every block of a namespace (None: all) from one tier (None: all), those on their way included.

        Raises:
            ConfigError: there is no tier of that name.
        """
        names = [tier.name for tier in self.tiers]
        if tier_name not in (None, *names):
            raise ConfigError(f"no tier {tier_name!r}: expected one of {', '.join(names)}")
        self._settle()
        for tier in self.tiers:
            if tier_name in (None, tier.name):
                tier.clear(ns).wait()

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters and gauges by tier name, and the write-back queue's."""
        by_tier = {tier.name: tier.stats() for tier in self.tiers}
        return by_tier | {"writeback": {"waiting_bytes": self._writeback.waiting_bytes}}

    def close(self) -> None:
        """Drain puts and write-backs, then close all tiers. Idempotent."""
        self._puts.shutdown()
        self._loads.shutdown()
        self._writeback.close()
        for tier in self.tiers:
            tier.close()

    @staticmethod
    def _submit(pool: ThreadPoolExecutor, otherwise: _T, work: Callable[..., _T], *arguments: object) -> "Future[_T]":
        try:
            return pool.submit(work, *arguments)
        except RuntimeError:
            # The store was closed under its user: a miss, or a drop.
            closed: Future[_T] = Future()
            closed.set_result(otherwise)
            return closed

    def _degrade(self, tier: Tier, operation: str, call: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return call()
        except KVTierError as error:
            self.metrics.errors.labels(tier.name, operation).inc()
            _log.warning("%s on tier %s failed and counts as a miss: %s", operation, tier.name, error)
            return otherwise
