"""The real engine over a device whose copies are simulated: the same tokens in every order of copies and computing."""

import contextlib
from dataclasses import replace

import pytest
from kvtier_engine import connect
from tiny_model import tiny_model

from kvtier import LLM, api
from kvtier.connector import TierWorker
from kvtier.cpu import HostTier
from kvtier.engine import Engine, EngineOptions, SamplingParams
from kvtier.gpu.streams import HostStreams
from kvtier.store import TieredStore
from kvtier.testing.streams import SimulatedStreams

BLOCK, BLOCKS = 4, 14
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPTS = {str(row): [row + 1, *((11 * at) % 200 + 1 for at in range(17 + row))] for row in range(5)}


class Unfenced(TierWorker):
    """Lets a step write where copies still read."""

    def begin(self, plan):
        super().begin(replace(plan, fences=frozenset()))


class Hasty(TierWorker):
    """Says that its loads are there as soon as they are launched."""

    _loads = frozenset()

    def end(self):
        results = super().end()
        under_way = {number: job for number, job in self._jobs.items() if number in self._loads}
        for number in under_way:
            del self._jobs[number]
        return replace(results, finished=(*results.finished, *under_way))

    def begin(self, plan):
        self._loads |= plan.loads.keys()
        super().begin(plan)


@pytest.fixture(scope="module")
def loaded():
    return tiny_model()


@pytest.fixture(scope="module")
def alone(loaded):
    """Tokens of each prompt by an engine without tiers."""
    engine, tokens = Engine(loaded, EngineOptions(block_size=BLOCK, num_blocks=64)), {}
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, GREEDY)
        while engine.has_work:
            tokens |= {output.id: output.token_ids for output in engine.step()}
    return tokens


def outputs(loaded, seed, worker=TierWorker):
    """Two rounds of all prompts on a pool that holds two of them; the second loads what the first saved."""
    streams = SimulatedStreams(seed, eager=True, piece_bytes=512)
    store, tokens = TieredStore(HostTier(1 << 20)), []
    with contextlib.closing(store):
        layout = loaded.model.layout(BLOCK)
        connection = connect(store, loaded, layout, 64, recompute_gate=False)
        moving = worker(connection.worker._regions, layout, streams=lambda device: streams)
        hooks = (connection.scheduler, moving)
        engine = Engine(loaded, EngineOptions(block_size=BLOCK, num_blocks=BLOCKS, max_running=2), hooks)
        for turn in range(2):
            found = {}
            for name, prompt in PROMPTS.items():
                engine.add(f"{turn}-{name}", prompt, GREEDY)
            while engine.has_work or engine.busy:
                found |= {output.id[2:]: output.token_ids for output in engine.step()}
                streams.step()  # the device goes on, however slowly
                streams.drift()
            tokens.append(found)
            engine.clear_device_cache()
        assert store.metrics.value("loaded_bytes_total", tier="host") > 0
        moving.close()
        streams.run()
        connection.close()
    return tokens


@pytest.mark.parametrize("seed", range(4))
def test_the_tokens_are_the_same_in_every_order(loaded, alone, seed):
    assert outputs(loaded, seed) == [alone, alone]


@pytest.mark.parametrize("worker", [Unfenced, Hasty])
def test_a_worker_that_does_not_wait_shows_in_the_tokens(loaded, alone, worker):
    assert any(outputs(loaded, seed, worker) != [alone, alone] for seed in range(12))


@pytest.mark.parametrize("refused", [False, True])
def test_regions_that_cannot_be_pinned_are_counted(loaded, monkeypatch, refused):
    monkeypatch.setattr(api, "_load", lambda config: loaded)
    monkeypatch.setattr(HostStreams, "pin", lambda self, memory: not refused)
    with LLM(tiering={"host": {"capacity": "1MiB"}}, num_blocks=BLOCKS, block_size=BLOCK) as llm:
        # Host's memory, and the staging region.
        assert llm.store.metrics.value("fallbacks_total", tier="host", what="pinning") == (2 if refused else 0)
