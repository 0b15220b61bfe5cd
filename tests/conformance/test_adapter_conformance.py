"""The reference adapter passes the public suite, and adapters with a planted bug fail it where they should."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from kvtier_engine import Connection, connect
from patience import PATIENCE
from tiny_model import tiny_model
from torch import Tensor

from kvtier.engine import Engine, EngineOptions, SamplingParams
from kvtier.engine.core import kv_layout
from kvtier.engine.options import KvFormat
from kvtier.engine.rules import SchedulingRules
from kvtier.gpu.coded import encode_rows
from kvtier.gpu.kernels.rows import Code
from kvtier.hooks import Completed, Match, Pending, RequestView, Step, TransferPlan, TransferResults
from kvtier.testing import AdapterSetup, AdapterSuite

SIZE = 4
SETTLE_SECONDS = 1.0
MODEL = tiny_model()
# What it attends to decides what it says.
MODEL.model.layers = [(2 * q, 2 * k, 2 * v, 4 * out) for q, k, v, out in MODEL.model.layers]
LAYOUT = MODEL.model.layout(SIZE)

Tokens = tuple[int, ...]
Sabotage = Callable[[Connection, Engine], None]


class TieredEngine:
    """Implements `AdapterEngine` with the bundled engine; `sabotage` plants a bug in it."""

    def __init__(
        self,
        setup: AdapterSetup,
        rules: SchedulingRules | None = None,
        sabotage: Sabotage | None = None,
        kv_format: KvFormat = "raw",
    ) -> None:
        self._store = setup.store
        self._params = SamplingParams(temperature=0.0, ignore_eos=True, accept_lossy=setup.accept_lossy)
        options = EngineOptions(
            block_size=SIZE,
            num_blocks=setup.device_blocks,
            token_budget=48,
            kv_format=kv_format,
            scheduling=rules or SchedulingRules(),
        )
        layout = kv_layout(MODEL, options)
        self._connection = connect(
            setup.store, MODEL, layout, options.token_budget, salt=setup.salt, recompute_gate=False
        )
        self._engine = Engine(MODEL, options, (self._connection.scheduler, self._connection.worker))
        # Some planted bugs keep it from ever coming to rest.
        self._patience = PATIENCE if sabotage is None else SETTLE_SECONDS
        if sabotage is not None:
            sabotage(self._connection, self._engine)
        self._numbers = count()

    def _add(self, prompts: Sequence[Tokens], max_tokens: int) -> list[str]:
        names = [f"r{next(self._numbers)}" for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add(name, prompt, replace(self._params, max_tokens=max_tokens))
        return names

    def _finish(self) -> dict[str, Tokens]:
        found: dict[str, Tokens] = {}
        deadline = time.monotonic() + self._patience
        while self._engine.has_work or (self._engine.busy and time.monotonic() < deadline):
            found |= {output.id: output.token_ids for output in self._engine.step()}
        return found

    def generate(self, prompts: Sequence[Tokens], max_tokens: int) -> list[Tokens]:
        names = self._add(prompts, max_tokens)
        found = self._finish()
        return [found[name] for name in names]

    def abort(self, prompts: Sequence[Tokens], max_tokens: int, steps: int) -> None:
        names = self._add(prompts, max_tokens)
        for _ in range(steps):
            self._engine.step()
        for name in names:
            self._engine.abort(name)
        self._finish()

    def forget(self) -> None:
        self._engine.clear_device_cache()

    def loaded_tokens(self) -> int:
        return self._engine.stats().loaded_tokens

    def loaded_bytes(self) -> Mapping[str, int]:
        metrics = self._store.metrics
        return {tier.name: int(metrics.value("loaded_bytes_total", tier=tier.name)) for tier in self._store.tiers}

    def preemptions(self) -> int:
        return self._engine.stats().preemptions

    def close(self) -> None:
        self._connection.close()


class _Dense:
    """Attention over the whole sequence, by the definition."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


ANSWERS: dict[tuple[str, Tokens, int], Tokens] = {}


class TestEngineAdapter(AdapterSuite):
    block_tokens = SIZE
    block_bytes = LAYOUT.block_bytes()
    token_ids = range(1, MODEL.config.vocab)
    rules = SchedulingRules()
    sabotage: Sabotage | None = None
    kv_format: KvFormat = "raw"
    attention = _Dense()

    def make_engine(self, setup: AdapterSetup) -> TieredEngine:
        return TieredEngine(setup, self.rules, self.sabotage, self.kv_format)

    def reference(self, prompt: Tokens, max_tokens: int) -> Tokens:
        asked = (self.kv_format, prompt, max_tokens)
        if asked not in ANSWERS:
            tokens = list(prompt)
            for _ in range(max_tokens):
                ids = torch.tensor(tokens)
                logits = MODEL.model.forward(ids, torch.arange(len(ids)), self.attention, torch.tensor([len(ids) - 1]))
                tokens.append(int(logits[0].argmax()))
            ANSWERS[asked] = tuple(tokens[len(prompt) :])
        return ANSWERS[asked]


class TestPipelinedEngineAdapter(TestEngineAdapter):
    rules = SchedulingRules(pipelined=True)


class _DenseCoded(_Dense):
    """The same over K and V as an int8 pool holds them."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().__call__(layer, q, _rounded(k), _rounded(v))


def _rounded(x: Tensor) -> Tensor:
    codes, scales = encode_rows(x.flatten(0, 1), Code.INT8)
    return (codes.view(torch.int8) * scales.float()).view(x.shape)


class TestCodedEngineAdapter(TestEngineAdapter):
    block_bytes = kv_layout(MODEL, EngineOptions(block_size=SIZE, kv_format="int8")).block_bytes()
    kv_format = "int8"
    lossy_format = None
    attention = _DenseCoded()


# ---- planted bugs: methods that do something else


def loads_nothing_but_claims_it(connection: Connection, engine: Engine) -> None:
    worker, skipped = connection.worker, []
    begin, end = worker.begin, worker.end

    def lie(plan: TransferPlan) -> None:
        skipped.extend(plan.loads)
        begin(replace(plan, loads={}, overlapped=frozenset()))

    def report() -> TransferResults:
        results, jobs = end(), tuple(skipped)
        skipped.clear()
        return replace(results, finished=results.finished + jobs, seconds=results.seconds | dict.fromkeys(jobs, 0.0))

    worker.begin, worker.end = lie, report


def loads_a_token_too_many(connection: Connection, engine: Engine) -> None:
    """Goes on behind the token that it should compute first; its count of loaded tokens is right."""
    end_load = engine._scheduler._end_load

    def further(loading: Any, tokens: int, *, exact: bool) -> None:
        end_load(loading, tokens, exact=exact)
        request = loading.request
        if tokens < request.num_tokens - 1:
            request.blocks.extend(tokens + 1, tokens)
            request.num_computed = request.reach = tokens + 1

    engine._scheduler._end_load = further


def has_no_fence(connection: Connection, engine: Engine) -> None:
    """Saves leave two steps late, and nobody waits for them."""
    worker, late = connection.worker, []
    begin, end = worker.begin, worker.end

    def lax(plan: TransferPlan) -> None:
        late.append(plan.saves)
        due = late.pop(0) if len(late) > 2 else {}
        begin(replace(plan, saves=due, fences=frozenset()))

    worker.begin, worker.end = lax, end


def swaps_blocks(connection: Connection, engine: Engine) -> None:
    worker = connection.worker
    begin = worker.begin

    def turned(plan: TransferPlan) -> None:
        loads = {}
        for job, copies in plan.loads.items():
            ids = [load.block_id for load in reversed(copies)]
            loads[job] = tuple(load._replace(block_id=block) for load, block in zip(copies, ids, strict=True))
        begin(replace(plan, loads=loads))

    worker.begin = turned


def ignores_failed_loads(connection: Connection, engine: Engine) -> None:
    scheduler = connection.scheduler
    allocated, completed, promised = scheduler.allocated, scheduler.completed, {}

    def taken(request: RequestView, block_ids: Sequence[int], tokens: int) -> None:
        first = scheduler._loading[request.id].first if tokens else 0
        promised[request.id] = first * SIZE + tokens
        allocated(request, block_ids, tokens)

    def fine(results: TransferResults) -> Completed:
        found = completed(results)
        return replace(
            found,
            failed=frozenset(),
            loaded={name: (promised[name], exact) for name, (_, exact) in found.loaded.items()},
        )

    scheduler.allocated, scheduler.completed = taken, fine


def forgets_those_who_left(connection: Connection, engine: Engine) -> None:
    connection.scheduler.finished = lambda request_id, reason: False


def takes_all_for_exact(connection: Connection, engine: Engine) -> None:
    scheduler = connection.scheduler
    plan, completed = scheduler.plan, scheduler.completed

    def exact(step: Step) -> TransferPlan:
        return plan(replace(step, spans=tuple(span._replace(exact=True) for span in step.spans)))

    def loaded(results: TransferResults) -> Completed:
        found = completed(results)
        return replace(found, loaded={name: (tokens, True) for name, (tokens, _) in found.loaded.items()})

    scheduler.plan, scheduler.completed = exact, loaded


def asks_a_tier_itself(connection: Connection, engine: Engine) -> None:
    scheduler, nvme = connection.scheduler, connection.scheduler._store.tiers[1]
    match = scheduler.match

    def patient(request: RequestView, device_tokens: int) -> Match | Pending:
        nvme.contains([b"key".ljust(16)]).wait()
        return match(request, device_tokens)

    scheduler.match = patient


BUGS: dict[Sabotage, str] = {
    loads_nothing_but_claims_it: "test_found_in_host",
    loads_a_token_too_many: "test_found_in_host",
    swaps_blocks: "test_blocks_lie_where_they_belong",
    has_no_fence: "test_blocks_that_are_used_again_were_saved_before",
    ignores_failed_loads: "test_a_load_that_fails_half_way_is_computed_from_there",
    forgets_those_who_left: "test_aborts_leave_nothing_held",
    takes_all_for_exact: "test_lossy_blocks_only_for_those_who_ask",
    asks_a_tier_itself: "test_a_hanging_tier_stalls_nobody",
}


@pytest.mark.parametrize(("bug", "test"), BUGS.items(), ids=[bug.__name__ for bug in BUGS])
def test_a_planted_bug_is_found(bug: Sabotage, test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite: Any = TestEngineAdapter()
    monkeypatch.setattr(suite, "sabotage", bug)
    monkeypatch.setattr(suite, "settle_seconds", 0.5)
    monkeypatch.setattr(suite, "stall_seconds", 2.0)
    with pytest.raises(AssertionError):
        getattr(suite, test)(tmp_path)
