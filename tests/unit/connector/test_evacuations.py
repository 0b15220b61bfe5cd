"""Blocks that host dropped because the device held them too are saved again when the device overwrites them."""

import contextlib
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
import torch
from connector_world import (
    BLOCK_BYTES,
    NAMESPACE,
    SIZE,
    Request,
    answer,
    holds_nothing,
    store_run,
)
from patience import until

from kvtier.connector import ConnectorOptions, TierScheduler, TierWorker
from kvtier.cpu import AttachedRegion, HostTier, StagingRegion
from kvtier.hooks import Load, Match, Step, StepSpan, TransferPlan, TransferResults
from kvtier.keys import store_keys
from kvtier.store import TieredStore

POOL, HOST, STAGING = 24, 6, 6
GARBAGE = 255


def pattern(key: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(key[:16] * (BLOCK_BYTES // 16), np.uint8).copy())


def chat(number: int) -> Request:
    return Request(f"chat {number}", [1000 * number + token for token in range(13)])


class World:
    """Both halves over a host of six blocks, and a pool whose blocks are filled by hand."""

    def __init__(self) -> None:
        self.store = TieredStore(HostTier(HOST * BLOCK_BYTES))
        self.staging = StagingRegion(BLOCK_BYTES, STAGING)
        self.half = TierScheduler(self.store, NAMESPACE, SIZE, self.staging, ConnectorOptions(copies="exclusive"))
        shares = [*self.store.host.regions(), *self.staging.regions()]
        self.worker = TierWorker({each.region: AttachedRegion(each.fd, each.nbytes, each.writable) for each in shares})
        self.pool = torch.zeros(POOL, BLOCK_BYTES, dtype=torch.uint8)
        self.worker.register_pool(self.pool)

    def plan(self, *spans: StepSpan, written: Sequence[int] = ()) -> TransferPlan:
        return self.half.plan(Step(0, spans, frozenset(written)))

    def run(self, request: Request, ids: Sequence[int]) -> TransferPlan:
        """Compute a request in one step, see its saves through, and end it."""
        plan = self.plan(StepSpan(request, tuple(ids), 0, request.num_tokens, exact=True), written=ids)
        self.worker.begin(plan)
        for block, key in zip(ids, request.chain, strict=False):
            self.pool[block] = pattern(key)
        self.half.completed(self.worker.end())
        self.settle()
        self.half.finished(request.id, "stop")
        return plan

    def overwrite(self, ids: Sequence[int]) -> TransferPlan:
        plan = self.plan(written=ids)
        self.worker.begin(plan)
        self.pool[list(ids)] = GARBAGE
        self.half.completed(self.worker.end())
        self.settle()
        return plan

    def settle(self) -> None:
        until(lambda: (self.worker.begin(self.plan()), self.half.completed(self.worker.end()), not self.half.busy)[-1])
        self.store.flush()
        self.half.completed(TransferResults())

    def load(self, request: Request, ids: Sequence[int]) -> int:
        """Load what there is of a request; how many blocks, all of them verified."""
        offer = answer(self.half, request)
        self.half.allocated(request, ids, offer.tokens)
        loaded: dict[str, tuple[int, bool]] = {}

        def pump() -> bool:
            self.worker.begin(self.plan(written=ids))
            loaded.update(self.half.completed(self.worker.end()).loaded)
            return not self.half.busy

        until(pump)
        self.half.finished(request.id, "stop")
        assert loaded == ({request.id: (offer.tokens, True)} if offer.tokens else {})
        for block, key in zip(ids, request.chain[: offer.tokens // SIZE], strict=False):
            assert torch.equal(self.pool[block], pattern(key))
        return offer.tokens // SIZE

    def in_host(self, request: Request) -> list[bool]:
        return self.store.held(store_keys(request.chain, NAMESPACE.mask()), exact=True)

    def dropped(self, reason: str) -> float:
        return self.store.metrics.value("dropped_blocks_total", tier="host", reason=reason)

    def close(self) -> None:
        self.worker.close()
        self.store.close()
        self.staging.close()


@pytest.fixture
def world() -> Iterator[World]:
    with contextlib.closing(World()) as world:
        for number in range(3):
            world.run(chat(number), range(4 * number, 4 * number + 4))
        # Host is full, and the oldest of what the device holds too has left it.
        assert [sum(world.in_host(chat(number))) for number in range(3)] == [0, 3, 3]
        yield world
        world.settle()
        assert holds_nothing(world.store)
        assert world.staging.free_slots == STAGING
        assert not world.half._saves._copying
        assert not world.half._saves._open


def test_what_host_dropped_is_found_again_after_the_device_overwrote_it(world: World) -> None:
    assert answer(world.half, chat(0)) == Match(0)
    plan = world.overwrite([0, 1, 2, 3])
    (copies,) = plan.evacuations.values()
    assert [copy.block_id for copy in copies] == [0, 1, 2]
    assert (plan.saves, plan.fences) == ({}, frozenset())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=TransferPlan) == plan
    assert store_run(world.store, chat(0)) == ("host",) * 3
    assert world.load(chat(0), range(12, 16)) == 3
    # It took the place of what the device still has.
    assert [sum(world.in_host(chat(number))) for number in range(3)] == [3, 0, 3]


def test_device_and_host_together_hold_all_that_fits_into_both(world: World) -> None:
    # Four chats of three blocks go round: a host of six blocks and a device that holds any two at a time.
    world.run(chat(3), range(12, 16))
    homes = {number: range(4 * number, 4 * number + 4) for number in range(4)}
    for number in (0, 1, 2, 3, 0, 1):
        other = (number + 1) % 4
        world.overwrite(homes[other])
        assert world.load(chat(other), homes[other]) == 3


def test_the_old_content_is_saved_when_the_same_step_writes_the_block(world: World) -> None:
    plan = world.run(chat(9), [2, 1, 0, 20])
    (copies,) = plan.evacuations.values()
    assert [copy.block_id for copy in copies] == [0, 1, 2]
    assert len(plan.saves) == 1
    assert world.load(chat(0), range(12, 16)) == 3
    assert torch.equal(world.pool[2], pattern(chat(9).chain[0]))


def test_the_old_content_is_saved_when_a_load_of_the_same_plan_writes_the_block(world: World) -> None:
    spans = world.staging.allocate(2)
    world.staging.view(spans[0])[:] = bytes([7]) * BLOCK_BYTES
    plan = world.plan(written=[0])
    ((job, copies),) = plan.evacuations.items()
    source = copies[0].span
    before = bytes(world.pool[0].numpy())
    world.worker.begin(
        TransferPlan(loads={99: (Load(spans[0], 0),)}, evacuations=plan.evacuations),
    )
    done: list[int] = []

    def pump() -> bool:
        results = world.worker.end()
        done.extend(results.finished)
        if job in results.finished:
            assert bytes(world.staging.view(source)) == before == bytes(pattern(chat(0).chain[0]).numpy())
        world.half.completed(results)
        return {job, 99} <= set(done)

    until(pump)
    assert bytes(world.pool[0].numpy()) == bytes([7]) * BLOCK_BYTES
    world.staging.free(spans)


def test_a_copy_that_fails_is_a_counted_drop(world: World) -> None:
    plan = world.plan(written=[0, 1, 2])
    ((job, _),) = plan.evacuations.items()
    world.half.completed(TransferResults(failed={job: 1}))
    world.settle()
    assert world.dropped("copy_failed") == 2
    # It is over: what the blocks hold now is nobody's.
    assert world.overwrite([0, 1, 2]).evacuations == {}


def test_when_the_worker_raises_the_copies_have_failed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: injected")

    plan = world.plan(written=[0, 1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(world.worker._engines[0], "submit", broken)
        with pytest.raises(RuntimeError, match="injected"):
            world.worker.begin(plan)
    results = world.worker.end()
    assert results.failed == dict.fromkeys(plan.evacuations, 0)
    world.half.completed(results)
    world.settle()
    assert world.dropped("copy_failed") == 3
    assert answer(world.half, chat(0)) == Match(0)


def test_what_finds_no_staging_memory_is_dropped_and_holds_up_nothing(world: World) -> None:
    taken = world.staging.allocate(STAGING - 2)
    (copies,) = world.overwrite([0, 1, 2, 3]).evacuations.values()
    assert [copy.block_id for copy in copies] == [0, 1]
    assert world.dropped("staging_full") == 1
    world.staging.free(taken)
    assert world.load(chat(0), range(12, 16)) == 2


def test_the_bytes_of_a_step_that_failed_are_never_saved(world: World) -> None:
    failing = chat(8)
    plan = world.plan(StepSpan(failing, (16, 17, 18, 19), 0, 13, exact=True), written=range(16, 20))
    world.worker.begin(TransferPlan(evacuations=plan.evacuations))
    world.pool[16:20] = GARBAGE
    world.worker.end()
    world.half.completed(TransferResults(failed=dict.fromkeys(plan.saves, 0)))
    world.half.finished(failing.id, "error")
    world.settle()
    assert world.overwrite(range(16, 20)).evacuations == {}
    assert answer(world.half, failing) == Match(0)


def test_what_the_device_still_has_is_not_saved_by_those_who_find_it_there(world: World) -> None:
    longer = Request("longer", [*chat(0).tokens[:12], *range(500, 505)])
    span = StepSpan(longer, (0, 1, 2, 16, 17), 12, 17, exact=True)
    plan = world.plan(span, written=[16, 17])
    (copies,) = plan.saves.values()
    assert [copy.block_id for copy in copies] == [16]
    world.worker.begin(plan)
    world.pool[16] = pattern(longer.chain[3])
    world.half.completed(world.worker.end())
    world.settle()
    world.half.finished(longer.id, "stop")
    # Once the device gives up all of it, all of it is found.
    world.overwrite([0, 1, 2, 16, 17])
    assert world.load(Request("again", [*longer.tokens[:16], 1]), range(18, 23)) == 4


def test_a_request_that_is_aborted_while_its_blocks_are_evacuated_changes_nothing(world: World) -> None:
    newcomer = chat(7)
    plan = world.plan(StepSpan(newcomer, (0, 1, 2, 3), 0, 13, exact=True), written=[0, 1, 2, 3])
    world.half.finished(newcomer.id, "abort")
    world.worker.begin(plan)
    world.pool[0:4] = GARBAGE
    world.half.completed(world.worker.end())
    world.settle()
    assert world.load(chat(0), range(12, 16)) == 3
