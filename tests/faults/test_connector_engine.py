"""The engine on a connector whose tiers fail: the right tokens all the same, every block freed once, no idle engine."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest
from kvtier_engine import Connection, connect, namespace_of
from patience import turns
from tiny_model import tiny_model

from kvtier.cpu import HostTier
from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.models import LoadedModel
from kvtier.keys import Chain, store_keys
from kvtier.store import TieredStore
from kvtier.tiers import Handle, Status, Ticket

BLOCK = 4
PROMPT = [(7 * at) % 200 + 1 for at in range(41)]
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


class Below(HostTier):
    """A tier in memory whose reads go wrong from the record of depth `bad` on."""

    def __init__(self) -> None:
        super().__init__(1 << 20, name="below")
        self.bad: int | None = None
        self.reads = 0

    def read(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        self.reads += 1
        statuses = super().read(items, deadline).wait().statuses
        if self.bad is None:
            return Ticket().finish(statuses)
        bad = self.bad
        return Ticket().finish(
            [
                status if handle.ref.depth < bad else Status.CORRUPT
                for (handle, _), status in zip(items, statuses, strict=True)
            ]
        )


class Stack:
    """Tiny model, engine, connector, host and a tier below."""

    def __init__(self, loaded: LoadedModel, **options: int) -> None:
        self.below = Below()
        self.store = TieredStore(HostTier(1 << 20), [self.below])
        layout = loaded.model.layout(BLOCK)
        self.connection: Connection = connect(self.store, loaded, layout, 64, recompute_gate=False)
        hooks = (self.connection.scheduler, self.connection.worker)
        chosen = EngineOptions(**{"block_size": BLOCK, "num_blocks": 64} | options)
        self.engine = Engine(loaded, chosen, hooks)
        self._mask = namespace_of(loaded, layout).mask()
        self._slots = self.connection.staging[0].free_slots

    def run(self, prompts: dict[str, list[int]]) -> dict[str, RequestOutput]:
        for name, prompt in prompts.items():
            self.engine.add(name, prompt, GREEDY)
        return self.drain()

    def drain(self) -> dict[str, RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        for _ in turns():
            if not (self.engine.has_work or self.engine.busy):
                self.store.flush()
                return outputs
            outputs |= {output.id: output for output in self.engine.step()}
        raise AssertionError(f"no progress: {self.engine.stats()}")

    def only_below(self) -> None:
        self.engine.clear_device_cache()
        self.store.clear("host")

    def stored(self, prompt: list[int]) -> int:
        chain = Chain(BLOCK)
        chain.extend(prompt)
        return len(self.store.match(store_keys(chain.keys, self._mask)).tiers)

    def close(self) -> None:
        assert self.engine.stats().free_blocks == self.engine.stats().num_blocks
        assert self.connection.staging[0].free_slots == self._slots
        stats = self.store.stats()
        assert all(stats[tier][what] == 0 for tier in ("host", "below") for what in ("leases", "reservations"))
        self.connection.close()
        self.store.close()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@pytest.fixture
def stack(loaded: LoadedModel) -> Iterator[Stack]:
    with contextlib.closing(Stack(loaded)) as stack:
        yield stack


@pytest.fixture(scope="module")
def reference(loaded: LoadedModel) -> tuple[int, ...]:
    engine = Engine(loaded, EngineOptions(block_size=BLOCK, num_blocks=64))
    engine.add("r", PROMPT, GREEDY)
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs[-1].token_ids


def test_many_equal_requests_make_one_load(stack: Stack, reference: tuple[int, ...]) -> None:
    stack.run({"first": PROMPT})
    stack.only_below()
    outputs = stack.run({f"r{number}": PROMPT for number in range(6)})
    assert {output.token_ids for output in outputs.values()} == {reference}
    assert sum(output.metrics.loaded_tokens for output in outputs.values()) == 40
    assert stack.below.reads == 1


@pytest.mark.parametrize("bad", [0, 1, 6, 9])
def test_sharers_of_failed_blocks_get_the_right_tokens(stack: Stack, reference: tuple[int, ...], bad: int) -> None:
    stack.run({"first": PROMPT})
    stack.only_below()
    stack.below.bad = bad
    outputs = stack.run({"owner": PROMPT, "sharer": PROMPT, "other": [*PROMPT[:30], 5]})
    assert outputs["owner"].token_ids == outputs["sharer"].token_ids == reference
    # Whichever came first, be it the one that shares only seven blocks, loaded or computed a block, and the others had
    # it from there: but for the one token each that has to be computed, nothing was computed or loaded twice.
    metrics = [output.metrics for output in outputs.values()]
    assert sum(each.loaded_tokens for each in metrics) == bad * BLOCK
    own = len([*PROMPT[:30], 5]) - 7 * BLOCK
    assert sum(each.computed_tokens for each in metrics) == len(PROMPT) - bad * BLOCK + 1 + own


def test_a_failing_load_of_the_only_request_wakes_the_engine(stack: Stack, reference: tuple[int, ...]) -> None:
    stack.run({"first": PROMPT})
    for number in range(3):
        stack.only_below()
        stack.below.bad = 0
        output = stack.run({f"r{number}": PROMPT})[f"r{number}"]
        assert (output.token_ids, output.metrics.loaded_tokens) == (reference, 0)


@pytest.mark.parametrize("budget", [1, 3, 8, 16, 17, 64])
def test_any_split_of_a_prefill_stores_the_same_blocks(loaded: LoadedModel, budget: int) -> None:
    with contextlib.closing(Stack(loaded, token_budget=budget)) as stack:
        output = stack.run({"r": PROMPT})["r"]
        # The last token's KV was never computed: nobody asked for the one after it.
        assert stack.stored([*PROMPT, *output.token_ids]) == (len(PROMPT) + 5) // BLOCK


@pytest.mark.parametrize("length", range(1, 2 * BLOCK + 2))
def test_every_length_around_a_block_edge_is_loaded_but_for_its_last_token(stack: Stack, length: int) -> None:
    cold = stack.run({"cold": PROMPT[:length]})["cold"]
    stack.only_below()
    warm = stack.run({"warm": PROMPT[:length]})["warm"]
    assert warm.token_ids == cold.token_ids
    assert warm.metrics.loaded_tokens == (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("steps", range(8))
def test_abort_at_any_step_of_a_load_frees_everything_once(
    stack: Stack, reference: tuple[int, ...], steps: int
) -> None:
    stack.run({"first": PROMPT})
    stack.only_below()
    stack.engine.add("gone", PROMPT, GREEDY)
    stack.engine.add("stays", PROMPT, GREEDY)
    for _ in range(steps):
        stack.engine.step()
    stack.engine.abort("gone")
    assert stack.engine.abort("gone") == []
    assert stack.drain()["stays"].token_ids == reference


def test_abort_before_a_request_was_ever_scheduled(stack: Stack) -> None:
    stack.engine.add("never", PROMPT, GREEDY)
    assert stack.engine.abort("never")
    assert stack.engine.abort("never") == []
    assert stack.drain() == {}
    assert stack.run({"next": PROMPT})["next"].finish_reason == "length"


def test_preempted_requests_come_back_through_the_tiers(loaded: LoadedModel) -> None:
    prompts = {str(at): [at + 1, *PROMPT[:17]] for at in range(5)}
    alone = {}
    for name, prompt in prompts.items():
        with contextlib.closing(Stack(loaded)) as stack:
            alone[name] = stack.run({name: prompt})[name].token_ids
    with contextlib.closing(Stack(loaded, num_blocks=12)) as stack:
        outputs = stack.run(prompts)
        assert {name: output.token_ids for name, output in outputs.items()} == alone


def test_a_worker_that_raises_leaves_no_request_loading(
    stack: Stack, reference: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.run({"first": PROMPT})
    stack.only_below()
    engine = stack.connection.worker._engines[0]
    submit, failures = engine.submit, iter([True])

    def fails_once(*arguments: object) -> object:
        if next(failures, False):
            raise RuntimeError("CUDA error: injected")
        return submit(*arguments)

    monkeypatch.setattr(engine, "submit", fails_once)
    stack.engine.add("r", PROMPT, GREEDY)
    with pytest.raises(RuntimeError, match="injected"):
        stack.drain()
    output = stack.drain()["r"]
    assert (output.token_ids, output.metrics.loaded_tokens) == (reference, 0)
