"""TieredStore: look up, lease, promote and put blocks over a host tier and the tiers below it.

One block's way down: put -> host (reserved, written, committed) -> placement -> demotion -> every lower tier.
Its way up: match -> acquire (leased where it lies) -> fetch (promoted into host, leased there) -> read in place.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Literal, TypeVar

from kvtier.cost import TierSpeed
from kvtier.errors import ConfigError, FormatMismatch
from kvtier.events import EventLog
from kvtier.hints import Hint
from kvtier.layout import Layout
from kvtier.metrics import Metrics
from kvtier.policies.prefetch import NoPrefetch
from kvtier.store.deadlines import Deadlines
from kvtier.store.demotion import Demoter
from kvtier.store.gateway import GatewayTier
from kvtier.store.inflight import InFlight
from kvtier.store.lanes import Lane, Operation, Steps
from kvtier.store.lease import Lease
from kvtier.store.leasing import Leases, Pins
from kvtier.store.options import StoreOptions
from kvtier.store.placement import Placed, Placement
from kvtier.store.port import Port
from kvtier.store.prefetching import Prefetch, prefetch_steps
from kvtier.store.private import PrivateObjects
from kvtier.store.promotion import Promoter
from kvtier.store.putting import Putter, Received
from kvtier.store.recoding import Recoder
from kvtier.store.removal import Remover
from kvtier.store.results import Located, PutOutcome, PutResult, StoreMatch
from kvtier.store.sessions import SessionBook, Turns
from kvtier.tiers import OWN_WORK, BlockRef, Owner, Tier

__all__ = ["TieredStore"]

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.25

_T = TypeVar("_T")


class TieredStore:
    """A block store over `host` and the tiers below it. Thread-safe.

    Keys and items are block-major: with `parts` = P, `keys[b * P + p]` is part p of block b. A block is ready only when
    all its parts are; runs, positions and counts are of blocks.

    Work that moves bytes or touches a disk runs in the store's threads and returns a `Future`; `match`, `wanted`,
    `pin` and `release` only touch indices and host memory and run in the caller's. A tier's failure degrades to a
    miss or a drop; of a removal it is an error. Deadlines are absolute `time.monotonic()` seconds.

    Args:
        host: the gateway: whatever moves between the device and lower tiers passes through it.
        lower: tiers below, fastest first.
        metrics: shared with the tiers.
        options: see `StoreOptions`.
        events: the log that the tiers tell what they hold, kept here for whoever follows the store.
        clock: seconds, for pins, budgets, breakers and predictions.

    Invariants:
        1. A key is written once per tier, however many put or load it at the same time: the others join.
        2. Only exact blocks are leased unless lossy ones are accepted.
        3. Every lease is ended exactly once, also when its tier failed or hung meanwhile.
        4. What hangs in one tier holds up nobody who does not need that tier, and them no longer than their deadline.
    """

    def __init__(
        self,
        host: GatewayTier,
        lower: Sequence[Tier] = (),
        *,
        metrics: Metrics | None = None,
        options: StoreOptions | None = None,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = options or StoreOptions()
        self.host = host
        self.lower = tuple(lower)
        self.metrics = metrics or Metrics()
        self.options = options
        self.events = events
        self._recoder = Recoder(self.tiers, options.formats, accept_lossy=options.accept_lossy)
        self._ports = [
            Port(host, options, self.metrics, clock, memory=host),
            *(Port(tier, options, self.metrics, clock) for tier in lower),
        ]
        gate = self._ports[0]
        self._demoters = [
            Demoter(host, gate, port, self._recoder, bound=options.writeback_bytes, patience=options.load_deadline)
            for port in self._ports[1:]
        ]
        inflight = InFlight()
        self._placement = Placement(host, gate, self._demoters, options, self.metrics, clock)
        self._putter = Putter(gate, host, inflight, self._recoder, self._placement, self.metrics)
        self._promoter = Promoter(self._ports, host, inflight, self._recoder, self._placement, self.metrics)
        self._leases = Leases(self._ports)
        self._remover = Remover(self._ports, inflight, self._leases, self._placement)
        self._pins = Pins(gate, self.metrics, clock)
        self._book = SessionBook(options.session_keys)
        self._turns = Turns(options.prefetch, self._book, clock)
        # Puts keep their order, parents first.
        self._puts = Lane("kvtier-put", 1)
        self.private = PrivateObjects(host, gate, self._puts)
        self._deadlines = Deadlines(self._ports, options.load_deadline)
        self._prefetches: dict[Owner, set[Prefetch]] = {}
        self._lock = threading.Lock()
        self._closed = False
        if not isinstance(options.prefetch, NoPrefetch):
            self._tick()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All tiers, fastest first."""
        return (self.host, *self.lower)

    def register(self, ns: int, layout: Layout, formats: Mapping[str, str] | None = None) -> None:
        """Say what the blocks of a namespace are, so that they can be encoded; unregistered ones are kept raw.

        Args:
            ns: `keys.namespace_index`.
            layout: of its raw blocks; parts are ordered by layer group, then by shard.
            formats: tier name -> format id where it differs from `StoreOptions.formats`.

        Raises:
            ConfigError: an unknown tier or format, a lossy one that is not accepted, one of variable size in host,
                or another layout than before.
            FormatMismatch: a format has no encoding for this layout.
        """
        self._recoder.register(ns, layout, formats or {})

    def forget(self, ns: int) -> None:
        """Take `register` back, of a namespace of which no tier of this process holds anything any more. Idempotent."""
        self._recoder.forget(ns)

    # ---- looking up

    def match(
        self, keys: Sequence[bytes], *, parts: int = 1, lossy: bool | None = None, depth: int = 0, remote: bool = True
    ) -> StoreMatch:
        """Where the longest leading run of `keys` lies. Index probes only: no bytes, no lease, no recency.

        A remote tier (see `TierCaps.remote`) is waited for; who must not wait calls `find`, or does without it.

        Args:
            keys: store keys, block-major.
            parts: per block.
            lossy: whether lossy blocks will do; None: as the options say.
            depth: of the first block in its chain; by a wrong one, tiers that keep runs of blocks find less.
            remote: whether remote tiers are asked, too.
        """
        _check_parts(keys, parts)
        exact = self._exact(lossy=lossy)
        return StoreMatch(tuple(self._leases.match(keys, parts, exact=exact, depth=depth, remote=remote)))

    def find(
        self,
        keys: Sequence[bytes],
        *,
        parts: int = 1,
        lossy: bool | None = None,
        depth: int = 0,
        deadline: float | None = None,
    ) -> "Future[StoreMatch]":
        """`match` without waiting for remote tiers; at the deadline the result is what was found until then."""
        _check_parts(keys, parts)
        names: list[str] = []
        steps = self._find(names, list(keys), parts, depth, exact=self._exact(lossy=lossy))
        until = self._deadlines.absolute(deadline)
        return self._deadlines.run("match", steps, lambda: StoreMatch(tuple(names)), until)

    def _find(self, names: list[str], keys: list[bytes], parts: int, depth: int, *, exact: bool) -> Steps[StoreMatch]:
        yield from self._leases.find(names, keys, parts, exact=exact, depth=depth)
        return StoreMatch(tuple(names))

    @property
    def has_remote(self) -> bool:
        """Whether one of the tiers is a remote one."""
        return any(tier.caps.remote for tier in self.lower)

    def wanted(self, keys: Sequence[bytes], *, exact: bool, parts: int = 1) -> int:
        """Leading blocks that need no saving: they are there, and (`exact`) exact where host can keep them so.

        Remote tiers are not asked: what only they have, and was computed again, is worth a place in host, and is not
        written to them twice.
        """
        _check_parts(keys, parts)
        exact = exact and self._recoder.keeps_exact()
        run = len(self._leases.match(keys, parts, exact=exact, remote=False))
        # A damaged or deleted block leaves its descendants on disk: a hole that is leapt over would stay for good.
        return self._leases.unbroken(keys[: run * parts], parts, exact=exact)

    def keeps_exact(self) -> bool:
        """Whether what is put as exact is exact in host, too."""
        return self._recoder.keeps_exact()

    def encodes(self, ns: int) -> bool:
        """Whether blocks of a namespace are encoded in host: their bytes do not stay where they were received."""
        return self._recoder.encodes(self.host, ns)

    def held(self, keys: Sequence[bytes], *, exact: bool) -> list[bool]:
        """Which of `keys` are in host, and (`exact`) exact where host can keep them so; each by itself, no run."""
        return self._ports[0].present(keys, exact=exact and self._recoder.keeps_exact())

    def whereabouts(
        self, keys: Sequence[bytes], *, lossy: bool | None = None, deadline: float | None = None
    ) -> "Future[list[str | None]]":
        """The fastest tier of each key, each by itself, no run; None: nowhere. A hint as `find` is, and as cheap."""
        names: list[str | None] = [None] * len(keys)
        until = self._deadlines.absolute(deadline)
        steps = self._leases.whereabouts(names, list(keys), exact=self._exact(lossy=lossy))
        return self._deadlines.run("match", steps, lambda: list(names), until)

    def acquire(
        self,
        keys: Sequence[bytes],
        owner: Owner,
        *,
        parts: int = 1,
        lossy: bool | None = None,
        deadline: float | None = None,
        depth: int = 0,
        checked: bool = True,
    ) -> "Future[Lease]":
        """Lease the longest leading run of `keys`, each part in the fastest tier that has it.

        Host blocks are checksummed now (unless `checked` is False: whoever reads them compares them with
        `Handle.checksum`), blocks of lower tiers when they are fetched. At the deadline (None:
        `StoreOptions.load_deadline` from now) the lease is what was found until then. `depth` is as in `match`.
        """
        _check_parts(keys, parts)
        until = self._deadlines.absolute(deadline)
        lease = self._leases.new(owner, parts, exact=self._exact(lossy=lossy), checked=checked)
        steps = self._acquire(lease, list(keys), until, depth)
        return self._deadlines.run("acquire", steps, lambda: self._leases.complete(lease), until)

    def _acquire(self, lease: Lease, keys: list[bytes], deadline: float | None, depth: int) -> Steps[Lease]:
        yield from self._leases.steps(lease, keys, deadline, depth)
        if self._placement.watches_use:
            found = [Placed(handle.ref, handle.nbytes) for tier, handle in lease.blocks if tier is self.host]
            if found:
                self._puts.submit(lambda: self._placement.used(found))
        return lease

    def release(self, lease: Lease) -> None:
        """End a lease. Idempotent."""
        self._leases.release(lease)

    def release_owner(self, owner: Owner) -> None:
        """End everything that an owner holds or waits for: leases, pins, prefetches. Unknown owners hold nothing."""
        with self._lock:
            prefetches = self._prefetches.pop(owner, set())
        for prefetch in prefetches:
            prefetch.cancel()
        self._leases.release_owner(owner)
        self._pins.remove(owner)

    # ---- the way up

    def fetch(self, lease: Lease, start: int, stop: int, *, deadline: float | None = None) -> "Future[int]":
        """Bring blocks [start, stop) of a lease into host, leased there.

        Returns:
            How many leading ones of them are now in host and verified (but those that an unchecked lease found there).
            The lease keeps holding all of its blocks.
        """
        until = self._deadlines.absolute(deadline)
        steps = self._fetch(lease, start, stop, until)
        return self._deadlines.run("fetch", steps, lambda: self._promoter.in_host(lease, start, stop), until)

    def _fetch(self, lease: Lease, start: int, stop: int, deadline: float | None) -> Steps[int]:
        fits = yield from self._promoter.steps(lease, start, stop, deadline)
        if not fits:
            self.metrics.dropped_blocks.labels(self.host.name, "no_space_to_promote").inc()
        return self._promoter.in_host(lease, start, stop)

    def located(self, lease: Lease, start: int, stop: int) -> list[Located]:
        """Where the parts of blocks [start, stop) of a fetched lease lie in host's regions, and in what format."""
        return [Located(self.host.span(handle), handle.fmt) for _, handle in lease.part(start, stop)]

    def prefetch(
        self, keys: Sequence[bytes], owner: Owner, *, parts: int = 1, deadline: float | None = None, depth: int = 0
    ) -> Prefetch:
        """Bring the longest leading run of `keys` into host, where it stays as long as its recency lets it.

        `depth` is as in `match`.
        """
        _check_parts(keys, parts)
        until = self._deadlines.absolute(deadline)
        lease = self._leases.new(OWN_WORK + "prefetch", parts, exact=self._exact(lossy=None))
        prefetch = Prefetch(
            prefetch_steps(lease, list(keys), self._leases, self._promoter, self.metrics, until, depth),
            lambda: self._promoter.in_host(lease, 0, len(lease)),
            self.metrics,
            self._deadlines.blaming("prefetch", until),
        )
        with self._lock:
            self._prefetches.setdefault(owner, set()).add(prefetch)
        prefetch.future.add_done_callback(lambda _: self._prefetched(owner, prefetch))
        prefetch.start()
        self._deadlines.watch(prefetch, until)
        return prefetch

    def _prefetched(self, owner: Owner, prefetch: Prefetch) -> None:
        with self._lock:
            going = self._prefetches.get(owner, set())
            going.discard(prefetch)
            if not going:
                self._prefetches.pop(owner, None)

    # ---- the way down

    def put(
        self,
        items: Sequence[tuple[BlockRef, memoryview]],
        hints: Sequence[Hint] | None = None,
        *,
        parts: int = 1,
    ) -> "Future[PutResult]":
        """Store raw blocks, parents first, each with all its parts or not at all.

        The buffers must stay as they are until the result is there.

        Args:
            items: blocks, block-major. The parent of part p of a block is part p of the block before it.
            hints: one per item.
            parts: per block.

        Raises:
            FormatMismatch: a block has another size than its layout says, or the numbers do not fit.
        """
        return self._start_put(items, hints, parts, None, PutResult.of)

    def put_each(
        self,
        items: Sequence[tuple[BlockRef, memoryview]],
        hints: Sequence[Hint] | None = None,
        *,
        parts: int = 1,
        deadline: float | None = None,
        owned: Sequence[Received | None] = (),
    ) -> "Future[list[PutOutcome]]":
        """Like `put`, and tells what became of each block. What has not begun at the deadline is dropped.

        owned: of each item, the memory of `private.room` that its bytes lie in, so that they need not be copied.
        """
        return self._start_put(items, hints, parts, deadline, list, owned)

    def _start_put(
        self,
        items: Sequence[tuple[BlockRef, memoryview]],
        hints: Sequence[Hint] | None,
        parts: int,
        deadline: float | None,
        told: Callable[[list[PutOutcome]], _T],
        owned: Sequence[Received | None] = (),
    ) -> "Future[_T]":
        checked = self._putter.items(items, hints, parts, owned)
        self._pins.expire()
        self._turns.note(self._book.note([ref.key for ref, _ in items], [item.hint for item in checked]))

        def steps() -> Steps[_T]:
            yield self._puts
            return told(self._putter.put(checked, parts, deadline))

        return Operation(steps(), lambda: told(["dropped"] * (len(items) // parts))).start()

    # ---- what is known of blocks

    def pin(self, keys: Sequence[bytes], owner: Owner, *, parts: int = 1, ttl: float | None = None) -> int:
        """Keep the leading run that is in host there, until `unpin`, or for `ttl` seconds.

        Returns:
            How many blocks are pinned by this.
        """
        _check_parts(keys, parts)
        pinned = self._pins.add(keys, owner, parts, ttl)
        if ttl is not None and pinned:
            self._deadlines.after(ttl, self._pins.expire, partial(self._pins.of, owner))
        return pinned

    def unpin(self, owner: Owner) -> None:
        """End all pins of an owner. Unknown owners have none."""
        self._pins.remove(owner)

    def hint(self, keys: Sequence[bytes], hints: Sequence[Hint]) -> None:
        """Take new hints, one per key, in every tier, soon; keys that are absent are ignored."""
        if len(keys) != len(hints):
            raise FormatMismatch(f"{len(keys)} keys, {len(hints)} hints: expected one per key")
        self._turns.note(self._book.note(keys, hints))
        self._hint(keys, hints)

    def _hint(self, keys: Sequence[bytes], hints: Sequence[Hint]) -> None:
        for port in self._ports if keys else ():
            # Host's after the puts that came before; below, what hangs holds up nobody but itself.
            lane = self._puts if port.tier is self.host else port.lookups
            lane.submit(partial(port.attempt, "hint", partial(port.tier.hint, list(keys), list(hints)), None))

    def end_session(self, session: str) -> None:
        """No further turn follows: what only this session used has `reuse = none` from now on."""
        self._turns.end(session)
        own = self._book.end(session)
        self._hint(own, [Hint(reuse="none", session=session)] * len(own))

    def renew(self, keys: Sequence[bytes]) -> None:
        """The leading run of a chain was used by somebody who had it elsewhere: this is a use in every tier.

        Returns at once. Remote tiers are not told.
        """
        if not keys:
            return
        chain, (gate, *below) = list(keys), self._ports
        self._puts.submit(lambda: self._placement.used([Placed(one.ref, one.nbytes) for one in gate.renew(chain)]))
        for port in below:
            if not port.tier.caps.remote:
                port.lookups.submit(partial(port.renew, chain))

    def demote(self, keys: Sequence[bytes]) -> None:
        """Have those of a chain's blocks that host holds written to the lower tiers that lack them. Returns at once.

        Placement writes a block when it is put, leaves host or is used again; what a lower tier lost since, it does not
        bring back before that.
        """
        nothing: list[BlockRef | None] = []

        def demote() -> None:
            refs = self._ports[0].attempt("refs", lambda: self.host.refs(keys), nothing)
            self._placement.demote([ref for ref in refs if ref is not None])

        self._puts.submit(demote)

    def duplicate(self, keys: Sequence[bytes], *, above: bool) -> None:
        """The device holds these blocks too (or not any more): they leave host before all others."""
        self._ports[0].attempt("duplicate", lambda: self.host.duplicate(keys, above=above), None)

    # ---- removal

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove blocks and what descends from them from every tier, those on their way included.

        Returns:
            How many of the keys were in some tier.

        Raises:
            BlocksRemain: a tier failed or gave no answer; from the others they are gone.
        """
        self._barrier()
        return self._remover.delete(keys)

    def clear(self, tier_name: str | None = None, *, ns: int | Collection[int] | None = None) -> None:
        """Remove every block of one or several namespaces (None: all) from one tier (None: all).

        Those on their way are included. Several take hardly longer than one.

        Raises:
            ConfigError: there is no tier of that name.
            BlocksRemain: a tier failed, or was not done within `StoreOptions.load_deadline`; the others are cleared.
        """
        names = [tier.name for tier in self.tiers]
        if tier_name not in (None, *names):
            raise ConfigError(f"no tier {tier_name!r}: expected one of {', '.join(names)}; a namespace goes to ns=")
        self._barrier()
        self._remover.clear(tier_name, ns)

    # ---- the whole

    def flush(self) -> None:
        """Wait for all puts and demotions so far, and make every tier as durable as it can be.

        A tier that makes no progress for `StoreOptions.load_deadline` is not waited for any longer; that is counted.
        """
        self.settle()
        for port in self._ports:
            port.patiently("flush", port.tier.flush)

    def settle(self) -> bool:
        """Wait until all puts so far are in host and what is to go down with them is written or dropped.

        Returns:
            False where a tier made no progress for `StoreOptions.load_deadline`: it is not waited for any longer.
        """
        self._barrier()
        return not self._placement.settle()

    def _barrier(self) -> None:
        done = threading.Event()
        if self._puts.submit(done.set):
            done.wait()

    @property
    def write_rule(self) -> str:
        """When blocks go to lower tiers now: the configured rule, or `second_touch` while the budget is tight."""
        return self._placement.rule

    def speeds(self, direction: Literal["read", "write"] = "read") -> dict[str, TierSpeed]:
        """How fast each tier was read or written by loads or demotions lately, and what is queued there."""
        return {port.name: (port.reads if direction == "read" else port.writes).snapshot() for port in self._ports}

    @property
    def waiting_bytes(self) -> int:
        """Of host, waiting for lower tiers."""
        return self._placement.waiting_bytes

    def untaken(self) -> int:
        """How many blocks are in host alone because lower tiers that were given them failed, or had no room.

        Remote tiers are asked, and waited for.
        """
        return self._placement.untaken()

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters and gauges by tier name, and under `store`: leases, pins, waiting_bytes and sessions.

        A remote tier is asked for its own, and waited for.
        """
        by_tier = {tier.name: tier.stats() for tier in self.tiers}
        for port in self._ports:
            by_tier[port.name]["written_bytes"] = int(self.metrics.value("written_bytes_total", tier=port.name))
        own = {
            "leases": self._leases.count,
            "pins": self._pins.count,
            "waiting_bytes": self.waiting_bytes,
            "sessions": len(self._book),
        }
        return by_tier | {"store": own}

    def close(self) -> None:
        """Take nothing more, finish what is under way, close all tiers. Idempotent.

        A tier that hangs is not waited for longer than `StoreOptions.load_deadline`, and is left as it is.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        patience = self.options.load_deadline
        self._puts.close(patience)
        self._deadlines.close()
        hung = {port.name for port in self._placement.close(patience)}
        hung |= {port.name for port in self._ports if not port.close(patience)}
        # The host last: what hangs may still touch it.
        for port in reversed(self._ports):
            if port.name in hung:
                self.metrics.errors.labels(port.name, "close").inc()
                _log.error("tier %s hangs and is left open", port.name)
            else:
                port.patiently("close", port.tier.close)

    def _exact(self, *, lossy: bool | None) -> bool:
        return not (self.options.accept_lossy if lossy is None else lossy)

    def _tick(self) -> None:
        self._deadlines.after(_TICK_SECONDS, self._tick)
        for session, keys in self._turns.due():
            self.prefetch(keys, f"{OWN_WORK}session.{session}")


def _check_parts(keys: Sequence[bytes], parts: int) -> None:
    if parts < 1 or len(keys) % parts:
        raise FormatMismatch(f"{len(keys)} keys in blocks of {parts} parts: expected whole blocks")
