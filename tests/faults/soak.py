"""Random verbs from several threads over small tiers, and what must be true at the end.

python tests/faults/soak.py --operations 1000000 [--threads 4] [--seed 0] [--faulty] [--hanging] [--nvme] [--rule R]

Every block's bytes follow from its key; every load is verified. At the end: counters add up, nothing is held, all of
the host tier can be allocated.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from store_world import BLOCK, ExtentTier, items, key, keys, nothing_is_held, verify

from kvtier.cpu import HostTier
from kvtier.errors import BlocksRemain
from kvtier.hints import Hint
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.store import PutResult, StoreOptions, TieredStore
from kvtier.testing import Fault, FaultyTier, Kind
from kvtier.tiers import Handle, Tier

HOST_BLOCKS, BELOW_BLOCKS, CHAINS, DEPTH = 64, 256, 40, 10
FAULTS = [
    Fault("read", Kind.EIO, probability=0.02, seed=1),
    Fault("read", Kind.CORRUPT, probability=0.02, first_item=1, seed=2),
    Fault("read", Kind.UNAVAILABLE, probability=0.01, seed=3),
    Fault("acquire", Kind.VANISH, probability=0.02, first_item=1, seed=4),
    Fault("acquire", Kind.UNAVAILABLE, probability=0.01, seed=5),
    Fault("contains", Kind.UNAVAILABLE, probability=0.01, seed=6),
    Fault("reserve", Kind.ENOSPC, probability=0.02, seed=7),
    Fault("write", Kind.EIO, probability=0.02, first_item=1, seed=8),
    Fault("commit", Kind.REFUSE, probability=0.01, seed=9),
    Fault("release", Kind.UNAVAILABLE, probability=0.01, seed=10),
]
# Answers that come when the tier is healed, whatever the deadline: long after whoever asked has gone on.
HANGS = [
    Fault("read", Kind.LOST, probability=0.01, seed=11),
    Fault("acquire", Kind.LOST, probability=0.01, seed=12),
    Fault("write", Kind.LOST, probability=0.01, seed=13),
    Fault("acquire", Kind.HANG, probability=0.01, seed=14),
    Fault("reserve", Kind.HANG, probability=0.005, seed=15),
    Fault("contains", Kind.LOST, probability=0.001, seed=16),
]


@dataclass(frozen=True)
class Outcome:
    """Of one soak: what was done, and what was found wrong (empty: nothing)."""

    operations: int
    blocks_verified: int
    blocks_offered: int
    seconds: float
    wrong: tuple[str, ...]


@contextmanager
def unless_late() -> Iterator[None]:
    """A tier whose answers come late may still be writing what is to go when nobody waits for it any longer."""
    try:
        yield
    except BlocksRemain as error:
        if not error.late:
            raise


class Soak:
    def __init__(self, store: TieredStore, seed: int) -> None:
        self.store = store
        self.seed = seed
        self.verified = Counter()
        self.offered = Counter()
        self.put_results: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self._lock = threading.Lock()

    # ---- verbs; `me` names the thread, which owns what it takes

    def put(self, dice: Random, me: str) -> None:
        chain = dice.randrange(CHAINS)
        stop, parts = dice.randint(1, DEPTH), 1 + chain % 2
        exact_below = stop if dice.random() < 0.8 else dice.randint(0, stop)
        hints = None
        if dice.random() < 0.3:
            reuse = dice.choice(["unknown", "none", "likely"])
            hints = [Hint(reuse=reuse, session=f"chat {chain}", priority=dice.choice([1.0, 4.0]))] * (stop * parts)
        result = self.store.put(items(chain, stop, parts, exact_below=exact_below), hints, parts=parts).result(60)
        assert sum(result) == stop
        with self._lock:
            self.offered[me] += stop
            self.put_results.update(result._asdict())

    def load(self, dice: Random, me: str) -> None:
        chain = dice.randrange(CHAINS)
        parts, lossy = 1 + chain % 2, dice.random() < 0.5
        lease = self.store.acquire(keys(chain, DEPTH, parts), me, parts=parts, lossy=lossy).result(60)
        try:
            assert lossy or lease.is_exact(0, len(lease))
            start = dice.randint(0, len(lease))
            good = self.store.fetch(lease, start, len(lease)).result(60)
            if dice.random() < 0.05:
                self.store.release_owner(me)
                return
            verify(self.store, lease, start, start + good)
            self.verified[me] += good
        finally:
            self.store.release(lease)

    def look(self, dice: Random, me: str) -> None:
        chain = dice.randrange(CHAINS)
        self.store.match(keys(chain, DEPTH, 1 + chain % 2), parts=1 + chain % 2)
        self.store.wanted(keys(chain, DEPTH, 1 + chain % 2), exact=dice.random() < 0.5, parts=1 + chain % 2)

    def pin(self, dice: Random, me: str) -> None:
        self.store.unpin(me)
        self.store.pin(keys(dice.randrange(CHAINS), 2), me, ttl=dice.choice([None, 0.001]))

    def delete(self, dice: Random, me: str) -> None:
        with unless_late():
            self.store.delete([key(dice.randrange(CHAINS), dice.randrange(DEPTH))])

    def prefetch(self, dice: Random, me: str) -> None:
        chain = dice.randrange(CHAINS)
        prefetch = self.store.prefetch(keys(chain, DEPTH, 1 + chain % 2), me, parts=1 + chain % 2)
        if dice.random() < 0.5:
            prefetch.cancel()
        assert prefetch.result(60).deferred in (None, "no_space", "cancelled", "timeout")

    def hint(self, dice: Random, me: str) -> None:
        chain = dice.randrange(CHAINS)
        self.store.duplicate(keys(chain, DEPTH), above=dice.random() < 0.5)
        self.store.hint(keys(chain, DEPTH), [Hint(reuse=dice.choice(["none", "unknown"]))] * DEPTH)

    def end_session(self, dice: Random, me: str) -> None:
        self.store.end_session(f"chat {dice.randrange(CHAINS)}")

    def clear(self, dice: Random, me: str) -> None:
        with unless_late():
            self.store.clear(dice.choice([tier.name for tier in self.store.tiers]))

    # ----

    def verbs(self) -> tuple[list[Callable[[Random, str], None]], list[float]]:
        weights = {
            self.put: 30, self.load: 40, self.look: 10, self.pin: 5, self.delete: 4, self.prefetch: 5,
            self.hint: 4, self.end_session: 1.9, self.clear: 0.1,
        }  # fmt: skip
        return list(weights), list(weights.values())

    def run(self, operations: int, threads: int) -> None:
        def work(number: int) -> None:
            dice, me = Random(self.seed * 1000 + number), f"thread {number}"
            verbs, weights = self.verbs()
            try:
                for _ in range(operations // threads):
                    dice.choices(verbs, weights)[0](dice, me)
                    if self.failures:
                        return
            except BaseException as failure:
                self.failures.append(failure)
                raise
            finally:
                self.store.release_owner(me)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def wrong(self) -> Iterator[str]:
        """What is not as it must be, once everything has come to rest."""
        store = self.store
        yield from (f"a thread died: {failure!r}" for failure in self.failures)
        store.flush()
        end = time.monotonic() + 30
        while not nothing_is_held(store) and time.monotonic() < end:
            time.sleep(0.01)
        if not nothing_is_held(store):
            yield f"something is still held: {store.stats()}"
        if sum(self.put_results.values()) != sum(self.offered.values()):
            yield f"{self.offered} blocks were put, {self.put_results} came of them"
        counted = {name: store.metrics.value("put_blocks_total", outcome=name) for name in PutResult._fields}
        if any(counted[name] != self.put_results[name] for name in counted):
            yield f"put results {self.put_results}, counted {counted}"
        store.host.check()
        held_bytes = store.host.stats()["blocks"] * BLOCK
        if store.host.stats()["bytes"] != held_bytes:
            yield f"host says it has {store.host.stats()}, its blocks have {held_bytes} bytes"
        slots = store.host.reserve(
            [ref for ref, _ in items("all of it", HOST_BLOCKS)], [BLOCK] * HOST_BLOCKS, ["raw"] * HOST_BLOCKS, "soak"
        )
        if not all(isinstance(slot, Handle) for slot in slots):
            yield "not all of host can be allocated"
        store.host.release_owner("soak")


@contextmanager
def opened(*, nvme: Path | None, rule: str, hanging: bool) -> Iterator[TieredStore]:
    metrics = Metrics()
    host = HostTier(HOST_BLOCKS * BLOCK, metrics=metrics)
    below: Tier = ExtentTier(BELOW_BLOCKS * BLOCK, name="below", metrics=metrics)
    if nvme is not None:
        below = NvmeTier(nvme, BELOW_BLOCKS * BLOCK, NvmeOptions(min_free_bytes=0), metrics=metrics, name="below")
    patience = {"load_deadline": 0.03, "breaker_pause": 0.02} if hanging else {}
    options = StoreOptions(write_rule=rule, writeback_bytes=16 * BLOCK, **patience)
    store = TieredStore(host, [FaultyTier(below)], metrics=metrics, options=options)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def failing(below: FaultyTier, faults: list[Fault]) -> Iterator[None]:
    """Faults in force, healed ten times a second, so that what hangs arrives late rather than never."""
    stop = threading.Event()

    def keep_failing() -> None:
        turn = 0
        while not stop.wait(0.1):
            turn += 1
            below.heal()
            below.inject(*(replace(fault, seed=fault.seed + 100 * turn) for fault in faults))

    below.inject(*faults)
    healer = threading.Thread(target=keep_failing)
    healer.start()
    try:
        yield
    finally:
        stop.set()
        healer.join()
        below.heal()


def soak(
    operations: int,
    *,
    threads: int = 4,
    seed: int = 0,
    faulty: bool = False,
    hanging: bool = False,
    nvme: Path | None = None,
    rule: str = "through",
) -> Outcome:
    start = time.perf_counter()
    with opened(nvme=nvme, rule=rule, hanging=hanging) as store:
        world = Soak(store, seed)
        with failing(store.lower[0], FAULTS * faulty + HANGS * hanging):
            world.run(operations, threads)
        wrong = tuple(world.wrong())
        seconds = time.perf_counter() - start
        return Outcome(operations, sum(world.verified.values()), sum(world.offered.values()), seconds, wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faulty", action="store_true", help="a lower tier that fails in all ways that it may")
    parser.add_argument("--hanging", action="store_true", help="a lower tier whose answers come late")
    parser.add_argument("--nvme", action="store_true", help="a real NVMe tier below, in a temporary directory")
    parser.add_argument("--rule", choices=["through", "leave", "second_touch"], default="through")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        outcome = soak(
            chosen.operations,
            threads=chosen.threads,
            seed=chosen.seed,
            faulty=chosen.faulty,
            hanging=chosen.hanging,
            nvme=Path(directory) / "nvme" if chosen.nvme else None,
            rule=chosen.rule,
        )
    print(outcome)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
