"""Tiny models with sliding windows, prompts of several windows, their continuations by transformers, and engines."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from family_reference import VOCAB, Case, saved
from kvtier_engine import connect
from tiny_model import tiny_tokenizer
from transformers import PreTrainedModel

from kvtier.cpu import HostTier
from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.drafting import Proposer
from kvtier.engine.models import LoadedModel
from kvtier.engine.models.decoder import Decoder
from kvtier.engine.models.weights import load_weights
from kvtier.engine.rules import SchedulingRules
from kvtier.store import TieredStore

SIZE, WINDOW, TOKENS = 4, 17, 24
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
# More than a window holds at a time: its tokens, those of a step, and a block that neither begins nor ends with one.
BUDGET = 16
MOST = -(-(WINDOW + BUDGET) // SIZE) + 1


def drawn(seed: int, count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = {f"{seed}": drawn(seed, length) for seed, length in enumerate((150, 3, 71, 200, 18, 120))}


class Windowed:
    """A model, what transformers makes of prompts, and engines on it."""

    def __init__(self, directory: Path, case: Case) -> None:
        self.directory = directory
        self.reference: PreTrainedModel = saved(directory, case)
        model = Decoder(load_weights(directory), torch.float32, torch.device("cpu"))
        self.model = LoadedModel(model, model.config, tiny_tokenizer(), directory.name)
        self._expected: dict[tuple[int, ...], list[int]] = {}

    def expected(self, prompt: list[int], count: int = TOKENS) -> list[int]:
        key = tuple(prompt)
        if key not in self._expected:
            with torch.inference_mode():
                out = self.reference.generate(
                    torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
                    eos_token_id=None, pad_token_id=0, use_cache=False,
                )  # fmt: skip
            self._expected[key] = out[0, len(prompt) :].tolist()
        return self._expected[key][:count]

    def engine(
        self, blocks: int, rules: SchedulingRules | None = None, running: int = 4, proposer: Proposer | None = None
    ) -> Engine:
        return Engine(self.model, self.options(blocks, rules or SchedulingRules(), running), proposer=proposer)

    @staticmethod
    def options(blocks: int, rules: SchedulingRules, running: int = 4) -> EngineOptions:
        return EngineOptions(
            block_size=SIZE, num_blocks=blocks, max_running=running, token_budget=BUDGET, scheduling=rules
        )

    @contextlib.contextmanager
    def tiered(self, blocks: int, rules: SchedulingRules | None = None) -> Iterator[tuple[Engine, TieredStore]]:
        layout = self.model.model.layout(SIZE)
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(contextlib.closing(TieredStore(HostTier(8 << 20))))
            connection = connect(store, self.model, layout, BUDGET, recompute_gate=False)
            stack.enter_context(contextlib.closing(connection))
            hooks = (connection.scheduler, connection.worker)
            yield Engine(self.model, self.options(blocks, rules or SchedulingRules()), hooks), store


def finish(engine: Engine, *, limit: int = 3000) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    for _ in range(limit):
        if not (engine.has_work or engine.busy):
            break
        outputs |= {output.id: output for output in engine.step()}
    else:
        raise AssertionError(f"no end in sight: {engine.stats()}")
    engine._blocks.check()
    assert engine.stats().free_blocks == engine.stats().num_blocks
    return outputs


def run(engine: Engine, prompts: dict[str, list[int]], params: SamplingParams = GREEDY) -> dict[str, RequestOutput]:
    for name, prompt in prompts.items():
        engine.add(name, prompt, params)
    return finish(engine)


def agree(windowed: Windowed, outputs: dict[str, RequestOutput], prompts: dict[str, list[int]]) -> None:
    for name, prompt in prompts.items():
        assert list(outputs[name].token_ids) == windowed.expected(prompt), name


def amid_aborts(windowed: Windowed, engine: Engine, preemption: str) -> None:
    """Three lives of all prompts with an abort each, amid preemptions: what ends is what transformers says."""
    dice, done = random.Random(4), {}
    for life in range(3):
        for name, prompt in PROMPTS.items():
            engine.add(f"{life}-{name}", prompt, GREEDY)
        for _ in range(dice.randrange(40)):
            done |= {output.id: output for output in engine.step() if output.finish_reason == "length"}
        engine.abort(f"{life}-{dice.randrange(6)}")
        if life == 1:
            engine.clear_device_cache()
    done |= {name: output for name, output in finish(engine).items() if output.finish_reason == "length"}
    assert len(done) >= 15
    for name, output in done.items():
        assert list(output.token_ids) == windowed.expected(PROMPTS[name.partition("-")[2]])
    stats = engine.stats()
    assert stats.preemptions
    assert bool(stats.swaps) == (preemption == "swap")
    assert stats.hook_errors == 0
