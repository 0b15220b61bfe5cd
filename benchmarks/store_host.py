"""`host.put`, `host.get`: the host tier beside memcpy of the same bytes.

Every round moves 256 MiB, far more than the processor's caches hold, in batches of 16 blocks.

    put  tier      reserve, write (copy and checksum), commit, into an empty tier
         full      the same into a full one: each block evicts another
         store     the same through TieredStore.put, into an empty tier
    get  tier      acquire (verifies), read (copies, verifies the copy), release
         in place  acquire (verifies), buffer, release: what a device copy does
         store     TieredStore.acquire (verifies), release: the same through the store

The peer is numpy's copyto, as many threads, between touched private buffers. The tier's memory is shared (a memfd):
`shared_gb_per_s` is copyto into such memory (put) or out of it (get), without a tier, in the same rounds.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from harness import Cost, Measure, Report, interleaved, require, timed
from numpy.typing import NDArray

from kvtier.cpu import HostSlab, HostTier
from kvtier.keys import Namespace, namespace_index
from kvtier.store import TieredStore
from kvtier.tiers import BlockRef, Handle, Status

__all__ = ["BATCH", "Blocks", "HostWork", "fresh_refs", "run"]

BATCH = 16
PAGE = 4096
TOTAL = 256 << 20
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
THREADS = (1, 4)

_serial = itertools.count(1)
_namespace = namespace_index(Namespace("benchmark", b"layout").digest)


def fresh_refs(count: int) -> list[BlockRef]:
    """A chain of blocks that was never named before."""
    keys = [next(_serial).to_bytes(16, "big") for _ in range(count)]
    return [BlockRef(key, _namespace, at, keys[at - 1] if at else None, True) for at, key in enumerate(keys)]


class Blocks:
    """A touched buffer, cut into batches of blocks: `batches[i][j]` is uint8 [block bytes]."""

    def __init__(self, array: NDArray[np.uint8], block_bytes: int) -> None:
        rows = array.reshape(-1, block_bytes)
        self.batches = [list(rows[at : at + BATCH]) for at in range(0, len(rows), BATCH)]

    @classmethod
    def private(cls, block_bytes: int, total: int, seed: int | None = None) -> "Blocks":
        """In private memory at a page's start, filled with random bytes or (no seed) ones."""
        roomy = np.ones(total + PAGE, np.uint8)
        start = -roomy.ctypes.data % PAGE
        array = roomy[start : start + total]
        if seed is not None:
            array.view(np.uint64)[:] = np.random.default_rng(seed).integers(0, 2**64, total // 8, dtype=np.uint64)
        return cls(array, block_bytes)

    def views(self, at: int) -> list[memoryview]:
        """One batch as buffers."""
        return [block.data for block in self.batches[at]]


class HostWork:
    """One round of puts or gets on a tier (and a store over it) that has room for all blocks.

    Args:
        source: what is put.
        target: where gets copy to.
        threads: batches are dealt to this many.
    """

    def __init__(self, source: Blocks, target: Blocks, threads: int = 1) -> None:
        block_bytes = source.batches[0][0].nbytes
        total = block_bytes * sum(len(batch) for batch in source.batches)
        self.tier = HostTier(total)
        self.store = TieredStore(self.tier)
        self._source = source
        self._target = target
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._refs: list[list[BlockRef]] = []
        self.refill()

    def refill(self) -> None:
        """Bring every block into the tier under fresh names (and touch all of its memory)."""
        self.renew()
        self.each(self.put_in_tier)

    def renew(self) -> None:
        """Empty the tier; what is put next has fresh names."""
        self.tier.clear().wait()
        self._refs = self._fresh()

    def _fresh(self) -> list[list[BlockRef]]:
        return [fresh_refs(len(batch)) for batch in self._source.batches]

    def each(self, work: Callable[[int], None]) -> None:
        """Do `work` for every batch, in the threads."""
        count = len(self._source.batches)

        def share(start: int) -> None:
            for at in range(start, count, self._threads):
                work(at)

        if self._threads == 1:
            share(0)
            return
        list(self._pool.map(share, range(self._threads)))

    def put(self, work: Callable[[int], None]) -> Measure:
        """Puts of fresh blocks into an empty tier."""

        def measure() -> Cost:
            self.renew()
            return self._puts(work)

        return measure

    def put_into_full(self) -> Cost:
        """Puts of fresh blocks into a tier that is full of others."""
        self.refill()
        self._refs = self._fresh()
        return self._puts(self.put_in_tier)

    def _puts(self, work: Callable[[int], None]) -> Cost:
        cost = timed(lambda: self.each(work))
        held = self.tier.contains([ref.key for refs in self._refs for ref in refs]).wait().statuses
        require(all(status is Status.OK for status in held), "a put was dropped")
        return cost

    def get(self, work: Callable[[int], None]) -> Measure:
        """Gets of blocks that are all there."""
        return lambda: timed(lambda: self.each(work))

    def put_in_tier(self, at: int) -> None:
        refs, data = self._refs[at], self._source.views(at)
        slots = self.tier.reserve(refs, [view.nbytes for view in data], ["raw"] * len(refs), "put")
        handles = [slot for slot in slots if isinstance(slot, Handle)]
        self.tier.write(list(zip(handles, data, strict=True))).wait()
        self.tier.commit(handles)

    def put_in_store(self, at: int) -> None:
        self.store.put(list(zip(self._refs[at], self._source.views(at), strict=True))).result()

    def get_copy(self, at: int) -> None:
        keys = [ref.key for ref in self._refs[at]]
        statuses = self.tier.copy_out(keys, self._target.views(at), "get").wait().statuses
        require(all(status is Status.OK for status in statuses), "a get missed")

    def get_in_place(self, at: int) -> None:
        handles = self._acquire(at)
        for handle in handles:
            self.tier.buffer(handle)
        self.tier.release(handles)

    def get_through_store(self, at: int) -> None:
        lease = self.store.acquire([ref.key for ref in self._refs[at]], "get").result()
        require(len(lease.tiers()) == len(self._refs[at]), "a get missed")
        self.store.release(lease)

    def _acquire(self, at: int) -> Sequence[Handle]:
        handles = self.tier.acquire([ref.key for ref in self._refs[at]], "get").wait().handles
        require(len(handles) == len(self._refs[at]), "a get missed")
        return handles

    def copy(self, source: Blocks, target: Blocks) -> Measure:
        """The peer: copyto of every block."""

        def work(at: int) -> None:
            for to, block in zip(target.batches[at], source.batches[at], strict=True):
                np.copyto(to, block)

        return lambda: timed(lambda: self.each(work))

    def check(self) -> None:
        """What comes out is what went in."""
        self.each(self.get_copy)
        for ours, source in zip(self._target.batches, self._source.batches, strict=True):
            require(all(map(np.array_equal, ours, source)), "a get returned other bytes")

    def close(self) -> None:
        """Let go of threads and memory."""
        self._pool.shutdown()
        self.store.close()


def measure(report: Report, size: int, threads: int, rounds: int) -> None:
    source = Blocks.private(size, TOTAL, seed=size)
    target = Blocks.private(size, TOTAL)
    slab = HostSlab(TOTAL)
    shared = Blocks(slab.region.array, size)
    work = HostWork(source, target, threads)
    work.check()
    params = {"block_kib": size >> 10, "batch": BATCH, "threads": threads}
    puts = interleaved(
        {
            "tier": work.put(work.put_in_tier),
            "full": work.put_into_full,
            "store": work.put(work.put_in_store),
            "memcpy": work.copy(source, target),
            "shared": work.copy(source, shared),
        },
        rounds,
    )
    work.refill()
    gets = interleaved(
        {
            "copy": work.get(work.get_copy),
            "in place": work.get(work.get_in_place),
            "store": work.get(work.get_through_store),
            "memcpy": work.copy(source, target),
            "shared": work.copy(shared, target),
        },
        rounds,
    )
    for name, result in (("host.put", puts), ("host.get", gets)):
        plain = round(TOTAL / result.median("shared").seconds / 1e9, 2)
        for way in (way for way in result.costs if way not in ("memcpy", "shared")):
            report.add_bandwidth(name, params | {"via": way, "shared_gb_per_s": plain}, result, way, "memcpy", TOTAL)
    work.close()
    slab.close()


def run(report: Report, quick: bool, sizes: Sequence[int] = SIZES) -> None:  # noqa: FBT001  every section's signature
    """Add `host.*`."""
    for size in sizes:
        for threads in THREADS:
            measure(report, size, threads, 3 if quick else 15)
