"""One write budget per NVMe directory: over restarts, processes that are killed, and several at a time."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from store_world import BLOCK, FarTier, items, keys

from kvtier.cpu import HostTier
from kvtier.errors import TierUnavailable
from kvtier.hints import Hint
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.policies import SecondTouch
from kvtier.store import StoreOptions, TieredStore
from kvtier.store.options import WriteRule
from kvtier.store.placement import Placed
from kvtier.testing.blocks import chain_refs, put

OPTIONS = NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0)
DAY_BLOCKS = 41
PER_DAY = DAY_BLOCKS * BLOCK

_PROCESS = """
import hashlib, sys
from pathlib import Path
from kvtier.cpu import HostTier
from kvtier.hints import Hint
from kvtier.keys import namespace_index
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.store import StoreOptions, TieredStore
from kvtier.tiers import BlockRef

path, name, budget = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
ns = namespace_index(hashlib.sha256(b"budget").digest())
metrics = Metrics()
tier = NvmeTier(path, 8 << 20, NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0), metrics=metrics)
store = TieredStore(HostTier(4 << 20), [tier], metrics=metrics, options=StoreOptions(write_budget=budget or None))
print("ready", flush=True)
for line in sys.stdin:
    for at in range(int(line)):
        key = hashlib.sha256(f"{name} {at}".encode()).digest()[:16]
        store.put([(BlockRef(key, ns, 0, None, True), memoryview(bytes(4096)))], [Hint(reuse="likely")]).result()
        store.flush()
    print(int(store.metrics.value("written_bytes_total", tier="nvme")) // 4096, flush=True)
store.close()
"""


@contextlib.contextmanager
def process(path: Path, name: str, budget: int = PER_DAY) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _PROCESS, str(path), name, str(budget)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        try:
            yield running
        finally:
            running.kill()


def start(running: subprocess.Popen[str], blocks: int) -> None:
    assert running.stdin is not None
    running.stdin.write(f"{blocks}\n")
    running.stdin.flush()


def written(running: subprocess.Popen[str]) -> int:
    """How many blocks it has written, once it is through."""
    assert running.stdout is not None
    return int(running.stdout.readline())


@contextlib.contextmanager
def opened(path: Path, budget: int | None = PER_DAY) -> Iterator[tuple[TieredStore, NvmeTier]]:
    metrics = Metrics()
    tier = NvmeTier(path, 8 << 20, OPTIONS, metrics=metrics)
    store = TieredStore(HostTier(1024 * BLOCK), [tier], metrics=metrics, options=StoreOptions(write_budget=budget))
    with contextlib.closing(store):
        yield store, tier


def put_likely(store: TieredStore, chain: object, count: int) -> None:
    store.put(items(chain, count), [Hint(reuse="likely")] * count).result()
    store.flush()


def test_restarts_share_one_budget(tmp_path: Path) -> None:
    total = 0
    for turn, blocks in enumerate((30, 30, 30)):
        with opened(tmp_path) as (store, tier):
            put_likely(store, turn, blocks)
            assert tier.stats()["blocks"] == min(DAY_BLOCKS, 30 * (turn + 1))
            total += int(store.metrics.value("written_bytes_total", tier="nvme"))
    assert total == PER_DAY


def test_a_store_that_opens_knows_what_was_written(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, _):
        assert store.write_rule == "through"
        put_likely(store, "a", 8)
    with opened(tmp_path) as (store, _):
        assert store.write_rule == "second_touch"
        assert store.metrics.value("write_rule", rule="second_touch") == 1


def test_processes_share_one_budget_also_with_one_that_was_killed(tmp_path: Path) -> None:
    with process(tmp_path, "killed") as one:
        start(one, 20)
        assert written(one) == 20
        one.send_signal(signal.SIGKILL)
        one.wait(30)
    with process(tmp_path, "two") as two, process(tmp_path, "three") as three:
        start(two, 40)
        start(three, 40)
        counts = written(two), written(three)
        # What the other one is about to write, one block here, is in no meter so far.
        assert DAY_BLOCKS - 20 <= sum(counts) <= DAY_BLOCKS - 20 + 1


def test_what_waits_counts_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as (store, tier):
        slow = tier.write

        def write(*arguments: object) -> object:
            time.sleep(0.2)
            return slow(*arguments)

        monkeypatch.setattr(tier, "write", write)
        for chain in range(10):
            store.put(items(chain, 8), [Hint(reuse="likely")] * 8).result()
        store.flush()
        assert tier.stats()["blocks"] <= DAY_BLOCKS


def test_writes_without_a_budget_count_once_there_was_one(tmp_path: Path) -> None:
    with contextlib.closing(NvmeTier(tmp_path, 8 << 20, OPTIONS)) as tier:
        put(tier, chain_refs(8, seed=1), BLOCK)
    with opened(tmp_path, None) as (store, tier):
        put_likely(store, "unmetered", 8)
        assert tier.ahead(PER_DAY) == 0, "a directory that nobody metered"
    with contextlib.closing(NvmeTier(tmp_path, 8 << 20, OPTIONS)) as tier:
        put(tier, chain_refs(4, seed=2), BLOCK)
    with opened(tmp_path, None) as (store, tier):
        put_likely(store, "metered", 8)
        assert tier.ahead(PER_DAY) == pytest.approx(12 * BLOCK, rel=0.01)
        tier.clear().wait(30)
        assert tier.ahead(PER_DAY) == pytest.approx(12 * BLOCK, rel=0.01)


def test_writes_without_a_budget_count_while_the_process_that_has_one_is_idle(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, tier), process(tmp_path, "unmetered", 0) as other:
        start(other, DAY_BLOCKS)
        assert written(other) == DAY_BLOCKS
        assert tier.ahead(PER_DAY) == pytest.approx(PER_DAY, rel=0.01)
        put_likely(store, "metered", 8)
        # A block accrues in half an hour.
        assert store.metrics.value("written_bytes_total", tier="nvme") == 0


def test_what_the_queue_dropped_keeps_to_the_budget_when_it_is_used_again(tmp_path: Path) -> None:
    # An hour's share is four blocks: what is written before leaves the rule as it is.
    day, likely = 24 * 4, Hint(reuse="likely")
    tier = NvmeTier(tmp_path, 8 << 20, OPTIONS)
    options = StoreOptions(write_budget=day * BLOCK, writeback_bytes=BLOCK)
    with contextlib.closing(TieredStore(HostTier(1024 * BLOCK), [tier], options=options)) as store:
        for chain, count in (("a", 80), ("b", 80), ("last", 1)):
            put_likely(store, chain, count)
        assert store.metrics.value("dropped_blocks_total", tier="nvme", reason="queue_full") == 158
        assert store.write_rule == "through"
        (demoter,) = store._placement._demoters
        demoter._bound = 256 * BLOCK  # the device is quick again
        store._placement.used([Placed(ref, BLOCK, likely) for chain in "ab" for ref, _ in items(chain, 80)])
        store.flush()
        assert tier.stats()["blocks"] == day
        refused = 161 - day
        assert store.metrics.value("dropped_blocks_total", tier="nvme", reason="not_admitted") == refused
        assert len(demoter.owes(keys("a", 80) + keys("b", 80))) == refused, "it stays owed"


class Everything:
    """An admission policy of one's own that refuses nothing."""

    def admit(self, keys: Sequence[bytes], nbytes: Sequence[int], hints: Sequence[Hint]) -> list[bool]:
        return [True] * len(keys)


@pytest.mark.parametrize("policy", [SecondTouch, Everything])
def test_a_budget_holds_under_second_touch(tmp_path: Path, policy: type[SecondTouch | Everything]) -> None:
    tier = NvmeTier(tmp_path, 8 << 20, OPTIONS)
    options = StoreOptions(write_budget=PER_DAY, write_rule="second_touch", admission=policy())
    with contextlib.closing(TieredStore(HostTier(1024 * BLOCK), [tier], options=options)) as store:
        store.put(items("first", 8)).result()
        store.flush()
        assert tier.stats()["blocks"] == (8 if policy is Everything else 0), "the policy decides, however much is left"
        for chain in range(10):
            for _ in range(2):
                store.put(items(chain, 8)).result()
                store.flush()
        assert tier.stats()["blocks"] == DAY_BLOCKS


def test_a_clock_that_was_set_back_locks_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [2e9]
    monkeypatch.setattr("time.time", lambda: now[0])
    with opened(tmp_path) as (store, tier):
        put_likely(store, "a", 60)
        assert tier.stats()["blocks"] == DAY_BLOCKS
        now[0] -= 1e9
        put_likely(store, "b", 8)
        assert tier.stats()["blocks"] == DAY_BLOCKS
        now[0] += 86_400.0
        put_likely(store, "c", 8)
        assert tier.stats()["blocks"] == DAY_BLOCKS + 8


def test_an_index_that_cannot_be_read_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> float:
        raise TierUnavailable("no index")

    with opened(tmp_path) as (store, tier):
        monkeypatch.setattr(tier, "ahead", broken)
        put_likely(store, "a", 8)
        assert tier.stats()["blocks"] == 0
        assert store.metrics.value("errors_total", tier="nvme", operation="meter") >= 1
        monkeypatch.undo()
        put_likely(store, "b", 8)
        assert tier.stats()["blocks"] == 8


def test_a_remote_tier_beside_it_does_not_count(tmp_path: Path) -> None:
    tier = NvmeTier(tmp_path, 8 << 20, OPTIONS)
    options = StoreOptions(write_budget=24 * 8 * BLOCK)
    with contextlib.closing(TieredStore(HostTier(64 * BLOCK), [tier, FarTier()], options=options)) as store:
        for _ in range(3):
            store.put(items("a", 8)).result()
            store.flush()
        assert tier.ahead(24 * 8 * BLOCK) == pytest.approx(8 * BLOCK, rel=0.01)


@pytest.mark.parametrize("write_rule", ["through", "second_touch"])
def test_a_remote_tier_does_not_starve_with_a_budget_that_is_used_up(tmp_path: Path, write_rule: WriteRule) -> None:
    tier, far = NvmeTier(tmp_path, 8 << 20, OPTIONS), FarTier()
    options = StoreOptions(write_budget=PER_DAY, write_rule=write_rule)
    with contextlib.closing(TieredStore(HostTier(1024 * BLOCK), [tier, far], options=options)) as store:
        put_likely(store, "nvme", DAY_BLOCKS + 8)
        assert tier.stats()["blocks"] == DAY_BLOCKS
        assert far.stats()["blocks"] == DAY_BLOCKS + 8
        # Used up, it still takes two touches.
        store.put(items("once", 8)).result()
        store.flush()
        assert far.stats()["blocks"] == DAY_BLOCKS + 8
        store.put(items("once", 8)).result()
        store.flush()
        assert far.stats()["blocks"] == DAY_BLOCKS + 16
        assert tier.stats()["blocks"] == DAY_BLOCKS


def test_a_remote_tier_does_not_starve_with_a_meter_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> float:
        raise TierUnavailable("no index")

    tier, far = NvmeTier(tmp_path, 8 << 20, OPTIONS), FarTier()
    options = StoreOptions(write_budget=PER_DAY)
    with contextlib.closing(TieredStore(HostTier(64 * BLOCK), [tier, far], options=options)) as store:
        put_likely(store, "a", 8)
        far.clear().wait(30)
        monkeypatch.setattr(tier, "ahead", broken)
        # NVMe holds the first and lacks the second.
        put_likely(store, "a", 8)
        put_likely(store, "b", 8)
        assert far.stats()["blocks"] == 16
        assert tier.stats()["blocks"] == 8
