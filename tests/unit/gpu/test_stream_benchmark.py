"""The checks that `benchmarks/gpu.py` makes on a GPU, on simulated streams: they pass, and they can fail."""

import sys
from pathlib import Path

import pytest
import torch
from stream_world import forgetting

from kvtier.gpu.streams import HostStreams
from kvtier.testing.streams import SimulatedStreams

BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")
CPU = torch.device("cpu")


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_copies
    import gpu_engine
    from harness import Report

    yield gpu_copies, gpu_engine, Report(None)
    for name in ("gpu_copies", "gpu_engine", "harness"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("seed", range(3))
def test_copies_are_right_in_every_order(benchmarks, seed):
    streams = SimulatedStreams(seed, eager=True, piece_bytes=512)
    assert not any(benchmarks[0].check_copies(streams, CPU, 1024).values())


def test_copies_are_right_on_host_memory(benchmarks):
    wrong = benchmarks[0].check_copies(HostStreams(), CPU, 4096)
    assert set(wrong) == {"to_host", "to_device", "decoded", "layers", "order", "registered", "pageable"}
    assert not any(wrong.values())


@pytest.mark.parametrize(
    ("edge", "shows"),
    [
        ("a batch waits for its arrival", "to_host"),
        ("a bounce block waits for its copy", "decoded"),
        ("a layer is waited for", "layers"),
    ],
)
def test_a_missing_edge_is_wrong_bytes(benchmarks, edge, shows):
    with forgetting(edge):
        streams = SimulatedStreams(1, eager=True, drift=0)
        assert benchmarks[0].check_copies(streams, CPU, 1024)[shows]


def test_equal_devices_give_equal_tokens_and_ties_are_told_from_errors(benchmarks):
    _, engine, report = benchmarks
    assert engine.check_identical(report, CPU)
    clear, tie = torch.tensor([[3.0, 1.0]]), torch.tensor([[3.0, 2.9995]])
    assert engine._compare([[0, 0, 0]], [[0, 1, 1]], [clear, clear, clear]) == (0.5, 0)
    assert engine._compare([[0, 0, 0]], [[0, 1, 1]], [clear, tie, clear]) == (1.0, 1)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu
    from harness import Report

    yield gpu, Report(None)
    for name in ("gpu", "gpu_copies", "benchmark_work", "harness"):
        sys.modules.pop(name, None)


def test_a_section_that_takes_its_process_with_it_costs_no_other_its_figures(gpu):
    import benchmark_work as work

    module, report = gpu
    assert module.apart(report, work.tells, "one", 4.0) == []
    (died,) = module.apart(report, work.dies, "two")
    (hung,) = module.apart(report, work.hangs, "three", silent=1.0)
    assert (died.name, died.why) == ("two", "its process ended with 3")
    assert (hung.name, hung.why) == ("three", "said nothing for 1 s and was ended")
    assert [(result.name, result.value) for result in report._results] == [("one", 4.0), ("two", 1.0)]


def test_a_section_that_raises_is_told_by_its_name(gpu):
    module, report = gpu
    (failure,) = module.apart(report, module.section, "nothing", CPU, True)
    assert failure.name == "nothing"
    assert failure.why.startswith("AttributeError")
