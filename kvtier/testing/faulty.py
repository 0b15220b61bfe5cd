"""FaultyTier: a real tier that fails as it is told to.

tier = FaultyTier(NvmeTier(path, capacity), [Fault("read", Kind.CORRUPT, nth=2)])
tier.inject(Fault("*", Kind.UNAVAILABLE, probability=0.1, seed=7))
tier.heal()
tier.injected[("read", Kind.CORRUPT)]        # how often it struck

What it answers is what a tier that keeps the protocol may answer: a fault never makes it hand out wrong bytes as good.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast
from weakref import WeakSet

import numpy as np

from kvtier.errors import ConfigError, KVTierError, TierUnavailable
from kvtier.hints import Hint
from kvtier.layout import Span
from kvtier.policies import EvictionPolicy
from kvtier.store.gateway import GatewayTier
from kvtier.testing.faults import ALL, Fault, Kind
from kvtier.tiers import (
    BlockRef,
    Completions,
    Done,
    Full,
    Handle,
    ListingTier,
    MeteredTier,
    Owner,
    RegionShare,
    Reservation,
    Status,
    Ticket,
    Tier,
)

__all__ = ["FaultyHostTier", "FaultyTier"]

_GARBAGE = 0xA5

Item = tuple[Handle, memoryview]


@dataclass(slots=True)
class _Armed:
    """A fault in force: how many calls of its verb it has seen, and its own dice."""

    fault: Fault
    dice: random.Random
    calls: int = 0

    def strikes(self, verb: str) -> bool:
        if self.fault.verb not in (ALL, verb) or not self.fault.fits(verb):
            return False
        self.calls += 1
        if self.fault.nth is not None and self.calls != self.fault.nth:
            return False
        return self.dice.random() < self.fault.probability


class FaultyTier:
    """Implements `kvtier.tiers.Tier` over another tier. Thread-safe.

    With an empty plan it is the other tier, call by call. Of the faults that strike one call, all delays add up, and
    the first other one decides the outcome. In one thread, equal plans strike equal calls.

    Args:
        inner: the tier that does the work. It is closed with this one.
        plan: the faults in force from the beginning; see `inject`.
        damage: flips a bit of a ready record's stored bytes behind the tier's back (as `TierSuite.corrupt` does);
            needed for `Kind.ROT` only.

    Attributes:
        injected: (verb, kind) -> how often a fault struck.
    """

    def __init__(
        self, inner: Tier, plan: Iterable[Fault] = (), *, damage: Callable[[Tier, bytes], None] | None = None
    ) -> None:
        self.name = inner.name
        self.caps = inner.caps
        self.injected: Counter[tuple[str, Kind]] = Counter()
        self._inner = inner
        self._damage = damage
        self._lock = threading.Lock()
        self._armed: list[_Armed] = []
        self._healed = threading.Event()
        self._completions = Completions()
        self._hidden: WeakSet[Ticket] = WeakSet()
        self.inject(*plan)

    # ---- the switches

    def inject(self, *faults: Fault) -> None:
        """Put further faults in force."""
        if self._damage is None and any(fault.kind is Kind.ROT for fault in faults):
            raise ConfigError("Kind.ROT needs FaultyTier(..., damage=...): a function that flips a stored bit")
        with self._lock:
            self._armed += [_Armed(fault, random.Random(fault.seed)) for fault in faults]  # noqa: S311 - dice, no secret

    def heal(self) -> None:
        """No fault is in force any more; what hangs goes on, and lost completions arrive."""
        with self._lock:
            self._armed.clear()
            healed, self._healed = self._healed, threading.Event()
        healed.set()

    def _strike(self, verb: str) -> Fault | None:
        """Delays and errors happen here; what is left to the verb is the fault that changes its outcome."""
        with self._lock:
            struck = [armed for armed in self._armed if armed.strikes(verb)]
            self.injected.update((verb, armed.fault.kind) for armed in struck)
        outcome: Fault | None = None
        for armed in struck:
            fault = armed.fault
            if fault.kind is Kind.LATENCY:
                time.sleep(fault.seconds + armed.dice.uniform(0.0, fault.jitter))
            elif outcome is None:
                outcome = fault
        if outcome is not None and outcome.kind is Kind.UNAVAILABLE:
            raise TierUnavailable(f"tier {self.name}: injected failure of {verb}")
        return outcome

    # ---- readers

    def contains(self, keys: Sequence[bytes], deadline: float | None = None, *, exact: bool = False) -> Ticket:
        """See `Tier.contains`."""

        def spoiled(fault: Fault) -> Ticket:
            good, bad = keys[: fault.first_item], keys[fault.first_item :]
            if fault.kind is Kind.EIO:
                statuses = self._wait(self._inner.contains(good, deadline, exact=exact)).statuses
                return self._answer([*statuses, *[Status.MISS] * len(bad)])
            done = self._wait(self._inner.contains(keys, deadline, exact=exact))
            self._inner.remove(bad)
            return self._answer(done.statuses)

        return self._ticketed(
            "contains", len(keys), deadline, lambda: self._inner.contains(keys, deadline, exact=exact), spoiled
        )

    def acquire(
        self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None, *, exact: bool = False
    ) -> Ticket:
        """See `Tier.acquire`."""

        def spoiled(fault: Fault) -> Ticket:
            good, bad = keys[: fault.first_item], keys[fault.first_item :]
            if fault.kind is Kind.VANISH:
                self._inner.remove(bad)
            if fault.kind is Kind.ROT:
                self._rot(bad)
            if fault.kind in (Kind.VANISH, Kind.ROT):
                return self._inner.acquire(keys, owner, deadline, exact=exact)
            done = self._wait(self._inner.acquire(good, owner, deadline, exact=exact))
            rest = [Status.MISS] * len(bad)
            if fault.kind is Kind.CORRUPT and bad and len(done.handles) == len(good):
                self._inner.remove(bad[:1])
                rest[0] = Status.CORRUPT
            return self._answer([*done.statuses, *rest], done.handles)

        return self._ticketed(
            "acquire", len(keys), deadline, lambda: self._inner.acquire(keys, owner, deadline, exact=exact), spoiled
        )

    def read(self, items: Sequence[Item], deadline: float | None = None) -> Ticket:
        """See `Tier.read`. The buffers of what fails hold garbage, as far as they were written."""

        def spoiled(fault: Fault) -> Ticket:
            if fault.kind is Kind.ROT:
                self._rot([handle.ref.key for handle, _ in items[fault.first_item :]])
                return self._inner.read(items, deadline)
            good = self._wait(self._inner.read(items[: fault.first_item], deadline)).statuses
            return self._answer([*good, *self._spoil_read(fault.kind, items[fault.first_item :], deadline)])

        return self._ticketed("read", len(items), deadline, lambda: self._inner.read(items, deadline), spoiled)

    def _spoil_read(self, kind: Kind, items: Sequence[Item], deadline: float | None) -> list[Status]:
        if kind in (Kind.SHORT, Kind.CORRUPT):
            self._wait(self._inner.read(items, deadline))
        for handle, out in items:
            target = np.frombuffer(out, np.uint8, handle.nbytes)
            if kind is Kind.CORRUPT:
                target[handle.nbytes // 2] ^= 1
            else:
                target[handle.nbytes // 2 if kind is Kind.SHORT else 0 :] = _GARBAGE
        if kind in (Kind.CORRUPT, Kind.VANISH):
            self._inner.remove([handle.ref.key for handle, _ in items])
        return [Status.CORRUPT if kind is Kind.CORRUPT else Status.MISS] * len(items)

    def release(self, handles: Sequence[Handle]) -> None:
        """See `Tier.release`. `UNAVAILABLE`: it is done, and the answer is lost."""
        self._ending("release", lambda: self._inner.release(handles))

    def release_owner(self, owner: Owner) -> None:
        """See `Tier.release_owner`. `UNAVAILABLE`: it is done, and the answer is lost."""
        self._ending("release_owner", lambda: self._inner.release_owner(owner))

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
        fault = self._strike("reserve")
        self._maybe_hang(fault)
        stop = fault.first_item if fault is not None and fault.kind is Kind.ENOSPC else len(refs)
        results = self._inner.reserve(refs[:stop], sizes[:stop], fmts[:stop], owner, hints and hints[:stop])
        return results + [Full("no_space_on_device")] * (len(refs) - stop)

    def write(self, items: Sequence[Item], deadline: float | None = None) -> Ticket:
        """See `Tier.write`."""

        def spoiled(fault: Fault) -> Ticket:
            good = self._wait(self._inner.write(items[: fault.first_item], deadline)).statuses
            return self._answer([*good, *[Status.FULL] * (len(items) - len(good))])

        return self._ticketed("write", len(items), deadline, lambda: self._inner.write(items, deadline), spoiled)

    def commit(self, handles: Sequence[Handle]) -> None:
        """See `Tier.commit`. `REFUSE`: the records are dropped without an error, as by an index that is full."""
        fault = self._strike("commit")
        self._maybe_hang(fault)
        stop = fault.first_item if fault is not None and fault.kind is Kind.REFUSE else len(handles)
        self._inner.commit(handles[:stop])
        self._inner.abort(handles[stop:])

    def abort(self, handles: Sequence[Handle]) -> None:
        """See `Tier.abort`. `UNAVAILABLE`: it is done, and the answer is lost."""
        self._ending("abort", lambda: self._inner.abort(handles))

    # ---- the whole

    def hint(self, keys: Sequence[bytes], hints: Sequence[Hint]) -> None:
        """See `Tier.hint`."""
        self._maybe_hang(self._strike("hint"))
        self._inner.hint(keys, hints)

    def remove(self, keys: Sequence[bytes]) -> Ticket:
        """See `Tier.remove`."""
        return self._ticketed("remove", len(keys), None, lambda: self._inner.remove(keys))

    def clear(self, ns: int | Collection[int] | None = None) -> Ticket:
        """See `Tier.clear`."""
        return self._ticketed("clear", 1, None, lambda: self._inner.clear(ns))

    def poll(self) -> list[Done]:
        """See `Tier.poll`. Never fails."""
        return [done for done in self._inner.poll() if done.ticket not in self._hidden] + self._completions.poll()

    def stats(self) -> dict[str, int]:
        """See `Tier.stats`."""
        self._maybe_hang(self._strike("stats"))
        return self._inner.stats()

    def ahead(self, bytes_per_day: int) -> float:
        """See `MeteredTier.ahead`; only if the other tier is one. Never fails."""
        return cast("MeteredTier", self._inner).ahead(bytes_per_day)

    def listed(self, ns: int) -> Iterator[list[bytes]]:
        """See `ListingTier.listed`; only if the other tier is one. Never fails."""
        return cast("ListingTier", self._inner).listed(ns)

    def flush(self) -> None:
        """See `Tier.flush`."""
        self._maybe_hang(self._strike("flush"))
        self._inner.flush()

    def close(self) -> None:
        """See `Tier.close`. Heals first; never fails."""
        self.heal()
        self._inner.close()

    # ---- how a fault reaches the caller

    def _ticketed(
        self,
        verb: str,
        count: int,
        deadline: float | None,
        call: Callable[[], Ticket],
        spoiled: Callable[[Fault], Ticket] | None = None,
    ) -> Ticket:
        fault = self._strike(verb)
        if fault is None:
            return call()
        if fault.kind is Kind.HANG:
            return self._later(call, count, deadline)
        if fault.kind is Kind.LOST:
            done = self._wait(call())
            return self._later(lambda: Ticket().finish(done.statuses, done.handles), count, None)
        if fault.kind is Kind.TIMEOUT or spoiled is None:
            return self._answer([Status.TIMEOUT] * count)
        return spoiled(fault)

    def _later(self, call: Callable[[], Ticket], count: int, deadline: float | None) -> Ticket:
        """A ticket that is finished when the tier is healed, or TIMEOUT when its deadline passes."""
        ticket, healed = Ticket(), self._healed

        def run() -> None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not healed.wait(left):
                self._completions.finish(ticket, [Status.TIMEOUT] * count)
                return
            try:
                done = self._wait(call())
            except KVTierError:
                # The tier was closed meanwhile.
                self._completions.finish(ticket, [Status.MISS] * count)
            else:
                self._completions.finish(ticket, done.statuses, done.handles)

        threading.Thread(target=run, name="kvtier-faulty", daemon=True).start()
        return ticket

    def _maybe_hang(self, fault: Fault | None) -> None:
        if fault is not None and fault.kind is Kind.HANG:
            self._healed.wait()

    def _ending(self, verb: str, work: Callable[[], None]) -> None:
        try:
            self._maybe_hang(self._strike(verb))
        finally:
            work()

    def _wait(self, ticket: Ticket) -> Done:
        self._hidden.add(ticket)
        return ticket.wait()

    def _answer(self, statuses: Sequence[Status], handles: Sequence[Handle] = ()) -> Ticket:
        return self._completions.finish(Ticket(), statuses, handles)

    def _rot(self, keys: Sequence[bytes]) -> None:
        if self._damage is not None:
            statuses = self._wait(self._inner.contains(keys)).statuses
            for key, status in zip(keys, statuses, strict=True):
                if status is Status.OK:
                    self._damage(self._inner, key)


class FaultyHostTier(FaultyTier):
    """A `FaultyTier` over a host tier, to stand where a `TieredStore` wants one.

    Memory in place does not fail: `buffer`, `span` and `regions` are the inner tier's own.
    """

    def __init__(
        self,
        inner: GatewayTier,
        plan: Iterable[Fault] = (),
        *,
        damage: Callable[[Tier, bytes], None] | None = None,
    ) -> None:
        self._memory = inner
        super().__init__(inner, plan, damage=damage)

    def buffer(self, handle: Handle) -> memoryview:
        """See `AddressableTier.buffer`."""
        return self._memory.buffer(handle)

    def buffers(self, handles: Sequence[Handle]) -> list[memoryview]:
        """See `AddressableTier.buffers`."""
        return self._memory.buffers(handles)

    def seal(self, handles: Sequence[Handle], checksums: Sequence[bytes] | None = None) -> None:
        """See `AddressableTier.seal`."""
        self._maybe_hang(self._strike("seal"))
        self._memory.seal(handles, checksums)

    def span(self, handle: Handle) -> Span:
        """See `AddressableTier.span`."""
        return self._memory.span(handle)

    def regions(self) -> list[RegionShare]:
        """See `AddressableTier.regions`."""
        return self._memory.regions()

    def lease(
        self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None, *, exact: bool = False
    ) -> Ticket:
        """See `GatewayTier.lease`."""
        self._maybe_hang(self._strike("lease"))
        return self._memory.lease(keys, owner, deadline, exact=exact)

    def duplicate(self, keys: Sequence[bytes], *, above: bool) -> None:
        """See `GatewayTier.duplicate`."""
        self._maybe_hang(self._strike("duplicate"))
        self._memory.duplicate(keys, above=above)

    def refs(self, keys: Sequence[bytes]) -> list[BlockRef | None]:
        """See `GatewayTier.refs`."""
        return self._memory.refs(keys)

    def coldest(self, count: int) -> list[bytes]:
        """See `GatewayTier.coldest`."""
        self._maybe_hang(self._strike("coldest"))
        return self._memory.coldest(count)

    def rename(
        self, handles: Sequence[Handle], refs: Sequence[BlockRef], owner: Owner, hints: Sequence[Hint]
    ) -> list[Reservation]:
        """See `GatewayTier.rename`."""
        return self._memory.rename(handles, refs, owner, hints)

    def resize(self, capacity_bytes: int) -> int:
        """See `GatewayTier.resize`."""
        return self._memory.resize(capacity_bytes)

    def set_policy(self, policy: EvictionPolicy) -> None:
        """See `GatewayTier.set_policy`."""
        self._memory.set_policy(policy)

    def usage(self) -> dict[int, tuple[int, int]]:
        """See `GatewayTier.usage`."""
        return self._memory.usage()

    def take_evicted(self) -> list[bytes]:
        """See `GatewayTier.take_evicted`."""
        return self._memory.take_evicted()
