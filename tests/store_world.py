"""Blocks for tests of the store: keys of chains with parts, and bytes that tell which block they are."""

import hashlib
import threading
import time
from collections.abc import Sequence

import numpy as np
from patience import came_true

from kvtier.cpu import HostTier
from kvtier.keys import namespace_index
from kvtier.store import Lease, TieredStore
from kvtier.tiers import BlockRef, Status, Ticket, TierCaps

BLOCK = 4096
NS = namespace_index(hashlib.sha256(b"store world").digest())


def key(chain: object, depth: int, part: int = 0) -> bytes:
    return hashlib.sha256(repr((chain, depth, part)).encode()).digest()[:16]


def keys(chain: object, stop: int, parts: int = 1, start: int = 0) -> list[bytes]:
    return [key(chain, depth, part) for depth in range(start, stop) for part in range(parts)]


def content(block: bytes, exact: bool = True, nbytes: int = BLOCK) -> bytes:
    """What a block's bytes have to be; a lossy version of it differs from the exact one."""
    seed = hashlib.sha256(block + bytes([exact])).digest()
    return (seed * (-(-nbytes // 32)))[:nbytes]


def items(
    chain: object, stop: int, parts: int = 1, *, start: int = 0, exact_below: int | None = None, ns: int = NS
) -> list[tuple[BlockRef, memoryview]]:
    """Blocks [start, stop) of a chain; those from depth `exact_below` on are not exact."""
    made = []
    for depth in range(start, stop):
        exact = exact_below is None or depth < exact_below
        for part in range(parts):
            parent = key(chain, depth - 1, part) if depth else None
            ref = BlockRef(key(chain, depth, part), ns, depth, parent, exact)
            made.append((ref, memoryview(content(ref.key, exact))))
    return made


def verify(store: TieredStore, lease: Lease, start: int, stop: int) -> None:
    """Every part of these blocks, which are in host, has the bytes that its key says."""
    for tier, handle in lease.part(start, stop):
        assert tier is store.host
        found = np.frombuffer(store.host.buffer(handle), np.uint8, handle.nbytes).tobytes()
        assert found == content(handle.ref.key, handle.ref.exact, handle.nbytes)


def fetched(
    store: TieredStore,
    wanted: Sequence[bytes],
    parts: int = 1,
    lossy: bool | None = None,
    owner: str = "test",
    patience: float | None = None,
) -> int:
    """How many leading blocks arrive in host, with the right bytes; `patience`: seconds, the store's own by default."""
    until = None if patience is None else time.monotonic() + patience
    lease = store.acquire(wanted, owner, parts=parts, lossy=lossy, deadline=until).result(30)
    good = store.fetch(lease, 0, len(lease), deadline=until).result(30)
    verify(store, lease, 0, good)
    store.release(lease)
    return good


class ExtentTier(HostTier):
    """A tier in memory that takes records of any size, as one on a disk does."""

    caps = TierCaps(variable_size=True, align=4096)


class FarTier(HostTier):
    """A tier in memory that says it is a network away, and answers look-ups when it may."""

    caps = TierCaps(remote=True, probe=30.0)

    def __init__(self) -> None:
        super().__init__(1 << 20, name="far")
        self.answers = threading.Event()
        self.answers.set()
        self.asked: list[str] = []

    def contains(self, keys: Sequence[bytes], deadline: float | None = None, *, exact: bool = False) -> Ticket:
        self.asked.append(threading.current_thread().name)
        assert self.answers.wait(30)
        return super().contains(keys, deadline, exact=exact)


def memory_tier(blocks: int, name: str = "below", **options: object) -> HostTier:
    """A real tier in memory to stand below host."""
    return HostTier(blocks * BLOCK, name=name, **options)


def held(tier: HostTier, wanted: Sequence[bytes], *, exact: bool = False) -> list[bool]:
    return [status is Status.OK for status in tier.contains(wanted, exact=exact).wait(30).statuses]


def nothing_is_held(store: TieredStore) -> bool:
    stats = store.stats()
    tiers = [stats[tier.name] for tier in store.tiers]
    return not any(one["leases"] or one["reservations"] for one in tiers) and not (
        stats["store"]["leases"] or stats["store"]["pins"] or stats["store"]["waiting_bytes"]
    )


def holds_nothing_soon(store: TieredStore) -> bool:
    """What was read ahead of a run that ended early arrives, and is let go of."""
    return came_true(lambda: nothing_is_held(store))
