"""A store over a real remote tier whose server is killed, frozen, filled, emptied and lied to, under load.

A `Rig` is one kind of server; `RemoteFaultSuite` is what must hold of a store over any of them. Subclass it in a module
that pytest collects and say how to make the rig.
"""

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
import pytest
from patience import until
from rigs_world import PATIENCE, SLACK, Rig

from kvtier.cpu import HostTier
from kvtier.errors import BlocksRemain
from kvtier.metrics import Metrics
from kvtier.remote import open_remote
from kvtier.store import StoreOptions, TieredStore
from kvtier.testing.blocks import chain_refs, content
from kvtier.tiers import BlockRef

BLOCK = 64 << 10
CHAIN = 8
CHAINS = 12
HOST_BLOCKS = 4 * CHAIN
KEYS = [ref.key for seed in [*range(CHAINS), 50, 100] for ref in chain_refs(CHAIN, seed=seed)]


class World:
    """Blocks of `content` in a store of a small host tier over the remote one; all that it hands out is checked."""

    def __init__(self, rig: Rig, **options: float) -> None:
        self.rig = rig
        self.metrics = Metrics()
        self.host = HostTier(HOST_BLOCKS * BLOCK, metrics=self.metrics)
        self.remote = open_remote(rig.settings, self.metrics)
        self.store = TieredStore(
            self.host,
            [self.remote],
            metrics=self.metrics,
            options=StoreOptions(load_deadline=PATIENCE, breaker_pause=0.2, writeback_bytes=64 << 20, **options),
        )
        self.slowest = 0.0

    def put(self, refs: Sequence[BlockRef]) -> None:
        self.store.put([(ref, content(ref, BLOCK)) for ref in refs]).result(60)

    def fetched(self, refs: Sequence[BlockRef], owner: str = "reader") -> int:
        """How many leading blocks arrive; each has its own bytes, and all of it is over in time."""
        start = time.monotonic()
        lease = self.store.acquire([ref.key for ref in refs], owner).result(60)
        try:
            good = self.store.fetch(lease, 0, len(lease)).result(60)
            self.slowest = max(self.slowest, time.monotonic() - start)
            for ref, (tier, handle) in zip(refs, lease.blocks[:good], strict=False):
                assert tier is self.host
                assert np.frombuffer(self.host.buffer(handle), np.uint8, BLOCK).tobytes() == content(ref, BLOCK), ref
            return good
        finally:
            self.store.release(lease)

    def below(self, refs: Sequence[BlockRef]) -> int:
        """How many leading blocks come back from the remote tier alone."""
        self.store.flush()
        self.store.clear("host")
        return self.fetched(refs)

    def met(self, reason: str) -> int:
        return int(self.metrics.value("remote_outcomes_total", tier="remote", reason=reason))

    def assert_nothing_is_held(self) -> None:
        self.store.flush()
        stats = self.store.stats()
        assert not any(stats[name][what] for name in ("host", "remote") for what in ("leases", "reservations")), stats
        self.host.check()

    def assert_recovers(self, seed: int) -> None:
        """Blocks go down and come back again."""
        self.lay(chain_refs(CHAIN, seed=seed))

    def lay(self, refs: Sequence[BlockRef]) -> None:
        """Have blocks in the remote tier, and see that they are: one that is slow for once is tried again."""
        until(lambda: self._round_trip(refs), "the remote tier does not come back")

    def _round_trip(self, refs: Sequence[BlockRef]) -> bool:
        try:
            self.store.delete([ref.key for ref in refs])
        except BlocksRemain:
            return False
        self.put(refs)
        return self.below(refs) == CHAIN


class Load:
    """Threads that put and fetch chains until they are stopped; what went wrong is kept for the end."""

    def __init__(self, world: World, threads: int = 3) -> None:
        self._world = world
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self.rounds = 0
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self._errors == [], self._errors

    def _work(self, number: int) -> None:
        dice = random.Random(number)
        try:
            while not self._stop.is_set():
                refs = chain_refs(CHAIN, seed=dice.randrange(CHAINS))
                if self._world.fetched(refs, f"reader-{number}") < CHAIN:
                    self._world.put(refs)
                self.rounds += 1
        except BaseException as error:  # noqa: BLE001  a thread's top level
            self._errors.append(error)

    def goes_on(self, rounds: int = 6) -> None:
        """So many more rounds end, whatever the server does."""
        target = self.rounds + rounds
        until(lambda: self.rounds >= target or self._errors, "the load stands still")


class RemoteFaultSuite:
    """What must hold of a store, whatever happens to its server."""

    def make_rig(self, path: object) -> Rig:
        raise NotImplementedError

    @pytest.fixture
    def world(self, tmp_path: object) -> Iterator[World]:
        with contextlib.closing(self.make_rig(tmp_path)) as rig:
            world = World(rig)
            with contextlib.closing(world.store):
                yield world
                rig.thaw()

    def test_killed_and_restarted_empty(self, world: World) -> None:
        with Load(world) as load:
            load.goes_on(2 * CHAINS)
            world.rig.kill()
            load.goes_on()
            until(lambda: world.met("refused"), "nobody noticed")
            world.rig.start()
            load.goes_on()
        world.assert_recovers(100)
        assert world.met("reconnect") >= 1
        assert world.slowest < 2 * PATIENCE + SLACK
        world.assert_nothing_is_held()

    def test_frozen_for_a_while(self, world: World) -> None:
        with Load(world) as load:
            load.goes_on(2 * CHAINS)
            world.rig.freeze()
            trips = world.metrics.value("breaker_trips_total", tier="remote")
            load.goes_on()
            until(lambda: world.metrics.value("breaker_trips_total", tier="remote") > trips, "the breaker did not open")
            # Skipped: host alone serves, as fast as if there were no other tier.
            start = time.monotonic()
            load.goes_on(3)
            assert time.monotonic() - start < 2 * PATIENCE + SLACK
            world.rig.thaw()
        world.assert_recovers(100)
        assert world.slowest < 2 * PATIENCE + SLACK
        world.assert_nothing_is_held()

    def test_full(self, world: World) -> None:
        if not world.rig.fills:
            pytest.skip("this kind of server has no limit of its own")
        kept = chain_refs(CHAIN, seed=50)
        world.lay(kept)
        world.rig.fill()
        with Load(world) as load:
            load.goes_on(2 * CHAINS)
        assert world.met("full") >= 1
        assert world.metrics.value("dropped_blocks_total", tier="remote", reason="no_space_on_server") >= 1
        # What was there stays readable.
        until(lambda: world.below(kept) == CHAIN)
        world.rig.drain()
        world.assert_recovers(100)
        world.assert_nothing_is_held()

    def test_restarted_empty_between_two_requests(self, world: World) -> None:
        refs = chain_refs(CHAIN, seed=7)
        world.lay(refs)
        world.store.clear("host")
        world.rig.kill()
        world.rig.start()
        assert world.fetched(refs) == 0
        world.assert_recovers(7)
        world.assert_nothing_is_held()

    def test_values_corrupted(self, world: World) -> None:
        refs = chain_refs(CHAIN, seed=7)
        world.lay(refs)
        world.store.clear("host")
        damaged = world.rig.corrupt(KEYS)
        assert damaged >= 1
        # Nor is any of it ever handed out, should the server be too slow at first.
        until(lambda: world.fetched(refs) or world.met("corrupt"))
        assert world.fetched(refs) == 0
        assert world.metrics.value("corrupt_blocks_total", tier="remote") >= 1
        world.assert_recovers(7)
        world.assert_nothing_is_held()

    def test_values_corrupted_under_load(self, world: World) -> None:
        with Load(world) as load:
            load.goes_on(2 * CHAINS)
            for _ in range(3):
                world.rig.corrupt(KEYS)
                load.goes_on()
            until(lambda: world.met("corrupt"), "nobody read what was damaged")
        world.assert_recovers(100)
        assert world.slowest < 2 * PATIENCE + SLACK
        world.assert_nothing_is_held()
