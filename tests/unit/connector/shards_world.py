"""Two workers, each with pools of two layer groups, over one store."""

import numpy as np
import torch
from patience import until

from kvtier.connector import ConnectorOptions, TierScheduler, TierWorker
from kvtier.cpu import AttachedRegion, HostTier, StagingRegion
from kvtier.hooks import Step, TransferPlan
from kvtier.keys import Namespace
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.store import TieredStore

SHARDS, BLOCKS = 2, 16
LAYOUT = Layout(
    4,
    (
        LayerGroup(GroupKind.GQA, (0, 1), 2, 2, 8),
        LayerGroup(GroupKind.GQA, (2,), 2, 2, 8, window=64),
    ),
    shards=SHARDS,
)
NAMESPACE = Namespace("model", LAYOUT.fingerprint)
OPTIONS = ConnectorOptions(groups=2, shards=SHARDS, copies="exclusive")


class World:
    """A scheduler half, and a worker for each shard with pools of two layer groups."""

    def __init__(self, options: ConnectorOptions = OPTIONS) -> None:
        self.store = TieredStore(HostTier(1 << 20))
        sizes = [LAYOUT.block_bytes(group) for group in range(2)]
        self.staging = [StagingRegion(sizes[group], 6) for group in range(2) for _ in range(SHARDS)]
        self.half = TierScheduler(self.store, NAMESPACE, LAYOUT.block_size, self.staging, options)
        self.pools = [[torch.zeros(BLOCKS, size, dtype=torch.uint8) for size in sizes] for _ in range(SHARDS)]
        self.workers = [self._worker(shard) for shard in range(SHARDS)]

    def _worker(self, shard: int) -> TierWorker:
        # A worker maps its own staging regions only.
        own = [region.regions()[0] for at, region in enumerate(self.staging) if at % SHARDS == shard]
        shares = [*self.store.host.regions(), *own]
        regions = {share.region: AttachedRegion(share.fd, share.nbytes, share.writable) for share in shares}
        worker = TierWorker(regions, LAYOUT, shard)
        worker.register_pool(*self.pools[shard])
        return worker

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.store.close()
        for region in self.staging:
            region.close()

    def run(self, plan: TransferPlan, shards: tuple[int, ...] = (0, 1)) -> dict[str, tuple[int, bool]]:
        for shard in shards:
            self.workers[shard].begin(plan)
        # Whichever shard reports a job last ends it, and that need not be the last one asked.
        loaded: dict[str, tuple[int, bool]] = {}
        for shard in shards:
            loaded |= self.half.completed(self.workers[shard].end()).loaded
        return loaded

    def settle(self) -> dict[str, tuple[int, bool]]:
        loaded: dict[str, tuple[int, bool]] = {}

        def rests() -> bool:
            if self.half.busy:
                loaded.update(self.run(self.half.plan(Step(0, (), frozenset()))))
            return not self.half.busy

        until(rests)
        return loaded


def fill(world: World, block: int) -> None:
    for shard, pools in enumerate(world.pools):
        for group, pool in enumerate(pools):
            pattern = np.random.default_rng([shard, group, block]).integers(0, 256, pool.shape[1], np.uint8)
            pool[block] = torch.from_numpy(pattern)
