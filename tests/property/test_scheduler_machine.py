"""The scheduler under random rules, requests, forks, guesses, swaps, loads, failures, aborts and a tiny pool.

Right outputs, no leak, progress. As a script, more of the same: `test_scheduler_machine.py --examples 2000`.
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scheduler_device import VOCAB, continuation, digest
from scheduler_world import RandomFate, Stored, World

from kvtier.engine.request import State
from kvtier.engine.rules import SchedulingRules
from kvtier.gpu.windows import most_blocks

# Prompts are beginnings of these, so that requests share prefixes of every length.
TEXTS = ([*range(24)], [*range(9), *range(30, 45)], [7] * 24)
RULES = st.builds(
    SchedulingRules,
    order=st.sampled_from(["fcfs", "priority", "slack", "longest_prefix"]),
    victims=st.sampled_from(["fifo", "class", "slack", "cost"]),
    preemption=st.sampled_from(["auto", "swap", "swap", "recompute"]),
    ageing=st.sampled_from([1.0, 20.0]),
    watermark=st.sampled_from([0.0, 0.01, 0.3]),
    residency=st.sampled_from([0, 4, 16]),
    prefetch_ahead=st.integers(0, 2),
    pipelined=st.booleans(),
    overlap_loads=st.booleans(),
)
PROMPTS = st.builds(lambda text, length: text[:length], st.sampled_from(TEXTS), st.integers(1, 24))


class SchedulerMachine(RuleBasedStateMachine):
    examples = compared = 0

    @initialize(
        seed=st.integers(0, 2**32),
        blocks=st.integers(4, 14),
        running=st.integers(1, 4),
        budget=st.integers(1, 20),
        hook=st.sampled_from([True, True, True, False]),
        rules=RULES,
        window=st.sampled_from([None, None, 1, 3, 4, 9]),
        slots=st.sampled_from([None, None, 0, 2, 20]),
        stops=st.sampled_from([(), range(4)]),
    )
    def start(
        self,
        seed: int,
        blocks: int,
        running: int,
        budget: int,
        hook: bool,
        rules: SchedulingRules,
        window: int | None,
        slots: int | None,
        stops: range,
    ) -> None:
        # Delays and failures have a generator of their own: drawn one by one, they would nearly all be zero.
        fate = RandomFate(seed) if hook else None
        sizes = {"num_blocks": blocks, "max_running": running, "token_budget": budget}
        # Of a mixed model: more slots than the least that any request needs.
        mixed = 0 if slots is None or window is None else slots + most_blocks(blocks * 4, 1, 4, window)
        self.world = World(**sizes, fate=fate, rules=rules, window=window, slots=mixed, stops=stops)
        self.numbers = 0

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 12), lossy=st.booleans(), priority=st.integers(0, 2))
    def add(self, prompt: list[int], max_tokens: int, lossy: bool, priority: int = 0) -> None:
        room = self.world.pool.num_blocks * self.world.pool.block_size
        self.numbers += 1
        name = f"{'lossy' if lossy else 'exact'}-{self.numbers}"
        self.world.add(name, prompt[: room - 1], max_tokens, priority=priority, ttft_target=10.0 * priority or None)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @precondition(lambda self: 0 < len(self.world.live) < 8)
    @rule(data=st.data(), max_tokens=st.integers(1, 8), width=st.sampled_from([0, 2]))
    def fork(self, data: st.DataObject, max_tokens: int, width: int = 0) -> None:
        parent = self.world.live[data.draw(st.sampled_from(sorted(self.world.live)))]
        if parent.num_tokens < self.world.pool.num_blocks * self.world.pool.block_size:
            self.numbers += 1
            self.world.fork(parent, f"{parent.id[:5]}-fork-{self.numbers}", max_tokens, beam_width=width)

    @rule(right=st.integers(0, 3), count=st.integers(1, 4))
    def guess(self, right: int, count: int) -> None:
        """Drafts for all that decode, of which the first ones are right."""
        for request in [request for request in self.world.live.values() if request.state is State.RUNNING]:
            device = self.world.device
            drafts = continuation(request.tokens, count, device.window, device.mixed)
            self.world.draft(request, [*drafts[:right], *((token + 1) % VOCAB for token in drafts[right:])])
        self.world.step()

    @rule(number=st.integers(0, 3))
    def preempt(self, number: int) -> None:
        """As if the device were full."""
        self.world.preempt(number)

    @precondition(lambda self: 0 < len(self.world.live) < 8)
    @rule(data=st.data(), number=st.integers(0, 3))
    def fork_and_preempt(self, data: st.DataObject, number: int) -> None:
        """Whoever was to copy the tail that both share loses its blocks before it did."""
        self.fork(data, 6)
        self.world.preempt(number)

    @precondition(lambda self: not self.world.pipelined)
    @rule()
    def failing_step(self) -> None:
        self.world.step(fails=True)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.live))))

    @precondition(lambda self: self.world.connector is not None)
    @rule(prompt=PROMPTS)
    def abort_load_and_go_on(self, prompt: list[int]) -> None:
        """Blocks that a copy still writes to must not be given to the next request."""
        for request in [request for request in self.world.live.values() if request.state is State.LOADING]:
            self.world.abort(request.id)
            self.add(prompt[::-1], 4, lossy=False)
        self.world.step()

    @rule()
    def abort_unknown(self) -> None:
        self.world.abort("nobody")

    @rule()
    def clear_device(self) -> None:
        self.world.pool.forget()

    @rule(prompt=PROMPTS, lossy=st.booleans())
    def reload(self, prompt: list[int], lossy: bool) -> None:
        """Come to rest, lose the device's cache, and ask for a prefix that may lie in the store."""
        self.world.drain()
        self.world.pool.forget()
        self.add(prompt, 2, lossy)

    @precondition(lambda self: self.world.connector is not None and self.world.connector.store)
    @rule(data=st.data())
    def make_lossy(self, data: st.DataObject) -> None:
        """A tier replaced a block's bytes by an approximation that no request has been promised yet."""
        connector = self.world.connector
        promised = {key for offer in connector.offers.values() for key in offer.keys}
        for key in data.draw(st.sets(st.sampled_from(sorted(connector.store)), min_size=1)) - promised:
            connector.store[key] = Stored([digest([value, 1]) for value in connector.store[key].content], exact=False)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "world"):
            self.world.check()
            self.world.check_outputs()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            self.world.at_rest()
            self.world.check_outputs()
            assert self.world.indices == list(range(len(self.world.indices)))
            SchedulerMachine.examples += 1
            SchedulerMachine.compared += sum(not name.startswith("lossy") for name in self.world.outputs)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=2000, help="each of up to 40 rules")
    chosen = parser.parse_args()
    longer = settings(TestSchedulerMachine.settings, max_examples=chosen.examples, deadline=None)
    # Ends with the smallest example that goes wrong, and how to repeat it.
    run_state_machine_as_test(SchedulerMachine, settings=longer)
    print(f"examples {SchedulerMachine.examples}, requests compared {SchedulerMachine.compared}, wrong 0")


if __name__ == "__main__":
    main()
