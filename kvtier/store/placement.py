"""Placement: which blocks go to the lower tiers, and when.

through        at once
leave          when they are among the coldest tenth (and 4,096 blocks) of a host tier that is nine tenths full
second_touch   when they are put or found a second time

A write budget admits by second touch while the day's bytes run ahead of the day, whatever the rule, and nothing a whole
day ahead, nor of what was dropped before. Bytes to a remote tier neither count nor are held back for want of budget: it
has no medium of ours to wear out, and has most of what it is asked to take. A tier that is metered counts what reached
it from all processes; for others the store counts what it admits, from its start on.
"""

import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, cast

from kvtier.hints import NO_HINT, Hint
from kvtier.metrics import Metrics
from kvtier.policies.admission import AdmissionPolicy, AlwaysAdmit, BudgetedAdmission
from kvtier.store.demotion import Demoter
from kvtier.store.gateway import GatewayTier
from kvtier.store.lanes import Lane
from kvtier.store.options import StoreOptions, WriteRule
from kvtier.store.port import Port
from kvtier.store.runs import whole_runs
from kvtier.tiers import OWN_WORK, BlockRef, Handle, MeteredTier, completes_run

__all__ = ["Placed", "Placement"]

_OWNER = OWN_WORK + "leave"
_HIGH_WATER = 0.9
# Leaving: so many of the coldest blocks are looked at, and again once a quarter as many came in.
_MOST_COLD = 4096
_LOOKS = 4


class Placed(NamedTuple):
    """A block in host that was put or found: candidate for the lower tiers."""

    ref: BlockRef
    nbytes: int
    hint: Hint = NO_HINT


class _Admitted(NamedTuple):
    """Keys that are worth writing, and those of them that the budget pays for where they wear something out."""

    worth: set[bytes]
    paid: set[bytes]


class Placement:
    """Decides for every lower tier. Its calls come from the store's threads and return soon.

    Args:
        host, gate: the host tier and its port.
        demoters: one per lower tier.
        options, metrics, clock: the store's.
    """

    def __init__(
        self,
        host: GatewayTier,
        gate: Port,
        demoters: Sequence[Demoter],
        options: StoreOptions,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._gate = gate
        self._demoters = tuple(demoters)
        self._rule: WriteRule = options.write_rule
        self._admission: AdmissionPolicy = options.admission if self._rule == "second_touch" else AlwaysAdmit()
        self._budget = None
        if options.write_budget is not None:
            self._budget = self._budgeted(options.write_budget, options.admission, clock)
        # Where lossy blocks are accepted, one below is as good as an exact one that leaves.
        self._exact = not options.accept_lossy
        self._metrics = metrics
        self._lock = threading.Lock()
        self._lane = Lane("kvtier-leave", 1)
        self._looking = False
        self._arrivals = 0
        self._next_look = 0
        self._announce()

    def _budgeted(self, per_day: int, policy: AdmissionPolicy, clock: Callable[[], float]) -> BudgetedAdmission:
        metered = [demoter for demoter in self._demoters if demoter.port.tier.caps.metered]

        def ahead() -> float:
            # What is on its way is in no meter so far. A tier whose meter cannot be read is written nothing.
            return max(
                demoter.waiting_bytes + demoter.port.attempt("meter", partial(_ahead, demoter, per_day), math.inf)
                for demoter in metered
            )

        strict = self._rule == "second_touch"
        return BudgetedAdmission(per_day, clock, policy=policy, strict=strict, ahead=ahead if metered else None)

    @property
    def rule(self) -> WriteRule:
        """What is in force now: the configured rule, or second touch while the budget is tight."""
        return "second_touch" if self._budget is not None and self._budget.tight else self._rule

    def _announce(self) -> None:
        for rule in ("through", "leave", "second_touch"):
            self._metrics.write_rule.labels(rule).set(rule == self.rule)

    # ---- touches

    def stored(self, blocks: Sequence[Placed]) -> None:
        """Blocks were put and are in host now."""
        if self._demoters and self.rule != "leave":
            self._touch(blocks)
        if self._budget is not None:
            self._announce()

    def used(self, blocks: Sequence[Placed]) -> None:
        """Blocks were found in host."""
        if self.rule == "second_touch":
            self._touch(blocks)
            return
        for demoter in self._demoters:
            keys = set(demoter.owes([block.ref.key for block in blocks]))
            owed = [block for block in blocks if block.ref.key in keys]
            if self._budget is not None and _wears(demoter):
                # What is refused stays owed.
                keys = self._weighed(owed).paid
            self._submit(demoter, owed, keys)

    @property
    def watches_puts(self) -> bool:
        """Whether `stored` has anything to do."""
        return bool(self._demoters) or self._budget is not None

    @property
    def watches_use(self) -> bool:
        """Whether `used` has anything to do."""
        return self.rule == "second_touch" or any(demoter.owes_any for demoter in self._demoters)

    def demote(self, refs: Sequence[BlockRef]) -> None:
        """Have host's blocks written to each lower tier that lacks them, parents first, whatever the rule."""
        for demoter in self._demoters:
            places = demoter.lacking(refs)
            if places:
                demoter.submit([refs[at] for at in places], [NO_HINT] * len(places))

    def _touch(self, blocks: Sequence[Placed]) -> None:
        lacking = [demoter.lacking([block.ref for block in blocks]) for demoter in self._demoters]
        asked = sorted({at for places in lacking for at in places})
        worn = {at for demoter, places in zip(self._demoters, lacking, strict=True) if _wears(demoter) for at in places}
        admitted = self._weighed([blocks[at] if at in worn else blocks[at]._replace(nbytes=0) for at in asked])
        for demoter, places in zip(self._demoters, lacking, strict=True):
            keys = admitted.paid if _wears(demoter) else admitted.worth
            self._submit(demoter, [blocks[at] for at in places], keys)

    def _weighed(self, blocks: Sequence[Placed]) -> _Admitted:
        """Have the blocks judged, which touches them."""
        if not blocks:
            return _Admitted(set(), set())
        keys = [block.ref.key for block in blocks]
        sizes, hints = [block.nbytes for block in blocks], [block.hint for block in blocks]
        with self._lock:
            if self._budget is None:
                worth = paid = self._admission.admit(keys, sizes, hints)
            else:
                worth, paid = self._budget.weigh(keys, sizes, hints)
        return _Admitted(_with_ancestors(blocks, worth), _with_ancestors(blocks, paid))

    @staticmethod
    def _submit(demoter: Demoter, blocks: Sequence[Placed], admitted: set[bytes]) -> None:
        taken = [block for block in blocks if block.ref.key in admitted]
        demoter.port.drop("not_admitted", len(blocks) - len(taken))
        if taken:
            demoter.submit([block.ref for block in taken], [block.hint for block in taken])

    # ---- leaving

    def arrived(self, count: int) -> None:
        """`count` records came into host."""
        # Also while the budget is tight: what was put before, to be written on leaving, may go now.
        if self._demoters and self._rule == "leave":
            self._look(count)

    def _nearly_full(self) -> bool:
        stats = self._gate.attempt("stats", self._host.stats, None)
        return stats is not None and stats["bytes"] >= _HIGH_WATER * stats["capacity_bytes"]

    def _coldest(self, count: int) -> list[bytes]:
        return self._gate.attempt("coldest", lambda: self._host.coldest(count), [])

    def _look(self, count: int) -> None:
        """Have the coldest blocks written in the background; one look at a time, however many puts ask for it."""
        with self._lock:
            self._arrivals += count
            if self._looking or self._arrivals < self._next_look:
                return
            self._looking = True
        if not self._lane.submit(self._leave):
            self._looking = False

    def _leave(self) -> None:
        with self._lock:
            self._looking = False
            self._arrivals = self._next_look = 0
        self._count_lost()
        if self.rule != "leave" or not self._nearly_full():
            return
        blocks = self._gate.attempt("stats", self._host.stats, {"blocks": 0})["blocks"]
        cold = self._coldest(min(int(blocks * (1 - _HIGH_WATER)) + 1, _MOST_COLD))
        for demoter in self._demoters:
            self._demote(demoter, cold)
        with self._lock:
            self._next_look = len(cold) // _LOOKS

    def _count_lost(self) -> None:
        """What left host and is in no lower tier either was too late."""
        nothing: list[bytes] = []
        evicted = self._gate.attempt("take_evicted", self._host.take_evicted, nothing)
        gone = list(dict.fromkeys(evicted)) if self._rule == "leave" else []
        # What is gone does not say which run it was of: a tier of runs counts incomplete ones instead.
        for demoter in [one for one in self._demoters if one.run == 1] if gone else ():
            here = self._gate.present(gone, exact=False)
            left = [key for key, still in zip(gone, here, strict=True) if not still]
            below = demoter.port.present(left, exact=False) if left else []
            demoter.port.drop("evicted_before_write", below.count(False))

    def _demote(self, demoter: Demoter, cold: Sequence[bytes]) -> None:
        if demoter.run > 1:
            # A run leaves with its last block, which is the coldest of it.
            cold = [ref.key for ref in self._host.refs(cold) if ref is not None and completes_run(ref, demoter.run)]
        here = demoter.port.present(cold, exact=self._exact)
        seen: set[bytes] = {key for key, below in zip(cold, here, strict=True) if below}
        for key in cold:
            chain = self._chain(demoter, key, seen)
            priced = [Placed(handle.ref, handle.nbytes if _wears(demoter) else 0) for handle in chain]
            admitted = self._weighed(priced).paid
            taken = whole_runs(chain, [handle.ref.key in admitted for handle in chain], demoter.run)
            self._gate.release(chain[len(taken) :])
            demoter.port.drop("not_admitted", len(chain) - len(taken))
            if demoter.enqueue([(handle, NO_HINT) for handle in taken]) < len(taken):
                return

    def _chain(self, demoter: Demoter, key: bytes | None, seen: set[bytes]) -> list[Handle]:
        """Lease a block's run and the runs before it that the lower tier lacks, oldest ancestor first."""
        runs: list[Sequence[Handle]] = []
        while key is not None and key not in seen:
            seen.add(key)
            handles = self._run(demoter, key)
            if not handles:
                break
            runs.append(handles)
            key = handles[0].ref.parent
            if key is not None and demoter.port.present([key], exact=self._exact)[0]:
                break
        return [handle for handles in reversed(runs) for handle in handles]

    def _run(self, demoter: Demoter, key: bytes) -> Sequence[Handle]:
        """Lease the run that this block completes; empty where host lacks one of its blocks."""
        if demoter.run == 1:
            return self._gate.acquire([key], _OWNER)
        last = self._host.refs([key])[0]
        return () if last is None else demoter.lease_run(last)

    # ---- the whole

    def settle(self) -> list[str]:
        """Wait until everything that was decided so far is written or dropped; which tiers make no progress."""
        done = threading.Event()
        self._lane.submit(self._count_lost)
        if self._lane.submit(done.set):
            done.wait()
        hanging = [demoter.port.name for demoter in self._demoters if not demoter.drain()]
        for name in hanging:
            self._metrics.timeouts.labels(name, "drain").inc()
        return hanging

    @contextmanager
    def refusing(self, is_gone: Callable[[BlockRef], bool], keys: frozenset[bytes] | None = None) -> Iterator[None]:
        """Blocks are being deleted: meanwhile they go to no lower tier, nor do those arrive that are on their way.

        `keys`: theirs, where they are known.
        """
        with ExitStack() as stack:
            for demoter in self._demoters:
                stack.enter_context(demoter.refusing(is_gone, keys))
            yield

    def passed(self, keys: Collection[bytes]) -> list[str]:
        """Wait until none of these keys is being written; in which tiers one still is."""
        return [demoter.port.name for demoter in self._demoters if not demoter.passed(keys)]

    def untaken(self) -> int:
        """How many blocks are in host alone because a tier that was given them did not take them."""
        keys = list(dict.fromkeys(key for demoter in self._demoters for key in demoter.untaken()))
        keys = _those(keys, self._gate.present(keys, exact=False), there=True)
        for demoter in self._demoters:
            keys = _those(keys, demoter.port.present(keys, exact=False), there=False)
        return len(keys)

    @property
    def waiting_bytes(self) -> int:
        """Of host, waiting for lower tiers."""
        return sum(demoter.waiting_bytes for demoter in self._demoters)

    def close(self, timeout: float) -> list[Port]:
        """Write what waits; returns the ports of tiers that hang. Idempotent."""
        self._lane.close(timeout)
        return [demoter.port for demoter in self._demoters if not demoter.close()]


def _those(keys: Sequence[bytes], here: Sequence[bool], *, there: bool) -> list[bytes]:
    return [key for key, found in zip(keys, here, strict=True) if found is there]


def _with_ancestors(blocks: Sequence[Placed], verdicts: Sequence[bool]) -> set[bytes]:
    """Keys that may be written; what is refused takes its descendants with it."""
    refused: set[bytes | None] = set()
    for block, verdict in zip(blocks, verdicts, strict=True):
        if not verdict or block.ref.parent in refused:
            refused.add(block.ref.key)
    return {block.ref.key for block in blocks} - refused


def _ahead(demoter: Demoter, per_day: int) -> float:
    """By how many bytes a metered tier runs ahead of the budget."""
    return cast("MeteredTier", demoter.port.tier).ahead(per_day)


def _wears(demoter: Demoter) -> bool:
    """Whether what is written there counts against the budget."""
    return not demoter.port.tier.caps.remote
