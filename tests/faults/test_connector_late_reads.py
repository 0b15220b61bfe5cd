"""A load is given up while the disk still reads for it: the late bytes are what they should be, and hurt nobody."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from connector_world import BLOCK_BYTES, NAMESPACE, SIZE, Request, answer, finish, holds_nothing, step
from patience import PATIENCE, until

from kvtier.connector import ConnectorOptions, TierScheduler
from kvtier.cpu import HostTier, StagingRegion
from kvtier.hooks import Completed, Match, StepSpan, TransferResults
from kvtier.keys import store_keys
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.store import TieredStore
from kvtier.tiers import Handle, Status, Ticket

IDS = [1, 2, 3, 4]
BLOCKS = 256


class LateDisk(NvmeTier):
    """A disk whose reads begin at once, and get their bytes once `released` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, BLOCKS * BLOCK_BYTES, NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0))
        self.released, self.reading = threading.Event(), threading.Event()
        self.statuses: list[Status] = []
        blocks = self._reader._blocks
        read = blocks.read

        def late(transfers: Sequence[object], heads: Sequence[bytes], deadline: float | None) -> object:
            self.reading.set()
            assert self.released.wait(PATIENCE)
            return read(transfers, heads, deadline)

        blocks.read = late

    def read(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        # The deadline is the store's alone: a disk that knew it would say TIMEOUT.
        ticket = super().read(items)
        self.statuses += ticket.wait(60).statuses
        return ticket


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LateDisk]:
    disk = LateDisk(tmp_path / "nvme")
    yield disk
    disk.released.set()


def lay(half: TierScheduler, store: TieredStore, staging: StagingRegion, number: int) -> Request:
    """Save three blocks, of bytes that nobody else's are equal to, down to the disk."""
    request = Request(f"lay {number}", [1000 * number + token for token in range(13)])
    plan = step(half, StepSpan(request, tuple(IDS), 0, 13, exact=True), written=IDS)
    for copies in plan.saves.values():
        for copy in copies:
            staging.view(copy.span)[:] = bytes([number + 1]) * BLOCK_BYTES
    finish(half, plan)
    store.flush()
    half.completed(TransferResults())
    half.finished(request.id, "stop")
    return request


def test_bytes_that_come_after_the_lease_has_ended(disk: LateDisk) -> None:
    store = TieredStore(HostTier(BLOCKS * BLOCK_BYTES), [disk])
    with contextlib.closing(store), contextlib.closing(StagingRegion(BLOCK_BYTES, 8)) as staging:
        options = ConnectorOptions(load_seconds=2.0, least_seconds=0.1)
        half = TierScheduler(store, NAMESPACE, SIZE, staging, options)
        first = lay(half, store, staging, 0)
        request = Request("r", first.tokens)
        store.clear("host")
        assert answer(half, request) == Match(12)
        half.allocated(request, IDS, 12)
        assert disk.reading.wait(PATIENCE)
        done: list[Completed] = []
        until(lambda: done.append(finish(half, step(half))) or done[-1].loaded)
        assert done[-1].loaded["r"][0] == 0
        until(lambda: store.stats()["nvme"]["leases"] == 0)
        # Its lease is over. Now the record goes, and everything that fits is written.
        disk.remove(store_keys(first.chain, NAMESPACE.mask())).wait()
        for number in range(1, 2 + BLOCKS // 3):
            lay(half, store, staging, number)
        disk.released.set()
        until(lambda: holds_nothing(store) and not half.busy)
        store.flush()
        assert disk.statuses[:3] == [Status.OK] * 3
        assert store.metrics.value("corrupt_blocks_total", tier="nvme") == 0
