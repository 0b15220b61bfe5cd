"""The worker half alone: formats decoded into device blocks, and copies that cannot be made."""

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvtier import formats
from kvtier.connector import TierWorker
from kvtier.cpu import AttachedRegion, StagingRegion
from kvtier.errors import LeaseError
from kvtier.hooks import Load, Save, TransferPlan, TransferResults
from kvtier.layout import GroupKind, LayerGroup, Layout, Span

LAYOUT = Layout(16, (LayerGroup(GroupKind.GQA, (0, 1), 2, 2, 64),))
BYTES = LAYOUT.block_bytes()


@pytest.fixture
def region() -> Iterator[StagingRegion]:
    with contextlib.closing(StagingRegion(2 * BYTES, 8)) as region:
        yield region


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.zeros(6, BYTES, dtype=torch.uint8)


@pytest.fixture
def worker(region: StagingRegion, pool: torch.Tensor) -> Iterator[TierWorker]:
    share = region.regions()[0]
    regions = {share.region: AttachedRegion(share.fd, share.nbytes, share.writable)}
    with contextlib.closing(TierWorker(regions, LAYOUT)) as worker:
        worker.register_pool(pool)
        yield worker


def results_of(worker: TierWorker, *jobs: int) -> TransferResults:
    finished: tuple[int, ...] = ()
    failed: dict[int, int] = {}
    seconds: dict[int, float] = {}
    deadline = time.monotonic() + 10
    while not set(jobs) <= {*finished, *failed}:
        assert time.monotonic() < deadline
        results = worker.end()
        finished += results.finished
        failed |= results.failed
        seconds |= results.seconds
    return TransferResults(finished, failed, seconds)


def raw(seed: int) -> memoryview:
    values = np.random.default_rng(seed).standard_normal(BYTES // 4, np.float32)
    return memoryview(values.view(np.uint8))


def encoded(fmt: str, seed: int, span: Span, region: StagingRegion) -> Load:
    memory = region.view(span)
    used = formats.get(fmt).encode(raw(seed), LAYOUT, memory)
    return Load(span._replace(nbytes=used), seed, fmt)


@pytest.mark.parametrize("fmt", ["int8", "int8r", "fp8", "k8v4", "int4r", "bitsplit"])
def test_blocks_are_decoded_on_their_way_into_the_device(
    worker: TierWorker, region: StagingRegion, pool: torch.Tensor, fmt: str
) -> None:
    # As a tier stores them: the first block in the format's sink, a raw one among them.
    spans = region.allocate(3)
    sink = formats.choose(fmt, 0).id
    plain = spans[1]._replace(nbytes=BYTES)
    region.view(plain)[:] = raw(1)
    loads = (encoded(sink, 0, spans[0], region), Load(plain, 1), encoded(fmt, 2, spans[2], region))
    worker.begin(TransferPlan(loads={7: loads}))
    results = results_of(worker, 7)
    assert results.finished == (7,)
    assert results.seconds[7] > 0
    for load in loads:
        expected = memoryview(bytearray(BYTES))
        formats.get(load.fmt).decode(region.view(load.span), LAYOUT, expected)
        assert pool[load.block_id].numpy().tobytes() == expected.tobytes()
        error = np.abs(np.frombuffer(expected, np.float32) - np.frombuffer(raw(load.block_id), np.float32)).max()
        assert error < 1.0


def test_a_block_that_cannot_be_decoded_ends_the_job_there(
    worker: TierWorker, region: StagingRegion, pool: torch.Tensor
) -> None:
    loads = [encoded("int8", seed, span, region) for seed, span in enumerate(region.allocate(4))]
    region.view(loads[2].span)[:64] = bytes(64)
    worker.begin(TransferPlan(loads={1: tuple(loads)}))
    assert results_of(worker, 1).failed == {1: 2}
    assert pool[1].any()
    assert not pool[2:].any()


def test_what_cannot_be_started_is_reported_failed_and_holds_up_nothing(
    worker: TierWorker, region: StagingRegion, pool: torch.Tensor
) -> None:
    spans = [span._replace(nbytes=BYTES) for span in region.allocate(3)]
    pool[3] = 9
    plan = TransferPlan(
        loads={
            1: (Load(Span(10**6, 0, BYTES), 1),),  # a region that this worker does not map
            2: (Load(spans[0]._replace(offset=1 << 40), 1),),
            3: (Load(spans[0], 1, "no such format"),),
            4: (Load(spans[1], 1),),
        },
        saves={5: (Save(3, spans[2]),), 6: (Save(3, Span(10**6, 0, BYTES)),)},
    )
    worker.begin(plan)
    results = results_of(worker, 1, 2, 3, 4, 5, 6)
    assert set(results.finished) == {4, 5}
    assert results.failed == {1: 0, 2: 0, 3: 0, 6: 0}
    assert bytes(region.view(spans[2])) == bytes([9]) * BYTES


def test_when_begin_raises_every_load_is_reported_all_the_same(
    worker: TierWorker, region: StagingRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = [span._replace(nbytes=BYTES) for span in region.allocate(3)]
    submit = worker._engines[0].submit
    calls = iter(range(3))

    def fails_once(*arguments: object) -> object:
        if next(calls) == 1:
            raise RuntimeError("CUDA error: injected")
        return submit(*arguments)

    monkeypatch.setattr(worker._engines[0], "submit", fails_once)
    with pytest.raises(RuntimeError, match="injected"):
        worker.begin(TransferPlan(loads={number: (Load(span, number),) for number, span in enumerate(spans)}))
    results = results_of(worker, 0, 1, 2)
    assert (results.finished, results.failed) == ((0,), {1: 0, 2: 0})


def test_without_a_pool_or_a_layout_loads_fail(region: StagingRegion) -> None:
    share = region.regions()[0]
    regions = {share.region: AttachedRegion(share.fd, share.nbytes, share.writable)}
    worker = TierWorker(regions)
    span = region.allocate(1)[0]._replace(nbytes=BYTES)
    worker.begin(TransferPlan(loads={1: (Load(span, 0),)}))
    assert results_of(worker, 1).failed == {1: 0}
    worker.register_pool(torch.zeros(2, BYTES, dtype=torch.uint8))
    worker.begin(TransferPlan(loads={2: (Load(span, 0, "int8"),), 3: (Load(span, 0),)}))
    results = results_of(worker, 2, 3)
    assert (results.finished, results.failed) == ((3,), {2: 0})
    with pytest.raises(LeaseError, match="registered already"):
        worker.register_pool(torch.zeros(2, BYTES, dtype=torch.uint8))
    worker.close()
    worker.begin(TransferPlan(loads={4: (Load(span, 0),)}))
    assert results_of(worker, 4).failed == {4: 0}


# ---- loads that the forward follows layer by layer


def test_an_overlapped_load_is_there_layer_by_layer_whatever_its_format(
    worker: TierWorker, region: StagingRegion, pool: torch.Tensor
) -> None:
    spans = region.allocate(3)
    plain = spans[1]._replace(nbytes=BYTES)
    region.view(plain)[:] = raw(1)
    loads = (encoded("int8", 0, spans[0], region), Load(plain, 1), encoded("bitsplit", 2, spans[2], region))
    worker.begin(TransferPlan(loads={7: loads}, overlapped=frozenset({7})))
    expected = {}
    for load in loads:
        expected[load.block_id] = memoryview(bytearray(BYTES))
        formats.get(load.fmt).decode(region.view(load.span), LAYOUT, expected[load.block_id])
    for layer in range(2):
        worker.wait_layer(layer)
        part = slice(layer * BYTES // 2, (layer + 1) * BYTES // 2)
        for block, data in expected.items():
            assert pool[block, part].numpy().tobytes() == data[part].tobytes()
    results = worker.end()
    assert (results.finished, results.failed) == ((7,), {})
    assert results.seconds[7] > 0


def test_an_overlapped_load_that_cannot_be_decoded_half_way_fails_and_holds_up_nothing(
    worker: TierWorker, region: StagingRegion, pool: torch.Tensor
) -> None:
    loads = [encoded("int8", seed, span, region) for seed, span in enumerate(region.allocate(4))]
    region.view(loads[2].span)[:64] = bytes(64)
    worker.begin(TransferPlan(loads={1: tuple(loads)}, overlapped=frozenset({1})))
    worker.wait_layer(0)
    worker.wait_layer(1)
    results = worker.end()
    assert (results.finished, results.failed) == ((), {1: 2})
    assert pool[1].any()
    assert not pool[2:].any()


def test_every_overlapped_load_is_reported_by_its_own_step(
    worker: TierWorker, region: StagingRegion, pool: torch.Tensor
) -> None:
    spans = [span._replace(nbytes=BYTES) for span in region.allocate(6)]
    for step in range(20):
        for at, span in enumerate(spans):
            region.view(span)[:] = bytes([step + at]) * BYTES
        plan = TransferPlan(
            loads={at: (Load(span, at),) for at, span in enumerate(spans)}, overlapped=frozenset({0, 1, 2, 3, 4, 5})
        )
        worker.begin(plan)
        worker.wait_layer(0)
        worker.wait_layer(1)
        assert [int(row[0]) for row in pool] == [int(row[-1]) for row in pool] == list(range(step, step + 6))
        assert set(worker.end().finished) == set(range(6))


def test_layers_of_blocks_in_an_order_of_their_own_arrive_together(region: StagingRegion) -> None:
    group = LayerGroup(GroupKind.GQA, (0, 1), 2, 2, 64, order="opaque:engine/1")
    share = region.regions()[0]
    regions = {share.region: AttachedRegion(share.fd, share.nbytes, share.writable)}
    pool = torch.zeros(2, BYTES, dtype=torch.uint8)
    span = region.allocate(1)[0]._replace(nbytes=BYTES)
    region.view(span)[:] = raw(1)
    with contextlib.closing(TierWorker(regions, Layout(16, (group,)))) as worker:
        worker.register_pool(pool)
        worker.begin(TransferPlan(loads={1: (Load(span, 1),)}, overlapped=frozenset({1})))
        worker.wait_layer(0)
        assert pool[1].numpy().tobytes() == raw(1).tobytes()
        worker.wait_layer(1)
        assert worker.end().finished == (1,)


def test_each_layer_group_has_gates_of_its_own(region: StagingRegion) -> None:
    groups = (LayerGroup(GroupKind.GQA, (0, 2), 2, 2, 64), LayerGroup(GroupKind.GQA, (1,), 2, 2, 64))
    layout = Layout(16, groups)
    share = region.regions()[0]
    regions = {share.region: AttachedRegion(share.fd, share.nbytes, share.writable)}
    pools = [torch.zeros(2, layout.block_bytes(group), dtype=torch.uint8) for group in range(2)]
    spans = [span._replace(nbytes=layout.block_bytes(at)) for at, span in enumerate(region.allocate(2))]
    for at, span in enumerate(spans):
        region.view(span)[:] = bytes([at + 1]) * span.nbytes
    with contextlib.closing(TierWorker(regions, layout)) as worker:
        worker.register_pool(*pools)
        loads = (Load(spans[0], 1, part=0), Load(spans[1], 1, part=1))
        worker.begin(TransferPlan(loads={1: loads}, overlapped=frozenset({1})))
        half = layout.block_bytes(0) // 2
        worker.wait_layer(0)
        assert pools[0][1, :half].eq(1).all()
        worker.wait_layer(1)
        assert pools[1][1].eq(2).all()
        worker.wait_layer(2)
        assert pools[0][1].eq(1).all()
        assert worker.end().finished == (1,)
