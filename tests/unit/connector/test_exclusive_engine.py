"""The bundled engine where host drops first what the device holds too: the same tokens, and more of them found."""

import contextlib

import pytest
import torch
from kvtier_engine import connect
from patience import turns
from tiny_model import tiny_model

from kvtier.connector import CopyRule, TierWorker
from kvtier.cpu import AttachedRegion, HostTier, StagingRegion
from kvtier.cpu.region import round_up
from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.models import LoadedModel
from kvtier.engine.plan import StepPlan
from kvtier.engine.runner import Runner
from kvtier.gpu.storage import DevicePool
from kvtier.gpu.table import BlockCopy
from kvtier.hooks import Save, Step, TransferPlan
from kvtier.store import TieredStore

BLOCK = 4
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
# Six conversations of ten blocks; the device holds two of them, host four.
PROMPTS = [[(11 * at + 29 * number) % 200 + 1 for at in range(36)] for number in range(6)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


def finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    for _ in turns():
        if not (engine.has_work or engine.busy):
            return outputs
        outputs |= {output.id: output for output in engine.step()}
    raise AssertionError(f"no progress: {engine.stats()}")


@pytest.fixture(scope="module")
def reference(loaded: LoadedModel) -> list[tuple[int, ...]]:
    tokens = []
    for prompt in PROMPTS:
        engine = Engine(loaded, EngineOptions(block_size=BLOCK, num_blocks=64))
        engine.add("r", prompt, GREEDY)
        tokens.append(finish(engine)["r"].token_ids)
    return tokens


def reuse(loaded: LoadedModel, reference: list[tuple[int, ...]], copies: CopyRule) -> tuple[int, int]:
    """Tokens found and blocks evacuated while all conversations are asked for in turn, three times."""
    layout = loaded.model.layout(BLOCK)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(TieredStore(HostTier(40 * round_up(layout.block_bytes())))))
        connection = connect(store, loaded, layout, 64, recompute_gate=False, copies=copies)
        stack.callback(connection.close)
        plans: list[TransferPlan] = []
        planned = connection.scheduler.plan

        def plan(step: Step) -> TransferPlan:
            plans.append(planned(step))
            return plans[-1]

        connection.scheduler.plan = plan  # type: ignore[method-assign]
        slots = connection.staging[0].free_slots
        options = EngineOptions(block_size=BLOCK, num_blocks=22)
        engine = Engine(loaded, options, (connection.scheduler, connection.worker))
        found = 0
        for turn in range(3):
            for number, prompt in enumerate(PROMPTS):
                engine.add(f"{turn}/{number}", prompt, GREEDY)
                output = finish(engine)[f"{turn}/{number}"]
                store.flush()
                assert output.token_ids == reference[number]
                found += output.metrics.cached_tokens + output.metrics.loaded_tokens
        # And all at once: they preempt each other.
        for number, prompt in enumerate(PROMPTS):
            engine.add(f"all/{number}", prompt, GREEDY)
        outputs = finish(engine)
        assert [outputs[f"all/{number}"].token_ids for number in range(len(PROMPTS))] == reference
        assert engine.stats().free_blocks == 22
        assert connection.staging[0].free_slots == slots
        host = store.stats()["host"]
        assert host["leases"] == host["reservations"] == 0
        return found, sum(len(copies) for plan in plans for copies in plan.evacuations.values())


def test_exclusive_tiers_find_more_and_change_no_token(loaded: LoadedModel, reference: list[tuple[int, ...]]) -> None:
    inclusive, exclusive = (reuse(loaded, reference, copies) for copies in ("inclusive", "exclusive"))
    assert inclusive[1] == 0
    assert exclusive[1] > 0
    # 60 blocks go round: more than host's 40, not more than host's and the device's together.
    assert exclusive[0] > inclusive[0] + 200


def test_a_copied_block_does_not_overwrite_what_is_evacuated(loaded: LoadedModel) -> None:
    layout = loaded.model.layout(BLOCK)
    pool = DevicePool(layout, 4, loaded.model.device)
    rows = pool.as_bytes()
    rows[1], rows[2] = 7, 5
    with contextlib.closing(StagingRegion(layout.block_bytes(), 1)) as staging:
        share = staging.regions()[0]
        worker = TierWorker({share.region: AttachedRegion(share.fd, share.nbytes, share.writable)}, layout)
        with contextlib.closing(worker):
            runner = Runner(loaded.model, pool, frozenset(), worker)
            (span,) = staging.allocate(1)
            transfers = TransferPlan(evacuations={5: (Save(2, span),)})
            runner.begin(StepPlan(Step(0, (), frozenset({2})), (), (), (BlockCopy(1, 2),), transfers))
            assert torch.equal(rows[2], rows[1])
            assert bytes(staging.view(span)) == bytes([5]) * layout.block_bytes()
            assert runner.end(transfers).finished == (5,)
