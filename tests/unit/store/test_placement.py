"""When blocks go to the lower tier: write rules, budget, and what was too late."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest
from store_world import BLOCK, FarTier, fetched, held, items, keys, memory_tier, nothing_is_held

from kvtier.cpu import HostTier
from kvtier.errors import ConfigError
from kvtier.hints import Hint
from kvtier.store import StoreOptions, TieredStore


@contextlib.contextmanager
def opened(host_blocks: int, **options: object) -> Iterator[tuple[TieredStore, HostTier]]:
    below = memory_tier(512)
    now = options.pop("now", [0.0])
    store = TieredStore(HostTier(host_blocks * BLOCK), [below], options=StoreOptions(**options), clock=lambda: now[0])
    with contextlib.closing(store):
        yield store, below
        store.flush()
        assert nothing_is_held(store)


def dropped(store: TieredStore, reason: str) -> float:
    return store.metrics.value("dropped_blocks_total", tier="below", reason=reason)


def test_through_writes_at_once() -> None:
    with opened(32) as (store, below):
        store.put(items("a", 8)).result()
        store.flush()
        assert all(held(below, keys("a", 8)))
        assert store.write_rule == "through"
        assert store.metrics.value("write_rule", rule="through") == 1
        assert below._metrics.value("written_bytes_total", tier="below") == 8 * BLOCK


def test_leave_writes_nothing_while_host_has_room_and_all_of_it_before_it_goes() -> None:
    with opened(64, write_rule="leave") as (store, below):
        for chain in range(14):
            store.put(items(chain, 4)).result()
            store.flush()
        assert below.stats()["blocks"] == 0
        for chain in range(14, 50):
            store.put(items(chain, 4)).result()
            store.flush()
        evicted = store.stats()["host"]["evicted"]
        # What is hot and in host was not written: less than everything.
        assert 100 < evicted <= below.stats()["blocks"] < 40 * 4
        # What is promoted pushes others out, which are written before they go as well.
        for chain in range(50):
            assert fetched(store, keys(chain, 4)) == 4
            store.flush()
        assert dropped(store, "evicted_before_write") == 0
        assert below.stats()["blocks"] == 50 * 4


class Even:
    """An admission policy of one's own: every other block that it is asked about."""

    def __init__(self) -> None:
        self.asked = 0

    def admit(self, keys: Sequence[bytes], nbytes: Sequence[int], hints: Sequence[Hint]) -> list[bool]:
        assert len(keys) == len(nbytes) == len(hints)
        self.asked += len(keys)
        return [key[0] % 2 == 0 for key in keys]


def test_an_admission_policy_of_ones_own_decides_and_descendants_of_what_it_refuses_stay() -> None:
    policy = Even()
    with opened(64, write_rule="second_touch", admission=policy) as (store, below):
        for chain in range(8):
            store.put(items(chain, 3)).result()
        store.flush()
        assert policy.asked == 8 * 3
        for chain in range(8):
            named = keys(chain, 3)
            refused = next((depth for depth, key in enumerate(named) if key[0] % 2), 3)
            assert held(below, named) == [depth < refused for depth in range(3)]


def test_a_budget_that_runs_ahead_asks_that_policy_as_well() -> None:
    # An hour's share is one block.
    with opened(64, write_budget=24 * BLOCK, admission=Even()) as (store, below):
        store.put(items("first", 2)).result()
        for chain in range(8):
            store.put(items(chain, 3)).result()
        store.flush()
        assert all(held(below, keys("first", 2)))
        for chain in range(8):
            named = keys(chain, 3)
            refused = next((depth for depth, key in enumerate(named) if key[0] % 2), 3)
            assert held(below, named) == [depth < refused for depth in range(3)]


def test_leave_writes_parents_before_their_children() -> None:
    with opened(32, write_rule="leave") as (store, below):
        store.put(items("a", 30)).result()
        store.flush()
        written = held(below, keys("a", 30))
        assert any(written)
        assert written == sorted(written, reverse=True)


def test_leave_counts_what_went_too_fast() -> None:
    with opened(32, write_rule="leave", writeback_bytes=4 * BLOCK) as (store, below):
        refused = sum(store.put(items(chain, 24)).result().dropped for chain in range(10))
        store.flush()
        here: list[bool] = []
        for chain in range(10):
            found = zip(held(below, keys(chain, 24)), held(store.host, keys(chain, 24)), strict=True)
            here += [any(places) for places in found]
        lost = here.count(False) - refused
        assert lost > 0
        assert dropped(store, "evicted_before_write") == lost


def test_a_demotion_is_no_use_of_the_block() -> None:
    with opened(64, write_rule="leave") as (store, _):
        store.put(items("old", 8)).result()
        for chain in range(16):
            store.put(items(chain, 4)).result()
            store.flush()
        # Written down, and still the first to leave.
        assert not any(held(store.host, keys("old", 8)))


def test_second_touch_writes_what_comes_twice() -> None:
    with opened(64, write_rule="second_touch") as (store, below):
        store.put(items("once", 8)).result()
        store.put(items("twice", 8)).result()
        store.put(items("likely", 8), [Hint(reuse="likely")] * 8).result()
        store.put(items("dead", 8), [Hint(reuse="none")] * 8).result()
        store.flush()
        assert all(held(below, keys("likely", 8)))
        assert below.stats()["blocks"] == 8
        assert dropped(store, "not_admitted") == 24
        # A hit is a touch, and so is another put.
        assert fetched(store, keys("twice", 8)[:4]) == 4
        store.flush()
        assert held(below, keys("twice", 8)) == [True] * 4 + [False] * 4
        store.put(items("twice", 8)).result()
        store.put(items("dead", 8), [Hint(reuse="none")] * 8).result()
        store.flush()
        assert all(held(below, keys("twice", 8)))
        assert not any(held(below, keys("dead", 8)))
        assert not any(held(below, keys("once", 8)))


def test_a_budget_that_runs_out_tightens_the_rule_until_time_has_passed() -> None:
    now = [0.0]
    # An hour's share is eight blocks.
    with opened(256, write_budget=24 * 8 * BLOCK, now=now) as (store, below):
        for chain in range(10):
            store.put(items(chain, 4)).result()
        store.flush()
        assert store.write_rule == "second_touch"
        assert store.metrics.value("write_rule", rule="second_touch") == 1
        loose = below.stats()["blocks"]
        assert 8 <= loose <= 16
        store.put(items(9, 4)).result()
        store.flush()
        assert all(held(below, keys(9, 4)))
        now[0] += 6 * 3600.0
        store.put(items("later", 4)).result()
        store.flush()
        assert all(held(below, keys("later", 4)))
        assert store.write_rule == "through"


def test_what_goes_to_a_remote_tier_does_not_count_against_the_budget() -> None:
    # An hour's share is 8 blocks: more than that ahead, and the rule tightens.
    options = StoreOptions(write_budget=24 * 8 * BLOCK)
    far = FarTier()
    with contextlib.closing(TieredStore(HostTier(64 * BLOCK), [memory_tier(64), far], options=options)) as store:
        for _ in range(3):
            store.put(items("a", 8)).result()
            store.flush()
        assert all(held(far, keys("a", 8)))
        assert store.write_rule == "through"
        store.put(items("b", 1)).result()
        assert store.write_rule == "second_touch"


def test_what_the_queue_dropped_is_written_when_it_is_used_again() -> None:
    with opened(64, writeback_bytes=2 * BLOCK) as (store, below):
        gate = below.write
        store.put(items("a", 8)).result()
        store.flush()
        assert dropped(store, "queue_full") >= 4
        assert not all(held(below, keys("a", 8)))
        below.write = gate
        for _ in range(8):
            assert fetched(store, keys("a", 8)) == 8
            store.flush()
        assert all(held(below, keys("a", 8)))


def test_a_block_larger_than_the_queue_goes_down_when_nothing_waits() -> None:
    with opened(16, writeback_bytes=1) as (store, below):
        store.put(items("a", 1)).result()
        store.flush()
        assert below.stats()["blocks"] == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"write_rule": "sometimes"}, "write_rule 'sometimes': expected one of through, leave, second_touch"),
        ({"load_deadline": 0.0}, "load_deadline = 0.0: expected more than 0"),
        ({"write_budget": 0}, "write_budget = 0: expected more than 0"),
        ({"staging_bytes": -1}, "staging_bytes = -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        StoreOptions(**options)
