"""Everything at once on tiny pools and budgets: every request gets the output that it would have had alone.

As a script, more of the same: `test_engine_interleavings.py --lives 1000 [--seed 1000]`; of five, one is mixed, one
windowed, and one's pool coded.
"""

import argparse
import contextlib
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from kvtier_engine import connect
from patience import turns
from tiny_model import TinyModel, tiny_model

from kvtier.cpu import HostTier
from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.core import kv_layout
from kvtier.engine.draft_model import DraftModel
from kvtier.engine.drafting import PromptLookup, Proposer
from kvtier.engine.models import LoadedModel
from kvtier.engine.options import KvFormat
from kvtier.engine.outputs import TokenLogprobs
from kvtier.engine.rules import SchedulingRules
from kvtier.engine.sparse import Sparse
from kvtier.gpu.mixed import MixedBlockPool
from kvtier.store import TieredStore

BLOCK = 4
ONE = [(7 * at) % 200 + 1 for at in range(60)]
TEXTS = (ONE, [1, 2, 3, 4] * 15, [*ONE[:20], *((5 * at) % 100 + 3 for at in range(40))])


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def mixed() -> LoadedModel:
    """One layer keeps everything, the other one a window."""
    return tiny_model((None, 6))


@pytest.fixture(scope="module")
def windowed() -> LoadedModel:
    """Both layers keep a window."""
    return tiny_model((6, 6))


def some_params(dice: random.Random) -> SamplingParams:
    """Beams, parallel samples, limits, penalties, biases, log-probabilities, sparsity that changes nothing."""
    most = dice.choice([1, 2, 3, 6, 12, 20])
    common = {
        "max_tokens": most, "ignore_eos": dice.random() < 0.7, "priority": dice.randrange(3), "seed": dice.randrange(4),
        "min_tokens": min(most, dice.choice([0, 0, 0, 3])),
        "stop_token_ids": frozenset(dice.sample(range(257), dice.choice([0, 0, 40]))),
        "repetition_penalty": dice.choice([1.0, 1.0, 1.0, 1.3]),
        "logit_bias": dice.choice([{}, {}, {40: 3.0, 41: -100.0}]),
        "tpot_target": dice.choice([None, None, 1e-6, 1.0]), "ttft_target": dice.choice([None, 1e-6, 1.0]),
    }  # fmt: skip
    if dice.random() < 0.3:
        width = dice.randint(1, 5)
        penalty = dice.choice([-1.0, 0.0, 1.0, 2.0])
        return SamplingParams(**common, beam_width=width, n=dice.randint(1, width), length_penalty=penalty)
    sparse = dice.choice([None, None, None, Sparse(dice.choice(["streaming", "h2o", "quest"]), 1.0)])
    return SamplingParams(
        **common,
        n=dice.choice([1, 1, 2, 4]),
        temperature=dice.choice([0.0, 0.5, 1.5]),
        top_k=dice.choice([0, 20]),
        top_p=dice.choice([1.0, 0.8]),
        min_p=dice.choice([0.0, 0.05]),
        frequency_penalty=dice.choice([0.0, 0.0, 0.0, 0.3]),
        logprobs=dice.choice([None, 0, 3]),
        prompt_logprobs=dice.choice([None, None, 0, 2]),
        speculate=dice.random() < 0.9,
        stop=dice.choice([(), (), ("e", "xy")]),
        sparse=sparse,
    )


def some_rules(dice: random.Random, *, pipelined: bool) -> SchedulingRules:
    return SchedulingRules(
        order=dice.choice(["fcfs", "priority", "slack", "longest_prefix"]),
        victims=dice.choice(["fifo", "class", "slack", "cost"]),
        preemption=dice.choice(["auto", "swap", "swap", "recompute"]),
        watermark=dice.choice([0.0, 0.01, 0.3]),
        residency=dice.choice([0, 4, 16]),
        prefetch_ahead=dice.choice([0, 4]),
        pipelined=pipelined,
        overlap_loads=dice.random() < 0.5,
    )


class Life:
    """One engine, everything that was asked of it and what became of it."""

    def __init__(
        self, loaded: LoadedModel, dice: random.Random, stack: contextlib.ExitStack, kv_format: KvFormat
    ) -> None:
        self.model = loaded
        self.dice = dice
        pipelined = dice.random() < 0.3
        makers: tuple[partial[Proposer | None], ...] = (
            partial(lambda: None), partial(PromptLookup), partial(DraftModel, loaded.model, 1 << 20, BLOCK, 32),
        )  # fmt: skip
        blocks = dice.choice([8, 10, 14, 20, 40])
        self.options = EngineOptions(
            block_size=BLOCK,
            num_blocks=blocks,
            max_running=dice.choice([1, 2, 4, 8]),
            token_budget=dice.choice([1, 2, 3, 7, 16, 64]),
            max_model_len=min(blocks * BLOCK, 70),
            draft_tokens=dice.choice([1, 3, 8]),
            scheduling=some_rules(dice, pipelined=pipelined),
            kv_format=kv_format,
        )
        hooks = None
        if dice.random() < 0.7:
            store = stack.enter_context(contextlib.closing(TieredStore(HostTier(dice.choice([1 << 16, 1 << 20])))))
            layout = kv_layout(loaded, self.options)
            connection = connect(store, loaded, layout, self.options.token_budget, recompute_gate=dice.random() < 0.3)
            stack.enter_context(contextlib.closing(connection))
            hooks = (connection.scheduler, connection.worker)
        proposer = None if pipelined else dice.choice(makers)()
        self.engine = Engine(loaded, self.options, hooks, proposer)
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.cut: set[str] = set()
        self.outputs: dict[tuple[str, int], RequestOutput] = {}

    def add(self) -> None:
        name = f"r{len(self.asked)}"
        text = self.dice.choice(TEXTS)
        length = self.dice.randint(1, min(len(text), self.engine.max_model_len - 1))
        params = some_params(self.dice)
        if self.model.config.windows or self.options.kv_format != "raw":
            params = replace(params, sparse=None)  # what is attended to is the model's affair, or the pool's
        self.asked[name] = text[:length], params
        self.engine.add(name, *self.asked[name])

    def step(self) -> None:
        for output in self.engine.step():
            earlier = self.outputs.get((output.id, output.index))
            assert earlier is None or earlier.finish_reason is None, f"{output.id} went on after its end"
            self.outputs[output.id, output.index] = output
        self.engine._blocks.check()

    def abort(self) -> None:
        name = self.dice.choice(sorted(self.asked))
        if self.engine.abort(name):
            self.cut.add(name)

    def ended(self) -> None:
        pool = self.engine._blocks
        assert pool.used_blocks == 0
        if isinstance(pool, MixedBlockPool):
            assert pool.used_slots == 0

    def fail(self) -> None:
        """Steps that compute anything do; pipelined ones tell with the next."""
        assert isinstance(self.model.model, TinyModel)
        before = set(self.engine._live)
        self.model.model.fails = True
        try:
            for _ in range(2):
                with contextlib.suppress(RuntimeError):
                    self.step()
        finally:
            self.model.model.fails = False
        with contextlib.suppress(RuntimeError):
            self.step()
        ended = Counter(name for (name, _), output in self.outputs.items() if output.finish_reason is not None)
        # Of those that are gone, who has not got all of its sequences.
        self.cut |= {name for name in before - set(self.engine._live) if ended[name] < self.asked[name][1].n}

    def live(self) -> None:
        for _ in range(self.dice.randint(10, 40)):
            roll = self.dice.random()
            if (roll < 0.3 and len(self.asked) < 10) or not self.asked:
                self.add()
            elif roll < 0.9:
                self.step()
            elif roll < 0.95:
                self.abort()
            elif roll < 0.97:
                self.engine.clear_device_cache()
            else:
                self.fail()
        for _ in turns():
            if not (self.engine.has_work or self.engine.busy):
                return
            self.step()
        raise AssertionError(f"no end in sight: {self.engine.stats()}")


def alone(
    loaded: LoadedModel, prompt: list[int], params: SamplingParams, options: EngineOptions, limit: int
) -> Iterator[RequestOutput]:
    options = EngineOptions(
        block_size=BLOCK, num_blocks=400, max_model_len=limit, max_running=64, kv_format=options.kv_format
    )
    engine = Engine(loaded, options)
    engine.add("alone", prompt, params)
    while engine.has_work:
        yield from (output for output in engine.step() if output.finish_reason is not None)


def scores(entries: Sequence[TokenLogprobs | None] | None) -> list[float] | None:
    """Of tokens, and of the likeliest beside each: how likely, not which, since two may be alike."""
    if entries is None:
        return None
    known = [entry for entry in entries if entry is not None]
    return [value for entry in known for value in (entry.logprob, *(score for _, score in entry.top))]


@pytest.mark.parametrize("seed", range(24))
def test_every_output_is_the_undisturbed_one(loaded: LoadedModel, seed: int) -> None:
    check(loaded, seed)


@pytest.mark.parametrize("seed", range(100, 112))
def test_every_output_of_a_mixed_model_is_the_undisturbed_one(mixed: LoadedModel, seed: int) -> None:
    check(mixed, seed)


@pytest.mark.parametrize("seed", range(200, 208))
def test_every_output_of_a_windowed_model_is_the_undisturbed_one(windowed: LoadedModel, seed: int) -> None:
    check(windowed, seed)


@pytest.mark.parametrize("seed", range(300, 308))
def test_every_output_over_a_coded_pool_is_the_undisturbed_one(loaded: LoadedModel, seed: int) -> None:
    check(loaded, seed, "int8")


def check(loaded: LoadedModel, seed: int, kv_format: KvFormat = "raw") -> int:
    """One engine's life; how many requests were compared."""
    with contextlib.ExitStack() as stack:
        life = Life(loaded, random.Random(seed), stack, kv_format)
        life.live()
        life.ended()
        assert life.engine.stats().free_blocks == life.options.num_blocks
        assert not life.engine._sequences
        for name, (prompt, params) in life.asked.items():
            if name in life.cut:
                continue
            for expected in alone(loaded, prompt, params, life.options, life.engine.max_model_len):
                output = life.outputs[name, expected.index]
                assert (output.token_ids, output.text, output.finish_reason) == (
                    expected.token_ids, expected.text, expected.finish_reason,
                ), (name, params)  # fmt: skip
                for found, wanted in ((output.logprobs, expected.logprobs),
                                      (output.prompt_logprobs, expected.prompt_logprobs)):  # fmt: skip
                    assert scores(found) == pytest.approx(scores(wanted), abs=1e-2), (name, params)
        return len(life.asked.keys() - life.cut)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=1000, help="engines, each with up to ten requests")
    parser.add_argument("--seed", type=int, default=1000, help="of the first one; each has the next")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    models = [tiny_model(), tiny_model((None, 6)), tiny_model(), tiny_model((6, 6)), tiny_model()]
    formats: list[KvFormat] = ["raw", "raw", "raw", "raw", "int8"]
    compared, wrong = 0, []
    for seed in range(chosen.seed, chosen.seed + chosen.lives):
        try:
            compared += check(models[seed % 5], seed, formats[seed % 5])
        except Exception:  # noqa: BLE001 - the next life may be right
            traceback.print_exc()
            wrong.append(seed)
    print(f"lives {chosen.lives}, requests compared {compared}, wrong lives {len(wrong)}: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
