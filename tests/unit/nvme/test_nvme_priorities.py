"""Priorities on NVMe: beside the host's policy as the model, along chains, over time, restarts and processes."""

import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvtier.hints import Hint
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.nvme.extents import Extent
from kvtier.nvme.index import Index
from kvtier.nvme.ledger import Record
from kvtier.nvme.priorities import PRIORITY, Aging, Priorities
from kvtier.nvme.recency import Recency
from kvtier.policies import LruPolicy
from kvtier.testing.blocks import chain_refs, content, put, run_length
from kvtier.tiers import BlockRef, Handle, Status

_UUID = bytes(range(16))
_NOW = 2**62
_NS = chain_refs(1)[0].ns
BLOCK = 4096
STRICT = Hint(priority=math.inf, priority_ttl=600)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1_000_000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    return now


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "index", 1 << 20, durable=False)


@pytest.fixture
def recency(tmp_path: Path, index: Index) -> Recency:
    return Recency(tmp_path / "r", _UUID)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NvmeTier]:
    tier = NvmeTier(tmp_path / "n", 256 * BLOCK, NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0))
    yield tier
    tier.close()


def enter(recency: Recency, index: Index, refs: Sequence[BlockRef], hint: Hint | None = None) -> list[int]:
    with index.write() as ledger:
        rows = recency.take(ledger, len(refs))
        fmt, namespace = ledger.format("raw"), ledger.namespace(_NS)
        for ref, row in zip(refs, rows, strict=True):
            record = Record((Extent(row, 1),), 1, fmt, ref.exact, ref.depth, namespace, row, ref.parent, bytes(16))
            ledger.insert(ref.key, record)
        recency.fill(ledger, rows, refs, [hint] * len(refs))
    return rows


def order(recency: Recency, count: int) -> list[bytes]:
    return [victim.head for victim in recency.victims(count, (), _NOW)]


def heads(refs: Sequence[BlockRef]) -> list[bytes]:
    return [ref.key[:8] for ref in refs]


def bare(count: int, seed: int) -> list[BlockRef]:
    """Blocks that stand alone."""
    return [BlockRef(random.Random(seed * 10_000 + at).randbytes(16), _NS, 0, None, exact=True) for at in range(count)]


def put_with(tier: NvmeTier, refs: Sequence[BlockRef], hint: Hint) -> None:
    slots = tier.reserve(refs, [BLOCK] * len(refs), ["raw"] * len(refs), "w", [hint] * len(refs))
    handles = [slot for slot in slots if isinstance(slot, Handle)]
    tier.write([(handle, content(handle.ref, BLOCK)) for handle in handles]).wait(30)
    tier.commit(handles)


def there(tier: NvmeTier, refs: Sequence[BlockRef]) -> int:
    """How many there are; asking is no use of them."""
    return tier.contains([ref.key for ref in refs]).wait(30).statuses.count(Status.OK)


# ---- the tier


def test_what_is_strict_outlives_the_churn_until_it_lapses(tier: NvmeTier, clock: list[float]) -> None:
    strict, churn = bare(10, seed=1), bare(1200, seed=2)
    put_with(tier, strict, STRICT)
    for at in range(0, 600, 12):
        put(tier, churn[at : at + 12], BLOCK)
    assert there(tier, strict) == 10
    clock[0] += 601
    for at in range(600, 1200, 12):
        put(tier, churn[at : at + 12], BLOCK)
    assert there(tier, strict) == 0


def test_what_is_strict_leaves_when_nothing_else_is_left(tier: NvmeTier) -> None:
    old, new = bare(256, seed=1), bare(100, seed=2)
    put_with(tier, old, STRICT)
    put_with(tier, new, STRICT)
    assert there(tier, new) == 100
    assert there(tier, old) <= 156


def test_a_priority_outlives_the_process(tmp_path: Path) -> None:
    options = NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0)
    strict, churn = chain_refs(10, seed=1), bare(600, seed=2)
    tier = NvmeTier(tmp_path / "n", 256 * BLOCK, options)
    put_with(tier, strict, STRICT)
    tier.close()
    tier = NvmeTier(tmp_path / "n", 256 * BLOCK, options)
    for at in range(0, 600, 12):
        put(tier, churn[at : at + 12], BLOCK)
    assert run_length(tier, strict) == 10
    tier.close()


# ---- rows, beside the host's policy


@pytest.mark.parametrize("seed", range(5))
def test_ages_are_weighted_as_in_host(recency: Recency, index: Index, seed: int) -> None:
    dice, ticks = random.Random(seed), [0]
    policy = LruPolicy(1000, clock=lambda: float(ticks[0]))
    refs = bare(60, seed)
    rows: list[int] = []
    used: list[int] = []
    hints: list[Hint] = []

    def hinted() -> Hint:
        return Hint(priority=dice.choice([1, 1, 1, 2, 4, 7.5, math.inf]), priority_ttl=1e4)

    for step in range(400):
        ticks[0] += 1
        if len(rows) < len(refs) and (not rows or dice.random() < 0.3):
            hints.append(hinted())
            rows += enter(recency, index, [refs[len(rows)]], hints[-1])
            policy.insert([len(rows) - 1], [refs[len(rows) - 1].key], [None], [hints[-1]])
            used.append(step)
        else:
            at = dice.randrange(len(rows))
            recency.renew([rows[at]])
            policy.hit([at])
            used[at] = step
    at_of = {ref.key[:8]: at for at, ref in enumerate(refs)}

    def weighed(at: int) -> float:
        return (400 - used[at]) / hints[at].priority

    below, above = [at_of[head] for head in order(recency, 100)], policy.victims(100)
    assert sorted(below) == sorted(above) == list(range(len(rows)))
    # Instants are whole numbers there: what differs by less than one may change places.
    assert [weighed(at) for at in below] == pytest.approx([weighed(at) for at in above], abs=1)
    strict = {at for at, hint in enumerate(hints) if hint.priority == math.inf}
    assert strict
    assert set(below[-len(strict) :]) == set(above[-len(strict) :]) == strict


def test_what_is_strict_goes_oldest_first_too(recency: Recency, index: Index) -> None:
    refs, plain = bare(4, seed=1), bare(1, seed=2)
    rows = [enter(recency, index, [ref], STRICT)[0] for ref in refs]
    recency.renew(rows[:1])
    enter(recency, index, plain)
    recency.renew(rows[2:3])
    assert order(recency, 5) == heads([*plain, refs[1], refs[3], refs[0], refs[2]])


def test_a_priority_of_four_ages_four_times_slower(recency: Recency, index: Index) -> None:
    weighty, plain = bare(1, seed=1), bare(1, seed=2)
    enter(recency, index, weighty, Hint(priority=4))
    for at in range(30):
        enter(recency, index, bare(1, seed=100 + at))
    enter(recency, index, plain)
    for at in range(9):
        enter(recency, index, bare(1, seed=200 + at))
    # 40 instants of age count as 10, and those of the other one are 9.
    gone = order(recency, 41)
    assert gone.index(weighty[0].key[:8]) < gone.index(plain[0].key[:8])
    for at in range(3):
        enter(recency, index, bare(1, seed=300 + at))
    gone = order(recency, 44)
    assert gone.index(weighty[0].key[:8]) > gone.index(plain[0].key[:8])


# ---- time


def test_a_priority_lapses_and_a_use_prolongs_it(recency: Recency, index: Index, clock: list[float]) -> None:
    used, left, young = bare(1, seed=1), bare(1, seed=2), bare(1, seed=3)
    rows = enter(recency, index, used, STRICT)
    enter(recency, index, left, STRICT)
    enter(recency, index, young)
    assert order(recency, 3) == heads([*young, *used, *left])
    clock[0] += 400
    recency.renew(rows)
    enter(recency, index, young)
    clock[0] += 300
    assert order(recency, 1) == heads(left)
    assert order(recency, 4)[-1:] == heads(used)
    clock[0] += 400
    assert order(recency, 4)[0] == left[0].key[:8]
    assert order(recency, 4)[1:3] != heads(used)


def test_a_clock_that_ran_ahead_leaves_no_priority(recency: Recency, index: Index, clock: list[float]) -> None:
    chain, old, hinted, young = chain_refs(2, seed=1), bare(2, seed=2), bare(1, seed=3), bare(1, seed=4)
    clock[0] += 365 * 86400
    rows = enter(recency, index, chain[:1], STRICT)
    rows += enter(recency, index, old, STRICT)
    rows += enter(recency, index, hinted, STRICT)
    clock[0] -= 365 * 86400
    enter(recency, index, young)
    assert order(recency, 5) == heads([*chain[:1], *old, *hinted, *young])
    recency.renew(rows[1:2])  # a use prolongs what holds, not this
    recency.hint(rows[3:], [Hint(priority=4, priority_ttl=600)])  # and a hint says what it says
    enter(recency, index, chain[1:], STRICT)  # as does a child
    assert order(recency, 6) == heads([old[1], young[0], old[0], hinted[0], *chain[::-1]])
    clock[0] += 601
    assert order(recency, 6) == heads([old[1], *hinted, *young, *old[:1], *chain[::-1]])


def test_a_clock_that_is_set_back_takes_no_priority(recency: Recency, index: Index, clock: list[float]) -> None:
    strict, long, plain = bare(1, seed=1), bare(1, seed=2), bare(1, seed=3)
    enter(recency, index, strict, STRICT)
    enter(recency, index, long, Hint(priority=math.inf, priority_ttl=1e6))
    enter(recency, index, plain)
    clock[0] -= 30
    assert order(recency, 3) == heads([*plain, *strict, *long])


def test_reuse_none_and_a_ttl_come_before_a_priority(recency: Recency, index: Index, clock: list[float]) -> None:
    dead, brief, old = bare(1, seed=1), bare(1, seed=2), bare(1, seed=3)
    enter(recency, index, old)
    rows = enter(recency, index, dead, STRICT)
    enter(recency, index, brief, Hint(priority=math.inf, ttl=5))
    assert order(recency, 3) == heads([*old, *dead, *brief])
    recency.hint(rows, [Hint(priority=math.inf, reuse="none")])
    clock[0] += 10
    assert set(order(recency, 2)) == {*heads(dead), *heads(brief)}


# ---- chains and rows


def test_what_a_block_builds_on_stays_with_it(recency: Recency, index: Index) -> None:
    chain, other = chain_refs(6, seed=1), chain_refs(3, seed=2)
    rows = enter(recency, index, chain)
    enter(recency, index, other)
    recency.hint(rows[3:4], [STRICT])
    assert order(recency, 9) == heads([chain[5], chain[4], *other[::-1], *chain[3::-1]])
    # Whoever else uses the beginning cannot take from it what is built on it.
    recency.hint(rows[:2], [Hint()] * 2)
    assert order(recency, 9) == heads([chain[5], chain[4], *other[::-1], *chain[3::-1]])


def test_a_child_that_comes_later_brings_its_priority(recency: Recency, index: Index) -> None:
    chain, other = chain_refs(4, seed=1), chain_refs(2, seed=2)
    enter(recency, index, chain[:2])
    enter(recency, index, chain[2:], STRICT)
    enter(recency, index, other)
    assert order(recency, 6) == heads([*other[::-1], *chain[::-1]])


def test_a_use_of_the_end_prolongs_the_beginning(recency: Recency, index: Index, clock: list[float]) -> None:
    chain, other = chain_refs(4, seed=1), chain_refs(2, seed=2)
    rows = enter(recency, index, chain, STRICT)
    enter(recency, index, other)
    clock[0] += 400
    recency.renew(rows[3:])
    enter(recency, index, chain_refs(1, seed=3))
    clock[0] += 400
    assert order(recency, 7)[-4:] == heads(chain[::-1])


@pytest.mark.parametrize("priority", [1, 4, math.inf])
def test_nothing_goes_before_what_builds_on_it(
    recency: Recency, index: Index, monkeypatch: pytest.MonkeyPatch, priority: float
) -> None:
    monkeypatch.setattr("kvtier.nvme.recency._FINENESS", 4)  # coarse ages, as in many rows
    dice, hint = random.Random(1), Hint(priority=priority)
    chains = [chain_refs(20, seed=seed) for seed in range(20)]
    rows: list[list[int]] = [[] for _ in chains]
    parents = {ref.key[:8]: ref.parent[:8] for refs in chains for ref in refs if ref.parent is not None}
    for _ in range(200):
        at = dice.randrange(len(chains))
        recency.renew(rows[at])
        have = len(rows[at])
        rows[at] += enter(recency, index, chains[at][have : have + 2], hint)
        live = {head for refs, mine in zip(chains, rows, strict=True) for head in heads(refs[: len(mine)])}
        children: dict[bytes, set[bytes]] = {}
        for child in live & parents.keys():
            children.setdefault(parents[child], set()).add(child)
        gone: set[bytes] = set()
        for head in order(recency, 12):
            assert children.get(head, set()) <= gone
            gone.add(head)


def test_a_block_that_is_stored_anew_has_the_priority_of_its_chain(recency: Recency, index: Index) -> None:
    chain, other = chain_refs(4, seed=1), chain_refs(2, seed=2)
    rows = enter(recency, index, chain, STRICT)
    with index.write() as ledger:
        record = ledger.get(chain[1].key)
        assert record is not None
        ledger.drop(chain[1].key, record)
        recency.forget([rows[1]], [chain[1].key])
    gone, rows[1:2] = rows[1:2], enter(recency, index, chain[1:2])
    recency.retire(gone)
    recency.renew(rows)
    enter(recency, index, other)
    assert order(recency, 6) == heads([*other[::-1], *chain[::-1]])


def test_a_new_record_does_not_inherit_its_row(recency: Recency, index: Index) -> None:
    strict, others, new = bare(1, seed=1), bare(2, seed=2), bare(1, seed=3)
    (row,) = enter(recency, index, strict, STRICT)
    with index.write() as ledger:
        record = ledger.get(strict[0].key)
        assert record is not None
        ledger.drop(strict[0].key, record)
        recency.forget([row], [strict[0].key])
    recency.retire([row])
    assert enter(recency, index, new) == [row]
    enter(recency, index, others[:1], STRICT)
    enter(recency, index, others[1:])
    assert order(recency, 3) == heads([new[0], others[1], others[0]])


def test_another_opening_sees_them_and_grows_with_them(tmp_path: Path, recency: Recency, index: Index) -> None:
    recency.finish()
    peer = Recency(tmp_path / "r", _UUID)
    enter(recency, index, bare(1, seed=1), STRICT)
    for seed in range(4):
        enter(peer, index, bare(3000, seed=seed + 10))
    late = bare(1, seed=2)
    enter(recency, index, late, STRICT)
    assert order(peer, 12_002)[-2:] == order(recency, 12_002)[-2:] == heads([*bare(1, seed=1), *late])
    recency.close()
    again = Recency(tmp_path / "r", _UUID)
    assert order(again, 12_002)[-1:] == heads(late)


def test_a_recency_file_that_is_made_anew_knows_no_priority(tmp_path: Path, recency: Recency, index: Index) -> None:
    strict = bare(1, seed=1)
    enter(recency, index, strict, STRICT)
    recency.close()
    (tmp_path / "r").write_bytes(b"")
    anew = Recency(tmp_path / "r", _UUID)
    with index.write() as ledger:
        anew.restore(ledger, list(ledger.records()))
    enter(anew, index, bare(1, seed=2), STRICT)
    enter(anew, index, bare(1, seed=3))
    assert order(anew, 1) == heads(strict)


def test_a_disk_without_room_takes_the_blocks_all_the_same(
    recency: Recency, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = bare(2, seed=1), bare(2, seed=2)
    enter(recency, index, old)

    def full(*_: int) -> None:
        raise OSError(28, "no room")

    monkeypatch.setattr(os, "posix_fallocate", full)
    enter(recency, index, old[:1], STRICT)
    enter(recency, index, new, STRICT)
    assert set(heads(new)) <= set(order(recency, 5))


def test_in_more_rows_than_a_window(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_WINDOW", 64), ("_SAMPLE", 128), ("_LEAPS", 4)):
        monkeypatch.setattr(f"kvtier.nvme.victims.{name}", value)
    recency = Recency(tmp_path / "r", _UUID)
    made = [chain_refs(16, seed=seed) for seed in range(100)]
    strict = {head for refs in made[::5] for head in heads(refs)}
    for at, refs in enumerate(made):
        enter(recency, index, refs, None if at % 5 else STRICT)
    left = {ref.key[:8]: ref for refs in made for ref in refs}
    gone: list[bytes] = []
    while left:
        victims = [victim.head for victim in recency.victims(32, (), _NOW) if victim.stamp]
        assert victims
        with index.write() as ledger:
            for head in victims:
                key = left.pop(head).key
                record = ledger.get(key)
                assert record is not None
                ledger.drop(key, record)
                recency.forget([record.row], [key])
        gone += victims
    early = [at for at, head in enumerate(gone) if head in strict and at < len(gone) - len(strict)]
    assert len(early) == 0


def test_threads_open_the_file_once_and_get_what_they_ask_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    really = os.open

    def slow(path: Path, *rest: int) -> int:
        time.sleep(0.05)  # for the others to come
        opened.append(really(path, *rest))
        return opened[-1]

    monkeypatch.setattr(os, "open", slow)
    priorities = Priorities(tmp_path / "p")
    asked = [1000, 4000, 2000, 3000]
    with ThreadPoolExecutor(len(asked)) as threads:
        got = list(threads.map(priorities.rows, asked))
    priorities.close()
    assert len(opened) == 1
    assert all(rows is not None and len(rows) >= count for rows, count in zip(got, asked, strict=True))


def test_what_comes_late_leaves_the_files_of_others_alone(tmp_path: Path) -> None:
    priorities = Priorities(tmp_path / "p")
    assert priorities.rows(10) is not None
    priorities.close()
    with (tmp_path / "other").open("w+b"):  # likely with the number of the descriptor that was closed
        assert priorities.rows(1000) is None
    priorities.close()
    assert (tmp_path / "other").stat().st_size == 0


def test_a_priority_that_is_half_written_divides_by_no_zero() -> None:
    rows = np.zeros(2, PRIORITY)
    rows["until"], rows["seconds"] = 1600, 600
    stamps = np.array([50, 60], np.uint64)
    with np.errstate(all="raise"):
        slowed = Aging(rows, 100, 1000).slowed(stamps, slice(0, 2), 0)
    assert slowed.tolist() == stamps.tolist()


def test_a_row_is_8_bytes() -> None:
    assert PRIORITY.itemsize == 8
