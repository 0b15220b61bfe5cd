"""TieredStore over a small host tier and a larger NVMe tier, against a model that only knows what was put."""

import hashlib
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.cpu import HostTier
from kvtier.keys import namespace_index
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.store import Lease, TieredStore
from kvtier.tiers import BlockRef

BLOCK = 8192
HOST_BLOCKS, NVME_BLOCKS, CHAINS, DEPTH = 6, 512, 4, 8
NS = namespace_index(hashlib.sha256(b"store machine").digest())


def key(chain: int, depth: int) -> bytes:
    return hashlib.sha256(bytes([chain, depth])).digest()[:16]


def content(block: bytes) -> bytes:
    return (hashlib.sha256(block).digest() * (BLOCK // 32))[:BLOCK]


def refs(chain: int, stop: int) -> list[BlockRef]:
    return [BlockRef(key(chain, at), NS, at, key(chain, at - 1) if at else None, exact=True) for at in range(stop)]


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        metrics = Metrics()
        self.host = HostTier(HOST_BLOCKS * BLOCK, metrics=metrics)
        self.nvme = NvmeTier(
            self.directory / "nvme", NVME_BLOCKS * BLOCK, NvmeOptions(min_free_bytes=0), metrics=metrics
        )
        self.store = TieredStore(self.host, [self.nvme], metrics=metrics)
        self.depth = dict.fromkeys(range(CHAINS), 0)  # how much of each chain was ever put
        self.leases: list[tuple[int, Lease]] = []

    @rule(chain=st.integers(0, CHAINS - 1), stop=st.integers(1, DEPTH))
    def put(self, chain: int, stop: int) -> None:
        items = [(ref, memoryview(content(ref.key))) for ref in refs(chain, stop)]
        result = self.store.put(items).result()
        assert sum(result) == stop
        # The NVMe tier never evicts here: what a flush sees in host, it keeps.
        self.store.flush()
        self.depth[chain] = max(self.depth[chain], stop if result.dropped == 0 else 0)

    @rule(chain=st.integers(0, CHAINS - 1))
    def acquire(self, chain: int) -> None:
        keys = [ref.key for ref in refs(chain, DEPTH)]
        hint = self.store.match(keys).tiers
        lease = self.store.acquire(keys, "test").result()
        assert len(lease.blocks) == len(hint)
        self.leases.append((chain, lease))

    @rule(pick=st.integers(0, 9), start=st.integers(0, DEPTH))
    def fetch(self, pick: int, start: int) -> None:
        if not self.leases:
            return
        chain, lease = self.leases[pick % len(self.leases)]
        stop = len(lease.blocks)
        if start >= stop:
            return
        good = self.store.fetch(lease, start, stop).result()
        assert all(name == "host" for name in lease.tiers()[start : start + good])
        for at in range(start, start + good):
            buffer = self.host.buffer(lease.blocks[at][1])
            assert bytes(np.frombuffer(buffer, np.uint8, BLOCK)) == content(key(chain, at))
        if stop <= HOST_BLOCKS and len(self.leases) == 1:
            assert good == stop - start

    @rule(pick=st.integers(0, 9))
    def release(self, pick: int) -> None:
        if self.leases:
            _, lease = self.leases.pop(pick % len(self.leases))
            self.store.release(lease)
            self.store.release(lease)

    @rule()
    def clear_host(self) -> None:
        self.store.clear("host")

    @invariant()
    def nothing_put_is_forgotten(self) -> None:
        for chain, depth in self.depth.items():
            assert len(self.store.match([ref.key for ref in refs(chain, DEPTH)]).tiers) >= depth

    @invariant()
    def capacity_is_hard(self) -> None:
        stats = self.store.stats()
        assert stats["host"]["bytes"] <= HOST_BLOCKS * BLOCK
        assert stats["nvme"]["bytes"] <= NVME_BLOCKS * BLOCK

    def teardown(self) -> None:
        for _, lease in self.leases:
            self.store.release(lease)
        assert all(self.store.stats()[tier]["leases"] == 0 for tier in ("host", "nvme"))
        assert all(self.store.stats()[tier]["reservations"] == 0 for tier in ("host", "nvme"))
        self.store.close()
        shutil.rmtree(self.directory)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
