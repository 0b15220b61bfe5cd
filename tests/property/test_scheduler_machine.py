"""The scheduler under random requests, loads, failures, aborts and a tiny pool: right outputs, no leak, progress."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_world import RandomFate, Stored, World, digest

from kvtier.engine.request import State

# Prompts are beginnings of these, so that requests share prefixes of every length.
TEXTS = ([*range(24)], [*range(9), *range(30, 45)], [7] * 24)
PROMPTS = st.builds(lambda text, length: text[:length], st.sampled_from(TEXTS), st.integers(1, 24))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 2**32),
        blocks=st.integers(4, 14),
        running=st.integers(1, 4),
        budget=st.integers(1, 20),
        hook=st.sampled_from([True, True, True, False]),
    )
    def start(self, seed: int, blocks: int, running: int, budget: int, hook: bool) -> None:
        # Delays and failures have a generator of their own: drawn one by one, they would nearly all be zero.
        fate = RandomFate(seed) if hook else None
        self.world = World(num_blocks=blocks, max_running=running, token_budget=budget, fate=fate)
        self.numbers = 0

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 12), lossy=st.booleans())
    def add(self, prompt: list[int], max_tokens: int, lossy: bool) -> None:
        room = self.world.pool.num_blocks * self.world.pool.block_size
        self.numbers += 1
        self.world.add(f"{'lossy' if lossy else 'exact'}-{self.numbers}", prompt[: room - 1], max_tokens)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

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
            self.world.check()
            self.world.check_outputs()
            assert self.world.pool.used_blocks == 0
            assert self.world.indices == list(range(len(self.world.indices)))


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
