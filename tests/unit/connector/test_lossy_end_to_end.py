"""A lossy lower tier under the engine: who takes its KV, and what becomes of KV computed from it."""

import contextlib
from collections.abc import Iterator

import pytest
from kvtier_engine import Connection, connect, namespace_of
from tiny_model import tiny_model

from kvtier.cpu import HostTier
from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.models import LoadedModel
from kvtier.keys import Chain, store_keys
from kvtier.store import StoreOptions, TieredStore

PROMPT = [(7 * at) % 200 + 1 for at in range(41)]
LONGER = [*PROMPT, *((11 * at) % 200 + 1 for at in range(40))]
STRICT = SamplingParams(max_tokens=6, ignore_eos=True, accept_lossy=False)
LOSSY = SamplingParams(max_tokens=6, ignore_eos=True, accept_lossy=True)


class Stack:
    """Tiny model, engine, connector, and a host tier above one that stores int8."""

    def __init__(self, loaded: LoadedModel) -> None:
        options = StoreOptions(accept_lossy=True, formats={"lossy": "int8"})
        self.store = TieredStore(HostTier(1 << 20), [HostTier(1 << 20, name="lossy")], options=options)
        layout = loaded.model.layout(4)
        self.connection: Connection = connect(self.store, loaded, layout, 64, recompute_gate=False)
        hooks = (self.connection.scheduler, self.connection.worker)
        self.engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=64), hooks)
        self._mask = namespace_of(loaded, layout).mask()
        self._numbers = iter(range(1000))

    def run(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        name = str(next(self._numbers))
        self.engine.add(name, prompt, params)
        last: RequestOutput | None = None
        while self.engine.has_work or self.engine.busy:
            for output in self.engine.step():
                last = output
        assert last is not None
        assert last.id == name
        self.store.flush()
        return last

    def forget(self, *, host: bool) -> None:
        self.engine.clear_device_cache()
        if host:
            self.store.clear("host")

    def blocks(self, prompt: list[int], *, lossy: bool) -> int:
        chain = Chain(4)
        chain.extend(prompt)
        return len(self.store.match(store_keys(chain.keys, self._mask), lossy=lossy).tiers)

    def close(self) -> None:
        self.connection.close()
        stats = self.store.stats()
        assert all(stats[tier.name]["leases"] == 0 for tier in self.store.tiers)
        self.store.close()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@pytest.fixture
def stack(loaded: LoadedModel) -> Iterator[Stack]:
    with contextlib.closing(Stack(loaded)) as stack:
        yield stack


def test_only_those_who_opt_in_get_lossy_kv(stack: Stack) -> None:
    cold = stack.run(PROMPT, STRICT)
    stack.forget(host=True)
    assert (stack.blocks(PROMPT, lossy=True), stack.blocks(PROMPT, lossy=False)) == (10, 0)
    strict = stack.run(PROMPT, STRICT)
    assert strict.token_ids == cold.token_ids
    assert (strict.metrics.loaded_tokens, strict.metrics.cached_tokens) == (0, 0)
    stack.forget(host=True)
    lossy = stack.run(PROMPT, LOSSY)
    assert lossy.metrics.loaded_tokens == 40
    # Who does not say gets what the store is set to; the engine's own index has exact blocks only, for those.
    stack.forget(host=True)
    assert stack.run(PROMPT, SamplingParams(max_tokens=1)).metrics.loaded_tokens == 40


def test_lossy_kv_stays_lossy_on_the_device_and_in_host(stack: Stack) -> None:
    cold = stack.run(PROMPT, STRICT)
    stack.forget(host=True)
    stack.run(PROMPT, LOSSY)
    again = stack.run(PROMPT, LOSSY)
    assert (again.metrics.cached_tokens, again.metrics.loaded_tokens) == (40, 0)
    # Neither the device's copies nor those that were promoted into host are for a strict request.
    strict = stack.run(PROMPT, STRICT)
    assert (strict.metrics.cached_tokens, strict.metrics.loaded_tokens) == (0, 0)
    assert strict.token_ids == cold.token_ids
    # What it computed took the place of the lossy copies, on the device and in host.
    assert stack.run(PROMPT, STRICT).metrics.cached_tokens == 40
    stack.forget(host=False)
    exact = stack.run(PROMPT, STRICT)
    assert (exact.metrics.loaded_tokens, exact.token_ids) == (40, cold.token_ids)


def test_kv_computed_on_top_of_lossy_kv_is_not_exact(stack: Stack) -> None:
    reference = stack.run(LONGER, STRICT)
    stack.store.clear()
    stack.forget(host=True)
    stack.run(PROMPT, STRICT)
    stack.forget(host=True)
    mixed = stack.run(LONGER, LOSSY)
    assert mixed.metrics.loaded_tokens == 40
    assert stack.blocks(LONGER, lossy=True) == 20
    # Beyond the prefix everything was computed here, in float32, and yet nothing of it is exact.
    assert stack.blocks(LONGER, lossy=False) == 0
    strict = stack.run(LONGER, STRICT)
    assert (strict.metrics.cached_tokens, strict.metrics.loaded_tokens) == (0, 0)
    assert strict.token_ids == reference.token_ids
    assert stack.blocks(LONGER, lossy=False) == 20
