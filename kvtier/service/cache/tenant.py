"""Tenant: one store, one secret and the namespaces of whoever shares a quota. Nobody else is in them."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import cast

from kvtier.config import ServiceSettings, TieringSettings
from kvtier.errors import ConfigError
from kvtier.events import EventLog
from kvtier.keys import store_keys
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeTier
from kvtier.policies import make_policy
from kvtier.service.cache.errors import ServiceError
from kvtier.service.cache.holding import Pins, Prefetches
from kvtier.service.cache.inflight import InFlight
from kvtier.service.cache.leaving import Leaving
from kvtier.service.cache.namespaces import NamespaceInfo, NamespaceSpec, OpenNamespace
from kvtier.service.cache.quotas import Quota, tiering_of
from kvtier.service.cache.reading import Reading
from kvtier.service.cache.reads import Read, ReadRequest
from kvtier.service.cache.rooms import Rooms
from kvtier.service.cache.state import StateDirectory, TenantState
from kvtier.service.cache.stats import NamespaceStats, TenantStats
from kvtier.service.cache.telemetry import Gauge
from kvtier.service.cache.traffic import TenantTraffic, flow_of
from kvtier.store import TieredStore, open_store
from kvtier.tiers import ListingTier

__all__ = ["Tenant"]

# What policies size their memories of the past by, until blocks are known.
_TYPICAL_BLOCK = 256 << 10
_RETRY_SECONDS = 5.0


class Tenant:
    """Opens and holds what belongs to one tenant. Thread-safe.

    Args:
        name: the tenant's.
        quota: its share of the tiers.
        settings, tiering: the service's; the tiers' capacities are replaced by the quota.
        state: where its secret and namespaces are kept.
        clock: monotonic seconds, for the store.

    Raises:
        ConfigError, CapacityError, TierUnavailable: see `kvtier.store.open_store` and `StateDirectory.load`.
    """

    def __init__(
        self,
        name: str,
        quota: Quota,
        settings: ServiceSettings,
        tiering: TieringSettings,
        state: StateDirectory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.quotas = {"host": quota.host} | ({} if quota.nvme is None else {"nvme": quota.nvme})
        self.tiering = tiering_of(name, quota, tiering)
        self.parts: dict[int, tuple[OpenNamespace, int]] = {}
        self.events = EventLog(settings.max_events, whose=self.parts.get)
        self.metrics = Metrics()
        self.store = self._open(settings, clock)
        self._policy = tiering.host.policy if tiering.host is not None else "lru"
        self.inflight = InFlight(settings.inflight_bytes)
        self.rooms = Rooms(self.store, quota.host)
        self.pins = Pins(settings.max_pins, clock, self.store.unpin)
        self.prefetches = Prefetches(settings.max_prefetches)
        self._state = state
        self._clock = clock
        self._most = settings.max_namespaces
        self._idle = settings.namespace_idle
        # Twice: a call may last so long, and what it began a little longer.
        self._leaving = Leaving(self.store, self.parts, 2 * settings.request_timeout, clock)
        # Two: to keep a namespace takes a disk's time, and no read waits for that.
        self._naming = threading.Lock()
        self._lock = threading.Lock()
        self._reads: dict[Read, None] = {}
        try:
            self._known = state.load(name)
            self._adopt(self._known)
            self._size_policy()
        except BaseException:
            self.store.close()
            raise

    def _open(self, settings: ServiceSettings, clock: Callable[[], float]) -> TieredStore:
        capacities = [self.quotas["host"], self.quotas.get("nvme", _TYPICAL_BLOCK)]
        block_bytes = min(_TYPICAL_BLOCK, *capacities)
        if self.tiering.nvme is not None:
            _make_private(self.tiering.nvme.path)
        store = open_store(
            self.tiering,
            block_bytes=block_bytes,
            host_limit=settings.host_limit,
            metrics=self.metrics,
            events=self.events,
            clock=clock,
        )
        if store is None:
            raise ConfigError("tiering.host = none: the cache service keeps blocks in host memory; give it a capacity")
        return store

    # ---- namespaces

    def _adopt(self, known: TenantState) -> None:
        self._spaces: dict[str, OpenNamespace] = {}
        self.traffic = TenantTraffic()
        for spec, created in known.namespaces.values():
            space = OpenNamespace(spec, known.salt, created)
            self._register(space)
            self._enter(space)

    def _register(self, space: OpenNamespace) -> None:
        for part, index in enumerate(space.indices):
            layout = space.layout(part)
            if layout is not None:
                self.store.register(index, layout)

    def _enter(self, space: OpenNamespace) -> None:
        space.used = self._clock()
        self.parts.update((index, (space, part)) for part, index in enumerate(space.indices))
        self.traffic.enter(space.spec.name)
        self._spaces[space.spec.name] = space

    def _size_policy(self) -> None:
        """Now that blocks are known, and before there are any: policies remember the past by numbers of them."""
        if not self.store.host.stats()["blocks"]:
            self.set_policy(self._policy)

    def space(self, name: str) -> OpenNamespace | None:
        """The namespace of this name; None: there is none."""
        return self._spaces.get(name)

    def use(self, name: str) -> OpenNamespace | None:
        """As `space`, for a call that it is made for."""
        space = self._spaces.get(name)
        if space is not None:
            space.used = self._clock()
        return space

    def names(self) -> list[str]:
        """Of all namespaces, sorted."""
        return sorted(self._spaces.copy())

    def create(self, spec: NamespaceSpec) -> OpenNamespace:
        """Make a namespace, or find that it is there.

        Raises:
            ServiceError: conflict, quota_exceeded or busy.
            ConfigError: a tier's format has no encoding for this layout.
        """
        with self._naming:
            known = self._spaces.get(spec.name)
            if known is not None and known.spec != spec:
                there = asdict(known.spec)
                other = ", ".join(name for name, value in asdict(spec).items() if there[name] != value)
                raise ServiceError(
                    "conflict", f"namespace {spec.name} is there with another {other}: choose another name, or drop it"
                )
            if known is not None:
                known.used = self._clock()
                return known
            self._make_room()
            space = OpenNamespace(spec, self._known.salt, time.time())
            try:
                self._register(space)
                self._keep({**self._known.namespaces, spec.name: (spec, space.created)})
            except BaseException:
                self._leaving.add(space)
                raise
            self._leaving.back(space)
            self._enter(space)
        self._size_policy()
        return space

    def _make_room(self) -> None:
        """For one namespace more, by letting go of one that nobody misses where there are as many as there may be."""
        self._leaving.sweep()
        if self._leaving.is_full:
            raise ServiceError(
                "busy", "namespaces come and go faster than they can be forgotten", retry_after=_RETRY_SECONDS
            )
        if len(self._spaces) < self._most:
            return
        idle = self._unused()
        if idle is None:
            raise ServiceError("quota_exceeded", f"{self._most} namespaces: at most so many; drop one")
        self._end(idle)
        self._leaving.add(idle)

    def _unused(self) -> OpenNamespace | None:
        """Of the namespaces that were not used for `service.namespace_idle` and hold nothing here, the oldest."""
        if self._idle is None:
            return None
        before = self._clock() - self._idle
        idle = sorted((one for one in self._spaces.values() if one.used <= before), key=lambda one: one.used)
        held = self._held([index for one in idle for index in one.indices])
        return next((one for one in idle if held.isdisjoint(one.indices)), None)

    def _held(self, indices: Sequence[int]) -> set[int]:
        """Those of which this service has blocks; what lies in a remote tier is found by whoever comes again."""
        held = set(self.store.host.usage()).intersection(indices)
        for tier in self.store.lower:
            if isinstance(tier, NvmeTier):
                held |= tier.holding(indices)
        return held

    def clear(self, space: OpenNamespace) -> None:
        """Remove all of its blocks from every tier.

        Raises:
            BlocksRemain: see `TieredStore.clear`.
        """
        self.store.clear(ns=space.indices)

    def listed(self, space: OpenNamespace) -> Iterator[list[bytes]]:
        """Heads of the chain keys of its blocks whose part 0 is in a tier, in batches; see `ListingTier.listed`.

        Raises:
            ServiceError: unavailable: a tier cannot say.
        """
        for tier in self.store.tiers:
            if not tier.caps.listing:
                raise ServiceError("unavailable", f"tier {tier.name} does not list its blocks: use another one")
            for keys in cast(ListingTier, tier).listed(space.indices[0]):
                yield store_keys(keys, space.masks[0])

    def drop(self, space: OpenNamespace) -> None:
        """Remove a namespace and its blocks.

        Raises:
            ServiceError: busy: it is empty, and stays.
            BlocksRemain: it stays, too: another one of its name would find them.
        """
        name = space.spec.name
        with self._naming:
            if self._spaces.get(name) is not space:
                return
            self._leaving.sweep()
            # No call finds it any more; it ends when its blocks have.
            del self._spaces[name]
            try:
                self.clear(space)
                self._end(space)
            except BaseException:
                self._spaces[name] = space
                raise
            self._leaving.add(space)

    def _end(self, space: OpenNamespace) -> None:
        name = space.spec.name
        self._keep({other: known for other, known in self._known.namespaces.items() if other != name})
        self._spaces.pop(name, None)
        self.traffic.leave(name)

    def _keep(self, namespaces: Mapping[str, tuple[NamespaceSpec, float]]) -> None:
        fresh = replace(self._known, namespaces=namespaces)
        try:
            self._state.save(self.name, fresh)
        except ConfigError as error:
            raise ServiceError("busy", str(error), retry_after=_RETRY_SECONDS) from error
        self._known = fresh

    def info(self, space: OpenNamespace) -> NamespaceInfo:
        """What its users see of a namespace."""
        usage = self.store.host.usage()
        rows = [usage.get(index, (0, 0)) for index in space.indices]
        blocks, nbytes = (sum(column) for column in zip(*rows, strict=True))
        traffic = self.traffic.of(space.spec.name)
        return replace(
            space.info(),
            stored=traffic.stored,
            stored_bytes=traffic.stored_bytes,
            hits=traffic.hits,
            misses=traffic.misses,
            host_blocks=blocks,
            host_bytes=nbytes,
        )

    # ---- reads

    def read(self, request: ReadRequest) -> "Future[Reading]":
        """Begin a read."""
        read = Read(self.store, self.inflight, request, self._ended)
        with self._lock:
            self._reads[read] = None
        read.future.add_done_callback(partial(self._count_read, request))
        try:
            read.start()
        except BaseException:
            read.end()
            raise
        return read.future

    def _count_read(self, request: ReadRequest, future: "Future[Reading]") -> None:
        if future.exception() is None:
            self.traffic.read(request.space.spec.name, len(request.chain), future.result().found)

    def _ended(self, read: Read) -> None:
        with self._lock:
            self._reads.pop(read, None)

    @property
    def leases(self) -> int:
        """Reads that are under way, and readings that are open."""
        with self._lock:
            return len(self._reads)

    def release_owner(self, owner: str | None = None) -> None:
        """Close the readings of an owner (None: of all), and end its reads."""
        with self._lock:
            reads = [read for read in self._reads if owner is None or read.owner == owner]
        for read in reads:
            read.abandon()

    # ---- the whole

    def gauges(self) -> Iterator[Gauge]:
        """What it holds for its callers."""
        of = {"tenant": self.name}
        yield Gauge("kvtier_service_leases", "Readings that are open or under way", of, self.leases)
        yield Gauge("kvtier_service_inflight_bytes", "Bytes that calls hold", of, self.inflight.nbytes)
        yield Gauge("kvtier_service_pins", "Pins that are not over", of, self.pins.count)

    def stats(self, sees: Callable[[str], bool], moved: tuple[int, int]) -> TenantStats:
        """What it is doing; of the namespaces, those that the caller sees. moved: bytes in and out."""
        spaces = [space for name in self.names() if sees(name) and (space := self.space(name)) is not None]
        rows = [self.info(space) for space in spaces]
        return TenantStats(
            name=self.name,
            quotas=dict(self.quotas),
            tiers=self.store.stats(),
            flows={tier.name: flow_of(self.metrics, tier.name) for tier in self.store.tiers},
            traffic=self.traffic.total.stats(),
            in_bytes=moved[0],
            out_bytes=moved[1],
            namespaces=tuple(
                self._namespace_stats(row) for row in sorted(rows, key=lambda row: (-row.stored_bytes, row.spec.name))
            ),
            leases=self.leases,
            pins=self.pins.count,
            prefetches=self.prefetches.running,
            inflight_bytes=self.inflight.nbytes,
        )

    def _namespace_stats(self, info: NamespaceInfo) -> NamespaceStats:
        name = info.spec.name
        return NamespaceStats(
            **asdict(self.traffic.of(name).stats()),
            name=name,
            host_blocks=info.host_blocks,
            host_bytes=info.host_bytes,
        )

    def resize(self, nbytes: int) -> int:
        """Change its quota in host; returns what is in force. Raises `CapacityError` beyond `service.host_limit`."""
        self.store.host.resize(nbytes)
        self.quotas["host"] = self.store.host.stats()["capacity_bytes"]
        self.rooms.resize(self.quotas["host"])
        return self.quotas["host"]

    def set_policy(self, name: str) -> None:
        """Change the eviction policy of its host tier. Raises `ConfigError` for one that is none."""
        stats = self.store.host.stats()
        mean = stats["bytes"] // stats["blocks"] if stats["blocks"] else self._typical_block()
        blocks = max(stats["capacity_bytes"] // max(mean, 1), 1)
        self.store.host.set_policy(make_policy(name, blocks, self._clock))
        self._policy = name

    def _typical_block(self) -> int:
        sizes = [nbytes for space in self._spaces.values() for nbytes in space.spec.block_bytes]
        return sum(sizes) // len(sizes) if sizes else _TYPICAL_BLOCK

    def repair(self) -> dict[str, int]:
        """Put its directory on NVMe in order; what was done, nothing where it has none."""
        done: Counter[str] = Counter()
        for tier in self.store.lower:
            if isinstance(tier, NvmeTier):
                done.update(tier.repair())
        return dict(done)

    def close(self) -> None:
        """Close readings and tiers. Idempotent."""
        self.release_owner()
        self.store.close()


def _make_private(path: Path) -> None:
    """Other users of the machine are other tenants, too."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"tiering.nvme.path: {path}: {error.strerror}: name a directory of your own") from error
