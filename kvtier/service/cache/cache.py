"""Cache: every verb of the service, for every port: who may do what, within which limits, on whose store."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Self

from kvtier.config import ServiceSettings, TieringSettings
from kvtier.hints import Hint, RequestHints
from kvtier.keys import KEY_SCHEME, Chain
from kvtier.service.cache.administration import Administration
from kvtier.service.cache.callers import PROCESS, Caller, Scope, require
from kvtier.service.cache.calls import Calls
from kvtier.service.cache.errors import ServiceError
from kvtier.service.cache.events import TenantEvents
from kvtier.service.cache.figures import Figures
from kvtier.service.cache.history import HistoryInfo
from kvtier.service.cache.namespaces import BlockNames, NamespaceInfo, NamespaceSpec, OpenNamespace, check_name
from kvtier.service.cache.puts import check_blocks, check_keys, items, own_session
from kvtier.service.cache.quotas import read_quotas
from kvtier.service.cache.reading import Reading
from kvtier.service.cache.reads import ReadRequest
from kvtier.service.cache.records import BlockPut, PinInfo, PrefetchInfo, PutOutcome
from kvtier.service.cache.rooms import Room
from kvtier.service.cache.state import StateDirectory
from kvtier.service.cache.stats import ServiceStats
from kvtier.service.cache.telemetry import Gauge, Telemetry
from kvtier.service.cache.tenant import Tenant
from kvtier.store import PutOutcome as StoreOutcome
from kvtier.tiers import RegionShare

__all__ = ["Cache"]

_OUTCOMES: Mapping[StoreOutcome, PutOutcome] = {
    "stored": PutOutcome.STORED,
    "joined": PutOutcome.EXISTS,
    "dropped": PutOutcome.DROPPED,
}
_CLIENT = "client."


class Cache:
    """The tenants' stores behind one set of verbs. Thread-safe; made by `open`.

    Keys are chain keys, 16 to 32 bytes, of which the first 16 count. Deadlines are absolute `time.monotonic()`
    seconds, at most `service.request_timeout` away, which is also the default. What a caller may not do, or what does
    not fit, raises `ServiceError` before anything changes; verbs that return a future may raise it, or end with it.

    `match`, `pin`, `hint`, `stats` and all that return futures answer at once. `create_namespace`, `clear_namespace`,
    `drop_namespace`, `delete` and the verbs of the scope admin wait for tiers or disks.

    Invariants:
        1. A caller reaches blocks of its own tenant only, and of namespaces that its token names.
        2. A tenant's blocks are evicted for blocks of the same tenant only.
        3. What is held for a caller ends by `close`, by `release_owner`, or by its ttl.

    Args:
        settings: limits.
        tenants: by name.
        state: closed with it.
    """

    def __init__(self, settings: ServiceSettings, tenants: Mapping[str, Tenant], state: StateDirectory) -> None:
        self.settings = settings
        self._tenants = dict(tenants)
        self._state = state
        stores = {name: tenant.metrics.registry for name, tenant in tenants.items()}
        self.telemetry = Telemetry(stores, self._gauges)
        self._calls = Calls(self.telemetry)
        self._admin = Administration(self._tenants, self._calls, settings)
        self._figures = Figures(self._tenants, self._calls, self.telemetry)

    @classmethod
    def open(
        cls,
        settings: ServiceSettings,
        tiering: TieringSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Open every tenant's tiers.

        Args:
            settings: the service's.
            tiering: what the tenants share.
            clock: monotonic seconds, for pins, hints and policies.

        Raises:
            ConfigError: settings that make no sense together, or damaged state.
            CapacityError: a quota that this machine or these settings do not have.
            TierUnavailable: a directory that cannot be opened, or is another process's.
        """
        quotas = read_quotas(settings, tiering)
        state = StateDirectory.open(settings, tiering)
        tenants: dict[str, Tenant] = {}
        try:
            for name, quota in quotas.items():
                tenants[name] = Tenant(name, quota, settings, tiering, state, clock)
        except BaseException:
            for tenant in tenants.values():
                tenant.close()
            state.close()
            raise
        return cls(settings, tenants, state)

    # ---- whose, and whether

    def _tenant(self, caller: Caller, scope: Scope) -> Tenant:
        require(caller, scope)
        tenant = self._tenants.get(caller.tenant)
        if tenant is None:
            raise ServiceError(
                "forbidden", f"token {caller.token} is of a tenant that this service does not have: add it to the table"
            )
        return tenant

    def _space(self, caller: Caller, scope: Scope, name: str) -> tuple[Tenant, OpenNamespace]:
        tenant = self._tenant(caller, scope)
        check_name(name)
        # What a caller may not see is told apart from nothing by nobody.
        space = tenant.use(name) if caller.sees(name) else None
        if space is None:
            raise ServiceError("unknown_namespace", f"namespace {name}: there is none of this name; create it first")
        return tenant, space

    def _until(self, deadline: float | None) -> float:
        latest = time.monotonic() + self.settings.request_timeout
        if deadline is not None and math.isnan(deadline):
            raise ServiceError("invalid", "deadline: expected `time.monotonic()` seconds")
        return latest if deadline is None else min(deadline, latest)

    def _check(self, keys: Sequence[bytes], parts: int = 1) -> None:
        check_keys(keys, self.settings.max_batch_keys, parts)

    # ---- namespaces

    def create_namespace(self, caller: Caller, spec: NamespaceSpec) -> NamespaceInfo:
        """Make a namespace; the same again is the same. Scope write.

        Raises:
            ServiceError: forbidden; conflict: another one has this name; quota_exceeded; wrong_layout: its
                blocks are too large.
        """
        with self._calls.call("create_namespace", caller):
            tenant = self._tenant(caller, Scope.WRITE)
            if not caller.sees(spec.name):
                patterns = ", ".join(caller.namespaces or ())
                raise ServiceError("forbidden", f"token {caller.token} is for namespaces {patterns}: name one of those")
            largest = max(spec.block_bytes, default=0)
            if largest > self.settings.max_block:
                raise ServiceError(
                    "wrong_layout", f"layout with blocks of {largest} bytes: at most {self.settings.max_block}"
                )
            return tenant.info(tenant.create(spec))

    def namespace(self, caller: Caller, name: str) -> NamespaceInfo:
        """One namespace. Scope read, or write: who puts blocks must know what they are to be.

        Raises:
            ServiceError: forbidden, unknown_namespace.
        """
        with self._calls.call("namespace", caller):
            scope = Scope.WRITE if Scope.WRITE in caller.scopes else Scope.READ
            tenant, space = self._space(caller, scope, name)
            return tenant.info(space)

    def block_bytes(self, caller: Caller, name: str) -> tuple[int, ...]:
        """Bytes of each part of a namespace's blocks, () for opaque ones; counted as no call. Scope read."""
        return self._space(caller, Scope.READ, name)[1].spec.block_bytes

    def namespaces(self, caller: Caller) -> list[NamespaceInfo]:
        """Those that the caller may use, by name. Scope read."""
        with self._calls.call("namespaces", caller):
            tenant = self._tenant(caller, Scope.READ)
            spaces = [tenant.space(name) for name in tenant.names() if caller.sees(name)]
            return [tenant.info(space) for space in spaces if space is not None]

    def clear_namespace(self, caller: Caller, name: str) -> None:
        """Remove all blocks of a namespace from every tier. Scope write.

        Raises:
            ServiceError: forbidden, unknown_namespace; timeout, unavailable: blocks remain in a tier.
        """
        with self._calls.call("clear_namespace", caller):
            tenant, space = self._space(caller, Scope.WRITE, name)
            tenant.clear(space)

    def drop_namespace(self, caller: Caller, name: str) -> None:
        """Remove a namespace and all of its blocks. Scope write.

        Raises:
            ServiceError: forbidden, unknown_namespace; timeout, unavailable: blocks remain in a tier; busy: nothing can
                be written to the state. In all of these cases the namespace remains, too.
        """
        with self._calls.call("drop_namespace", caller):
            tenant, space = self._space(caller, Scope.WRITE, name)
            tenant.drop(space)

    # ---- blocks

    def match(
        self, caller: Caller, ns: str, keys: Sequence[bytes], *, lossy: bool = False, depth: int = 0
    ) -> tuple[str, ...]:
        """Tier of each block of the leading run that is there. A hint: no lease, no recency. Scope read.

        Args:
            caller: who asks.
            ns: namespace.
            keys: of a chain.
            lossy: whether blocks that are not exact will do.
            depth: of the first key in its chain.

        Raises:
            ServiceError: forbidden, unknown_namespace, invalid, too_large.
        """
        with self._calls.call("match", caller):
            tenant, space = self._space(caller, Scope.READ, ns)
            self._check(keys, space.parts)
            tiers = tenant.store.match(space.probes(keys), parts=space.parts, lossy=lossy, depth=depth).tiers
            tenant.traffic.match(ns, len(keys), len(tiers))
            return tiers

    def match_tokens(
        self,
        caller: Caller,
        ns: str,
        tokens: Sequence[int],
        extras: Mapping[int, bytes] | None = None,
        *,
        lossy: bool = False,
    ) -> tuple[list[bytes], tuple[str, ...]]:
        """Chain keys of all full blocks of these tokens, and the tiers of the leading run. Scope read.

        Args:
            caller: who asks.
            ns: namespace with a layout, of the scheme `kvtier.keys.KEY_SCHEME`.
            tokens: ids.
            extras: block index -> what it holds besides tokens, see `kvtier.keys.encode_extra`.
            lossy: whether blocks that are not exact will do.

        Raises:
            ServiceError: forbidden, unknown_namespace, invalid, too_large.
        """
        with self._calls.call("match", caller):
            tenant, space = self._space(caller, Scope.READ, ns)
            layout = space.spec.layout
            if layout is None or space.spec.scheme != KEY_SCHEME:
                raise ServiceError(
                    "wrong_layout",
                    f"namespace {ns}: token ids name blocks only with a layout and the key scheme {KEY_SCHEME}; "
                    "send chain keys",
                )
            most = self.settings.max_batch_keys * layout.block_size
            if len(tokens) > most:
                raise ServiceError("too_large", f"{len(tokens)} tokens: at most {most} at a time")
            chain = Chain(layout.block_size, extras)
            chain.extend(tokens)
            self._check(chain.keys, space.parts)
            tiers = tenant.store.match(space.probes(chain.keys), parts=space.parts, lossy=lossy).tiers
            tenant.traffic.match(ns, len(chain.keys), len(tiers))
            return chain.keys, tiers

    def read(  # noqa: PLR0913  what a read is made of
        self,
        caller: Caller,
        ns: str,
        keys: Sequence[bytes],
        *,
        parts: Sequence[int] | None = None,
        owner: str,
        lossy: bool = False,
        each: bool = False,
        deadline: float | None = None,
        depth: int = 0,
        checked: bool = True,
    ) -> "Future[Reading]":
        """Bring blocks into host and hold them there, until the reading is closed. Scope read.

        Args:
            caller: who reads.
            ns: namespace.
            keys: of a chain, or (`each`) of any blocks.
            parts: that are wanted of each block; None: all. A block counts as there when these are.
            owner: what `release_owner` ends; a connection, as a rule.
            lossy: whether blocks that are not exact will do.
            each: whatever is there; False: the leading run.
            deadline: by which the reading is there.
            depth: of the first key in its chain.
            checked: False: the caller compares what it reads with `Found.guard`; conflict where it cannot.

        Raises:
            ServiceError: forbidden, unknown_namespace, unknown_block: no such part; invalid, too_large, busy, timeout,
                conflict.
        """

        def start() -> "Future[Reading]":
            tenant, space = self._space(caller, Scope.READ, ns)
            chosen = space.chosen(parts)
            self._check(keys, len(chosen))
            most, until = self.settings.max_batch, self._until(deadline)
            request = ReadRequest(space, list(keys), chosen, _CLIENT + owner, lossy, each, until, most, depth, checked)
            future = tenant.read(request)
            future.add_done_callback(partial(self._moved_out, tenant))
            return future

        return self._calls.future("read", caller, start)

    def _moved_out(self, tenant: Tenant, future: "Future[Reading]") -> None:
        if future.exception() is None:
            self.telemetry.moved("out", tenant.name, future.result().nbytes)

    def put(
        self, caller: Caller, ns: str, blocks: Sequence[BlockPut], *, deadline: float | None = None
    ) -> "Future[list[PutOutcome]]":
        """Store blocks, parents first; one outcome each. The buffers stay as they are until then. Scope write.

        A block may come part by part; it is found once all of its parts are there.

        Raises:
            ServiceError: forbidden, unknown_namespace, invalid, wrong_layout, too_large, quota_exceeded, busy.
        """
        return self._calls.future("put", caller, lambda: self._put(caller, ns, blocks, deadline))

    def _put(
        self, caller: Caller, ns: str, blocks: Sequence[BlockPut], deadline: float | None
    ) -> "Future[list[PutOutcome]]":
        tenant, space = self._space(caller, Scope.WRITE, ns)
        self._check([block.key for block in blocks])
        self._check([block.parent for block in blocks if block.parent is not None])
        quota = tenant.quotas["host"]
        nbytes = check_blocks(blocks, space, largest=self.settings.max_block, quota=quota)
        if nbytes > self.settings.max_batch:
            raise ServiceError(
                "too_large", f"{nbytes} bytes: at most {self.settings.max_batch} at a time; split the call"
            )
        until = self._until(deadline)
        rows, hints = items(blocks, space)
        named = [own_session(caller, hint) for hint in hints]
        told: Future[list[PutOutcome]] = Future()
        told.set_running_or_notify_cancel()
        tenant.inflight.take(nbytes)
        try:
            owned = [block.owned for block in blocks]
            stored = tenant.store.put_each(rows, named, deadline=until, owned=owned if any(owned) else ())
        except BaseException:
            tenant.inflight.give(nbytes)
            raise

        def done(future: "Future[list[StoreOutcome]]") -> None:
            tenant.inflight.give(nbytes)
            error = future.exception()
            if error is not None:
                told.set_exception(error)
                return
            outcomes = [_OUTCOMES[outcome] for outcome in future.result()]
            self._moved_in(tenant, space, blocks, outcomes)
            told.set_result(outcomes)

        stored.add_done_callback(done)
        return told

    def room(self, caller: Caller, ns: str, names: BlockNames, sizes: Sequence[int]) -> Room | None:
        """Host memory to receive blocks into that are about to be put (`BlockPut.owned`). Scope write.

        None: there is none now; receive them elsewhere.
        """
        tenant, space = self._space(caller, Scope.WRITE, ns)
        return tenant.rooms.take(space, names, sizes)

    def _moved_in(
        self, tenant: Tenant, space: OpenNamespace, blocks: Sequence[BlockPut], outcomes: Sequence[PutOutcome]
    ) -> None:
        sizes = [
            block.data.nbytes for block, outcome in zip(blocks, outcomes, strict=True) if outcome is PutOutcome.STORED
        ]
        tenant.traffic.put(space.spec.name, len(sizes), sum(sizes))
        self.telemetry.moved("in", tenant.name, sum(sizes))

    def delete(self, caller: Caller, ns: str, keys: Sequence[bytes]) -> int:
        """Remove blocks, all their parts, from every tier. Scope write.

        What descends from them is not matched any more; host forgets it at once, lower tiers when they need the room.

        Returns:
            How many of the keys had a part anywhere.

        Raises:
            ServiceError: forbidden, unknown_namespace, invalid, too_large; timeout, unavailable: see `clear_namespace`.
        """
        with self._calls.call("delete", caller):
            tenant, space = self._space(caller, Scope.WRITE, ns)
            self._check(keys, space.parts)
            stored = space.keys(keys)
            names = tenant.store.whereabouts(stored, lossy=True).result()
            tenant.store.delete(stored)
            return sum(any(names[at : at + space.parts]) for at in range(0, len(names), space.parts))

    def listed(self, caller: Caller, ns: str) -> Iterator[list[bytes]]:
        """See `Tenant.listed`. Scope write, as of `clear_namespace`: a reader is not told what it cannot name itself.

        Raises:
            ServiceError: forbidden, unknown_namespace; unavailable: a tier cannot say.
        """
        with self._calls.call("listed", caller):
            yield from Tenant.listed(*self._space(caller, Scope.WRITE, ns))

    # ---- what is known of blocks

    def pin(self, caller: Caller, ns: str, keys: Sequence[bytes], ttl: float) -> PinInfo:
        """Keep the leading run that is in host there, for `ttl` seconds or until `unpin`. Scope write.

        Raises:
            ServiceError: forbidden, unknown_namespace, invalid, too_large, quota_exceeded, unknown_block.
        """
        with self._calls.call("pin", caller):
            tenant, space = self._space(caller, Scope.WRITE, ns)
            self._check(keys, space.parts)
            if not 0 < ttl <= self.settings.max_pin_ttl:
                raise ServiceError(
                    "invalid", f"ttl {ttl}: expected seconds, above 0, up to {self.settings.max_pin_ttl}"
                )
            stored = space.keys(keys)
            return tenant.pins.add(ns, ttl, lambda owner: tenant.store.pin(stored, owner, parts=space.parts, ttl=ttl))

    def unpin(self, caller: Caller, pin_id: str) -> None:
        """End a pin. Scope write.

        Raises:
            ServiceError: forbidden, unknown_pin.
        """
        with self._calls.call("unpin", caller, always=True):
            self._tenant(caller, Scope.WRITE).pins.remove(pin_id, caller.sees)

    def prefetch(
        self, caller: Caller, ns: str, keys: Sequence[bytes], *, deadline: float | None = None, depth: int = 0
    ) -> PrefetchInfo:
        """Bring the leading run into host, held by nobody. Scope read.

        Raises:
            ServiceError: forbidden, unknown_namespace, invalid, too_large, busy.
        """
        with self._calls.call("prefetch", caller):
            tenant, space = self._space(caller, Scope.READ, ns)
            self._check(keys, space.parts)
            until, stored, parts = self._until(deadline), space.keys(keys), space.parts
            start = partial(tenant.store.prefetch, stored, parts=parts, deadline=until, depth=depth)
            return tenant.prefetches.add(ns, start)

    def prefetched(self, caller: Caller, prefetch_id: str) -> PrefetchInfo:
        """How far a prefetch is. Scope read.

        Raises:
            ServiceError: forbidden, unknown_prefetch.
        """
        with self._calls.call("prefetched", caller, always=True):
            return self._tenant(caller, Scope.READ).prefetches.info(prefetch_id, caller.sees)

    def cancel(self, caller: Caller, prefetch_id: str) -> PrefetchInfo:
        """Stop a prefetch; what has arrived stays. Scope read.

        Raises:
            ServiceError: forbidden, unknown_prefetch.
        """
        with self._calls.call("cancel", caller, always=True):
            return self._tenant(caller, Scope.READ).prefetches.cancel(prefetch_id, caller.sees)

    def hint(self, caller: Caller, ns: str, keys: Sequence[bytes], hints: RequestHints, *, first: int = 0) -> None:
        """Take new hints for consecutive blocks, the first at depth `first` of `hints`. Scope write.

        Keys that are absent are ignored.

        Raises:
            ServiceError: forbidden, unknown_namespace, invalid, too_large.
        """
        with self._calls.call("hint", caller):
            tenant, space = self._space(caller, Scope.WRITE, ns)
            self._check(keys, space.parts)
            if first < 0:
                raise ServiceError("invalid", f"first {first}: expected a depth, 0 or more")
            each = [own_session(caller, hints.at(first + at)) for at in range(len(keys))]
            tenant.store.hint(space.keys(keys), [hint for hint in each for _ in range(space.parts)])
            if hints.end_of_session:
                tenant.store.end_session(own_session(caller, hints.at(first)).session or "")

    def end_session(self, caller: Caller, session: str) -> None:
        """No further turn of a session follows. Scope write.

        Raises:
            ServiceError: forbidden.
        """
        with self._calls.call("end_session", caller):
            tenant = self._tenant(caller, Scope.WRITE)
            tenant.store.end_session(own_session(caller, Hint(session=session)).session or "")

    # ---- the whole

    def stats(self, caller: Caller) -> ServiceStats:
        """What the service is doing: of the caller's tenant, or with the scope admin of all. Scope read."""
        with self._calls.call("stats", caller, always=True):
            self._tenant(caller, Scope.READ)
            return self._figures.stats(caller)

    def history(self, caller: Caller, seconds: float, tenant: str | None = None) -> HistoryInfo:
        """How figures went: of one tenant that `stats` shows the caller, or of all of them together. Scope read.

        Raises:
            ServiceError: forbidden; invalid: no such tenant.
        """
        with self._calls.call("history", caller, always=True):
            self._tenant(caller, Scope.READ)
            return self._figures.history(caller, seconds, tenant)

    def events(self, caller: Caller) -> TenantEvents:
        """The tenant's block events, of the namespaces that the caller may use. Scope read.

        Raises:
            ServiceError: forbidden.
        """
        tenant = self._tenant(caller, Scope.READ)
        return TenantEvents(tenant.events, caller.sees)

    def regions(self, caller: Caller) -> list[RegionShare]:
        """The tenant's host memory, as other processes map it for reading: `Found.span` says where. Scope read.

        Raises:
            ServiceError: forbidden: the token is for some namespaces only, and the memory has all of them.
        """
        tenant = self._tenant(caller, Scope.READ)
        if caller.namespaces is not None:
            raise ServiceError(
                "forbidden",
                f"token {caller.token} is for some namespaces only, and shared memory shows all of a tenant's: use the "
                "socket, or a tenant of its own",
            )
        return tenant.store.host.regions()

    def metrics_text(self) -> bytes:
        """All metrics in the Prometheus text format; for admins, as it names every tenant."""
        return self.telemetry.text()

    def release_owner(self, owner: str) -> None:
        """A connection died: close its readings, and end its reads."""
        for tenant in self._tenants.values():
            tenant.release_owner(_CLIENT + owner)

    @property
    def draining(self) -> bool:
        """Whether new calls are refused."""
        return self._calls.draining

    @property
    def underway(self) -> int:
        """Calls that run, and readings that are open."""
        return self._calls.underway + sum(tenant.leases for tenant in self._tenants.values())

    def left_above(self) -> tuple[int, int]:
        """Bytes in host that wait for lower tiers, and how many parts of blocks these did not take; asks the tiers."""
        stores = [tenant.store for tenant in self._tenants.values()]
        return sum(store.waiting_bytes for store in stores), sum(store.untaken() for store in stores)

    # ---- scope admin

    def drain(self, caller: Caller = PROCESS) -> None:
        """Refuse new calls; what runs may end. Scope admin."""
        self._admin.drain(caller)

    def resume(self, caller: Caller = PROCESS) -> None:
        """Take calls again. Scope admin."""
        self._admin.resume(caller)

    def flush(self, caller: Caller = PROCESS) -> None:
        """Make everything that was put as durable as the tiers can. Scope admin."""
        self._admin.flush(caller)

    def compact(self, caller: Caller) -> dict[str, dict[str, int]]:
        """Put the NVMe directories in order: what was done, by tenant. Scope admin."""
        return self._admin.compact(caller)

    def set_capacity(self, caller: Caller, tenant: str, tier: str, nbytes: int) -> int:
        """Change a quota at run time; returns what is in force. Scope admin."""
        return self._admin.set_capacity(caller, tenant, tier, nbytes)

    def set_policy(self, caller: Caller, tenant: str, policy: str) -> None:
        """Change the eviction policy of a tenant's host tier at run time. Scope admin."""
        self._admin.set_policy(caller, tenant, policy)

    def close(self) -> None:
        """Close every reading and all tiers. Idempotent."""
        self._calls.drain()
        self._figures.close()
        for tenant in self._tenants.values():
            tenant.close()
        self._state.close()

    def _gauges(self) -> Iterable[Gauge]:
        yield Gauge("kvtier_service_draining", "1 while new calls are refused", {}, self._calls.draining)
        for tenant in self._tenants.values():
            yield from tenant.gauges()
