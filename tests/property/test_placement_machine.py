"""Write rules over a host tier that evicts: what is in no tier any more was counted as dropped, block by block."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from store_world import BLOCK, fetched, held, items, keys, memory_tier, nothing_is_held

from kvtier.cpu import HostTier
from kvtier.hints import Hint
from kvtier.store import StoreOptions, TieredStore

HOST_BLOCKS, CHAINS, DEPTH = 20, 5, 7
REASONS = ("evicted_before_write", "queue_full", "not_admitted", "refused", "not_written")

chains = st.integers(0, CHAINS - 1)


class PlacementMachine(RuleBasedStateMachine):
    rule_name = "through"
    budget: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.below = memory_tier(1024)
        options = StoreOptions(write_rule=self.rule_name, write_budget=self.budget, writeback_bytes=8 * BLOCK)
        self.store = TieredStore(HostTier(HOST_BLOCKS * BLOCK), [self.below], options=options, clock=lambda: self.now)
        self.stored: set[bytes] = set()
        self.refused = 0

    def dropped(self) -> float:
        return sum(self.store.metrics.value("dropped_blocks_total", tier="below", reason=reason) for reason in REASONS)

    @rule(chain=chains, stop=st.integers(1, DEPTH), reuse=st.sampled_from(["unknown", "likely", "none"]))
    def put(self, chain: int, stop: int, reuse: str) -> None:
        result = self.store.put(items(chain, stop), [Hint(reuse=reuse)] * stop).result(30)
        self.refused += result.dropped
        self.stored.update(keys(chain, stop))

    @rule(chain=chains)
    def load(self, chain: int) -> None:
        found = len(self.store.match(keys(chain, DEPTH)).tiers)
        assert fetched(self.store, keys(chain, DEPTH)) <= DEPTH
        assert found <= DEPTH

    @rule()
    def time_passes(self) -> None:
        self.now += 600.0

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @invariant()
    def what_is_lost_was_counted(self) -> None:
        # At rest: nothing is on its way, and no look at the coldest is under way.
        self.store.flush()
        everything = sorted(self.stored)
        places = zip(held(self.store.host, everything), held(self.below, everything), strict=True)
        lost = sum(not any(place) for place in places)
        assert lost <= self.dropped() + self.refused

    def teardown(self) -> None:
        self.store.flush()
        assert nothing_is_held(self.store)
        self.store.host.check()
        self.store.close()


class LeaveMachine(PlacementMachine):
    rule_name = "leave"

    @invariant()
    def a_parent_goes_down_before_its_child(self) -> None:
        for chain in range(CHAINS):
            below = held(self.below, keys(chain, DEPTH))
            assert below == sorted(below, reverse=True)


class SecondTouchMachine(PlacementMachine):
    rule_name = "second_touch"


class BudgetMachine(PlacementMachine):
    rule_name = "leave"
    budget = 24 * 6 * BLOCK


TestThrough = PlacementMachine.TestCase
TestLeave = LeaveMachine.TestCase
TestSecondTouch = SecondTouchMachine.TestCase
TestBudget = BudgetMachine.TestCase
TestThrough.settings = TestLeave.settings = TestSecondTouch.settings = TestBudget.settings = settings(
    max_examples=12, stateful_step_count=25
)
