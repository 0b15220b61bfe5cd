"""TieredStore over a small host tier and a larger NVMe tier, against a model that only knows what was put.

The model is a world of chains: which blocks are surely below (NVMe never evicts here), and which can be at all.
Bytes follow from key and exactness, so that a wrong block, or a lossy one for an exact one, shows.
"""

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from patience import until
from store_world import BLOCK, NS, items, key, keys, nothing_is_held, verify

from kvtier.cpu import HostTier
from kvtier.hints import Hint
from kvtier.keys import namespace_index
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.store import Lease, StoreOptions, TieredStore

HOST_RECORDS, NVME_RECORDS, DEPTH = 12, 1024, 6
PARTS = {"one": 1, "other": 1, "pair": 2}  # chain -> parts of its blocks
NAMESPACES = {"one": NS, "pair": NS, "other": namespace_index(bytes(32))}
OWNERS = ("alice", "bob")

chains = st.sampled_from(sorted(PARTS))
owners = st.sampled_from(OWNERS)


class _Chain:
    """What is known of one chain's blocks: `sure`, `maybe` [lossy or better, exact] hold depths."""

    def __init__(self) -> None:
        self.sure: tuple[set[int], set[int]] = (set(), set())
        self.maybe: tuple[set[int], set[int]] = (set(), set())

    def put(self, depths: Sequence[int], exact_below: int, *, all_stored: bool) -> None:
        exact = {depth for depth in depths if depth < exact_below}
        for known in (self.maybe, self.sure) if all_stored else (self.maybe,):
            known[0].update(depths)
            known[1].update(exact)

    def delete(self, depth: int) -> None:
        for sure, maybe in zip(self.sure, self.maybe, strict=True):
            # What descends from it may come back with it, and may not.
            sure -= set(range(depth, DEPTH))
            maybe.discard(depth)

    def least(self, *, exact: bool) -> int:
        return next((depth for depth in range(DEPTH) if depth not in self.sure[exact]), DEPTH)

    def most(self, *, exact: bool) -> int:
        return next((depth for depth in range(DEPTH) if depth not in self.maybe[exact]), DEPTH)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.now = 0.0
        self.model = {chain: _Chain() for chain in PARTS}
        self.open()

    def open(self) -> None:
        metrics = Metrics()
        self.host = HostTier(HOST_RECORDS * BLOCK, metrics=metrics)
        nvme = NvmeTier(self.directory / "nvme", NVME_RECORDS * BLOCK, NvmeOptions(min_free_bytes=0), metrics=metrics)
        self.store = TieredStore(self.host, [nvme], metrics=metrics, options=StoreOptions(), clock=lambda: self.now)
        self.leases: list[tuple[str, Lease]] = []
        self.pins: dict[str, int] = {}
        self.counted = {"stored": 0, "joined": 0, "dropped": 0}

    def held(self) -> int:
        return sum(bool(lease.blocks) for _, lease in self.leases)

    @rule(chain=chains, stop=st.integers(1, DEPTH), lossy=st.integers(0, DEPTH), session=st.booleans())
    def put(self, chain: str, stop: int, lossy: int, session: bool) -> None:
        parts = PARTS[chain]
        exact_below = stop if lossy == DEPTH else min(lossy, stop)
        batch = items(chain, stop, parts, exact_below=exact_below, ns=NAMESPACES[chain])
        hints = [Hint(session=chain)] * len(batch) if session else None
        result = self.store.put(batch, hints, parts=parts).result(30)
        assert sum(result) == stop
        # The NVMe tier never evicts here: what a flush sees in host, it keeps.
        self.store.flush()
        self.model[chain].put(range(stop), exact_below, all_stored=result.dropped == 0)
        self.counted = {name: self.counted[name] + getattr(result, name) for name in self.counted}

    @rule(chain=chains, owner=owners, lossy=st.booleans())
    def acquire(self, chain: str, owner: str, lossy: bool) -> None:
        parts = PARTS[chain]
        wanted = keys(chain, DEPTH, parts)
        hint = self.store.match(wanted, parts=parts, lossy=lossy).tiers
        lease = self.store.acquire(wanted, owner, parts=parts, lossy=lossy).result(30)
        assert self.model[chain].least(exact=not lossy) <= len(lease) <= self.model[chain].most(exact=not lossy)
        assert len(lease) == len(lease.tiers()) == len(lease.blocks) // parts
        assert len(hint) >= len(lease)
        assert [handle.ref.key for _, handle in lease.blocks] == wanted[: len(lease.blocks)]
        assert lossy or lease.is_exact(0, len(lease))
        self.leases.append((owner, lease))

    @rule(pick=st.integers(0, 9), start=st.integers(0, DEPTH))
    def fetch(self, pick: int, start: int) -> None:
        assume(self.leases)
        _, lease = self.leases[pick % len(self.leases)]
        assume(start < len(lease))
        stop = len(lease)
        good = self.store.fetch(lease, start, stop).result(30)
        verify(self.store, lease, start, start + good)
        assert len(self.store.located(lease, start, start + good)) == good * lease.parts
        if len(self.leases) == 1 and not self.pins and len(lease.blocks) <= HOST_RECORDS:
            assert good == stop - start

    @rule(chain=chains)
    def prefetch(self, chain: str) -> None:
        parts = PARTS[chain]
        result = self.store.prefetch(keys(chain, DEPTH, parts), "alice", parts=parts).result(30)
        assert result.blocks <= self.model[chain].most(exact=True)
        assert result.deferred in (None, "no_space")
        if result.deferred is None:
            assert result.blocks >= self.model[chain].least(exact=True)

    @rule(chain=chains, late=st.booleans())
    def prefetch_that_is_cut_short(self, chain: str, late: bool) -> None:
        parts = PARTS[chain]
        deadline = time.monotonic() - 1 if late else None
        prefetch = self.store.prefetch(keys(chain, DEPTH, parts), "alice", parts=parts, deadline=deadline)
        if not late:
            prefetch.cancel()
        result = prefetch.result(30)
        assert result.blocks <= self.model[chain].most(exact=True)
        assert result.deferred in (None, "no_space", "timeout" if late else "cancelled")
        # Its result does not wait for a thread that is at work, which gives the lease back.
        until(lambda: self.store.stats()["store"]["leases"] == self.held())

    @rule(pick=st.integers(0, 9))
    def release(self, pick: int) -> None:
        assume(self.leases)
        _, lease = self.leases.pop(pick % len(self.leases))
        self.store.release(lease)
        self.store.release(lease)
        assert len(lease) == 0

    @rule(chain=chains, owner=owners, ttl=st.sampled_from([None, 5.0]))
    def pin(self, chain: str, owner: str, ttl: float | None) -> None:
        parts = PARTS[chain]
        pinned = self.store.pin(keys(chain, DEPTH, parts), owner, parts=parts, ttl=ttl)
        assert pinned <= self.model[chain].most(exact=False)
        if pinned:
            self.pins[owner] = self.pins.get(owner, 0) + pinned

    @rule(owner=owners)
    def unpin(self, owner: str) -> None:
        self.store.unpin(owner)
        self.pins.pop(owner, None)

    @rule()
    def time_passes(self) -> None:
        self.now += 10.0
        self.store.pin([], "nobody")

    @rule(owner=owners)
    def an_owner_dies(self, owner: str) -> None:
        self.store.release_owner(owner)
        gone = [lease for other, lease in self.leases if other == owner]
        assert all(len(lease) == 0 for lease in gone)
        self.leases = [(other, lease) for other, lease in self.leases if other != owner]
        self.pins.pop(owner, None)

    @rule(chain=chains, depth=st.integers(0, DEPTH - 1))
    def delete(self, chain: str, depth: int) -> None:
        # A block goes with all its parts: one would do.
        self.store.delete([key(chain, depth, part) for part in range(PARTS[chain])])
        self.model[chain].delete(depth)

    @rule(chain=chains, above=st.booleans(), reuse=st.sampled_from(["none", "likely", "unknown"]))
    def hint(self, chain: str, above: bool, reuse: str) -> None:
        named = keys(chain, DEPTH, PARTS[chain])
        self.store.duplicate(named, above=above)
        self.store.hint(named, [Hint(reuse=reuse, session="chat")] * len(named))

    @rule(session=st.sampled_from(["chat", *sorted(PARTS)]))
    def end_session(self, session: str) -> None:
        self.store.end_session(session)

    @rule()
    def clear_host(self) -> None:
        self.store.clear("host")

    @rule(chain=chains)
    def clear_namespace(self, chain: str) -> None:
        self.store.clear(ns=NAMESPACES[chain])
        for other, ns in NAMESPACES.items():
            if ns == NAMESPACES[chain]:
                self.model[other] = _Chain()

    @rule(chain=chains, stop=st.integers(1, DEPTH))
    def close_amid_a_put_and_open_again(self, chain: str, stop: int) -> None:
        put = self.store.put(items(chain, stop, PARTS[chain], ns=NAMESPACES[chain]), parts=PARTS[chain])
        self.store.close()
        result = put.result(0)
        assert sum(result) == stop
        # Closing drains: what was put is below, as if it had been flushed.
        self.model[chain].put(range(stop), stop, all_stored=result.dropped == 0)
        self.open()

    @invariant()
    def nothing_put_is_forgotten_and_nothing_deleted_returns(self) -> None:
        for chain, known in self.model.items():
            wanted = keys(chain, DEPTH, PARTS[chain])
            for exact in (False, True):
                run = len(self.store.match(wanted, parts=PARTS[chain], lossy=not exact).tiers)
                whole = self.store.wanted(wanted, exact=exact, parts=PARTS[chain])
                # `match` leaps over a hole that a deletion left below: it is a hint.
                assert whole <= min(run, known.most(exact=exact))

    @invariant()
    def capacity_is_hard_and_counts_add_up(self) -> None:
        stats = self.store.stats()
        assert stats["host"]["bytes"] <= HOST_RECORDS * BLOCK
        assert stats["nvme"]["bytes"] <= NVME_RECORDS * BLOCK
        assert stats["store"]["leases"] == self.held()
        for outcome, count in self.counted.items():
            assert self.store.metrics.value("put_blocks_total", outcome=outcome) == count

    def teardown(self) -> None:
        for owner in OWNERS:
            self.store.release_owner(owner)
        self.store.flush()
        self.host.check()
        assert nothing_is_held(self.store)
        self.store.close()
        shutil.rmtree(self.directory)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=18, stateful_step_count=30)
