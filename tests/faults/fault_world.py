"""A store over a real host and a real NVMe tier, both of which fail as they are told to, and what must hold of it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvtier.cpu import HostTier
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.store import PutResult, StoreOptions, TieredStore
from kvtier.testing import FaultyHostTier, FaultyTier
from kvtier.testing.blocks import content
from kvtier.tiers import BlockRef, Tier

BLOCK = 8192
NVME_OPTIONS = NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0)
SOUND = ("leaked_pages", "overlaps", "wrong_sums", "lost_rows", "corrupt", "dead_holds")


def flip_in_host(tier: Tier, key: bytes) -> None:
    """A bit of a block in host memory changes."""
    assert isinstance(tier, HostTier)
    handles = tier.acquire([key], "vandal").wait(30).handles
    for handle in handles:
        span = tier.span(handle)
        tier._slab.region.array[span.offset + span.nbytes // 2] ^= 1
    tier.release(handles)


def flip_on_disk(tier: Tier, key: bytes) -> None:
    """A bit of a block's segment file changes."""
    assert isinstance(tier, NvmeTier)
    handles = tier.acquire([key], "vandal").wait(30).handles
    for handle in handles:
        number, page = divmod(handle.page, tier._segments.pages_per_file)
        with (tier._opened.directory.path / f"seg-{number:05}.kv").open("r+b") as file:
            file.seek(page * 4096 + handle.nbytes // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
    tier.release(handles)


class World:
    """Blocks of `content` in a `TieredStore`; every byte that it hands out is checked against its key."""

    def __init__(
        self, path: Path, *, host_blocks: int = 64, nvme_blocks: int = 512, block: int = BLOCK, **options: float
    ) -> None:
        self.metrics = Metrics()
        self.block = block
        room = -(-block // 4096) * 4096  # records take whole pages
        self.inner = HostTier(host_blocks * room, metrics=self.metrics)
        self.nvme = NvmeTier(path / "nvme", nvme_blocks * room, NVME_OPTIONS, metrics=self.metrics)
        self.host = FaultyHostTier(self.inner, damage=flip_in_host)
        self.below = FaultyTier(self.nvme, damage=flip_on_disk)
        self.store = TieredStore(self.host, [self.below], metrics=self.metrics, options=StoreOptions(**options))

    def put(self, refs: Sequence[BlockRef]) -> PutResult:
        result = self.store.put([(ref, content(ref, self.block)) for ref in refs]).result(60)
        assert sum(result) == len(refs)
        return result

    def fetched(self, refs: Sequence[BlockRef], owner: str = "reader") -> int:
        """How many leading blocks arrive in host; each has its own bytes."""
        lease = self.store.acquire([ref.key for ref in refs], owner).result(60)
        try:
            good = self.store.fetch(lease, 0, len(lease.tiers())).result(60) if lease.blocks else 0
            for ref, (_, handle) in zip(refs, lease.blocks[:good], strict=False):
                assert self.bytes_of(handle) == content(ref, self.block), ref
            return good
        finally:
            self.store.release(lease)

    def bytes_of(self, handle: object) -> bytes:
        return np.frombuffer(self.inner.buffer(handle), np.uint8, self.block).tobytes()

    def found(self, refs: Sequence[BlockRef]) -> tuple[str, ...]:
        return self.found_keys([ref.key for ref in refs])

    def found_keys(self, keys: Sequence[bytes]) -> tuple[str, ...]:
        return self.store.match(keys).tiers

    def down(self) -> None:
        """Only the NVMe tier has the blocks."""
        self.store.flush()
        self.store.clear("host")

    def dropped(self, tier: str = "nvme") -> int:
        """Blocks that a tier did not take, for whatever reason."""
        return self.total("kvtier_dropped_blocks_total", tier)

    def total(self, name: str, tier: str) -> int:
        samples = [one for metric in self.metrics.registry.collect() for one in metric.samples if one.name == name]
        return int(sum(one.value for one in samples if one.labels["tier"] == tier))

    def heal(self) -> None:
        self.host.heal()
        self.below.heal()

    def check(self) -> None:
        """Nobody holds anything, and the books are right."""
        self.heal()
        self.store.flush()
        stats = self.store.stats()
        held = {(name, what): stats[name][what] for name in ("host", "nvme") for what in ("leases", "reservations")}
        assert set(held.values()) == {0}, held
        self.inner.check()
        report = self.nvme.check(verify=True)
        assert not any(report[fault] for fault in SOUND), report

    def close(self) -> None:
        self.heal()
        self.store.close()
