"""`policy.<name>`: what an eviction policy costs per event and keeps per entry, at a million resident blocks.

Blocks come, and are used, in chains of 16; half of the events are hits of a random block and its ancestors, half are
one block that is evicted and one that takes its slot. The peer is the textbook LRU, a `collections.OrderedDict` of
keys, that knows no prefixes, pins or hints. `bytes_per_entry` is what is allocated per resident block at 100,000 of
them, after half were used again and as many were replaced, so that ghost entries count; keys are the tier's.
"""

import gc
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from harness import Cost, Measure, Report, Result, interleaved, timed

from kvtier.policies import POLICIES, EvictionPolicy, make_policy

__all__ = ["run"]

CHAIN = 16
MEASURED_ENTRIES = 100_000


class Peer:
    """An OrderedDict behind the verbs that the workload uses."""

    def __init__(self, capacity: int) -> None:
        self._slots: OrderedDict[int, bytes] = OrderedDict()

    def insert(self, slots: Sequence[int], keys: Sequence[bytes], parents: Sequence[int | None]) -> None:
        self._slots.update(zip(slots, keys, strict=True))

    def hit(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._slots.move_to_end(slot)

    def victims(self, count: int, incoming: Sequence[bytes]) -> list[int]:
        return [self._slots.popitem(last=False)[0] for _ in range(count)]

    def remove(self, slots: Sequence[int], *, evicted: bool) -> None:
        """`victims` took them out."""


class Workload:
    """Chains of blocks in a full policy.

    Args:
        make: the policy, given its capacity in blocks.
        entries: resident blocks.
    """

    def __init__(self, make: Callable[[int], EvictionPolicy | Peer], entries: int) -> None:
        self._dice = np.random.default_rng(0)
        self._parents: list[int | None] = [None] * entries
        self._chains = _fresh_chains(entries // CHAIN)
        self.policy = make(entries)
        for number, keys in enumerate(self._chains):
            self._insert(list(range((number + 1) * CHAIN - 1, number * CHAIN - 1, -1)), keys)

    def _insert(self, slots: list[int], keys: Sequence[bytes]) -> None:
        self.policy.insert(slots, keys, [*slots[1:], None])
        self._adopt(slots)

    def _adopt(self, slots: list[int]) -> None:
        for slot, parent in zip(slots, [*slots[1:], None], strict=True):
            self._parents[slot] = parent

    def _ancestry(self, slot: int | None) -> Iterator[int]:
        while slot is not None:
            yield slot
            slot = self._parents[slot]

    def hits(self, batches: int) -> tuple[Cost, int]:
        """Use random blocks with their ancestors; returns what it took and the number of events."""
        leaves = self._dice.integers(0, len(self._parents), batches).tolist()
        chains = [list(self._ancestry(leaf)) for leaf in leaves]
        hit = self.policy.hit

        def work() -> None:
            for slots in chains:
                hit(slots)

        return timed(work), sum(map(len, chains))

    def replace(self, batches: int) -> tuple[Cost, int]:
        """Evict and insert chains; returns what it took and the number of events."""
        incoming = _fresh_chains(batches)
        policy, placed = self.policy, []

        def work() -> None:
            for keys in incoming:
                slots = policy.victims(CHAIN, keys)
                policy.remove(slots, evicted=True)
                policy.insert(slots, keys, [*slots[1:], None])
                placed.append(slots)

        cost = timed(work)
        for slots in placed:
            self._adopt(slots)
        return cost, batches * CHAIN

    def round(self, batches: int) -> Cost:
        """Hits and replacements, per event, each counting half."""
        used, uses = self.hits(batches)
        replaced, replacements = self.replace(batches)
        return Cost(*((hit / uses + new / replacements) / 2 for hit, new in zip(used, replaced, strict=True)))


def _fresh_chains(count: int) -> list[list[bytes]]:
    data = np.random.default_rng().bytes(count * CHAIN * 16)
    keys = [data[at : at + 16] for at in range(0, len(data), 16)]
    return [keys[at : at + CHAIN] for at in range(0, len(keys), CHAIN)]


def bytes_per_entry(make: Callable[[int], EvictionPolicy | Peer]) -> float:
    chains = _fresh_chains(2 * MEASURED_ENTRIES // CHAIN)
    resident, incoming = chains[: len(chains) // 2], chains[len(chains) // 2 :]
    tracemalloc.start()
    policy = make(MEASURED_ENTRIES)
    for number, keys in enumerate(resident):
        slots = list(range((number + 1) * CHAIN - 1, number * CHAIN - 1, -1))
        policy.insert(slots, keys, [*slots[1:], None])
        if number % 2:
            policy.hit(slots)
    for keys in incoming:
        slots = policy.victims(CHAIN, keys)
        policy.remove(slots, evicted=True)
        policy.insert(slots, keys, [*slots[1:], None])
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round(kept / MEASURED_ENTRIES, 1)


def measure(report: Report, name: str, make: Callable[[int], EvictionPolicy], entries: int, rounds: int) -> None:
    ours, peer = Workload(make, entries), Workload(Peer, entries)
    batches = 500
    measures: dict[str, Measure] = {"ours": lambda: ours.round(batches), "OrderedDict": lambda: peer.round(batches)}
    result = interleaved(measures, rounds)
    value, other = (1e9 * result.median(way).cpu_seconds for way in ("ours", "OrderedDict"))
    params = {
        "resident": entries,
        "bytes_per_entry": bytes_per_entry(make),
        "peer_bytes_per_entry": bytes_per_entry(Peer),
    }
    report.add(
        Result(
            f"policy.{name}",
            value,
            "ns CPU/event",
            params,
            "OrderedDict",
            other,
            result.cpu_ratio("ours", "OrderedDict"),
        )
    )


def run(report: Report, quick: bool) -> None:  # noqa: FBT001  every section's signature
    """Add `policy.*` for every eviction policy that is registered."""
    for name in POLICIES.names():
        measure(report, name, partial(make_policy, name), 100_000 if quick else 1_000_000, 5 if quick else 15)
