"""The checks and measurements that run on a real device, here in the interpreter: they can pass, fail and run."""

import pytest
from kernel_world import CPU

from kvtier.gpu.kernels import checks as checks_module
from kvtier.gpu.kernels.cases import Checked, Sizes, checks, measures, seconds

SMALL = Sizes(2, 9, 1, 2, 32, 32, 16, 16, 3, 64, 40)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(checks_module, "_DECODES", ((0, 1), (15, 16), (19, 20)))
    monkeypatch.setattr(checks_module, "_PREFILLS", ((0, 1), (3, 8)))
    monkeypatch.setattr(checks_module, "_WRITTEN", 4)
    monkeypatch.setattr(checks_module, "_PRODUCT_SHAPE", (33, 300))


CHOSEN = [
    "decode.float16.80x1",
    "prefill.bfloat16.128x8.window",
    "latent.16",
    "product.bfloat16.17",
    "write.raw",
    "write.fp8",
    "gather",
]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", CHOSEN)
def test_checks_pass(name):
    (check,) = [check for check in checks() if check.name == name]
    checked = check.run(CPU)
    assert checked.passed, checked


@pytest.mark.usefixtures("short")
def test_a_wrong_kernel_fails_its_check(monkeypatch):
    monkeypatch.setattr(checks_module, "paged_decode", lambda q, kv, batch, out, **_: out.zero_())
    (check,) = [check for check in checks() if check.name == "decode.float16.80x1"]
    assert check.run(CPU) == Checked(1.0, 2e-3)
    monkeypatch.setattr(checks_module, "paged_decode", lambda *_, **__: None)
    assert not check.run(CPU).passed


def test_names_are_unique():
    for cases in (checks(), measures()):
        assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize("measure", measures(SMALL), ids=lambda measure: measure.name)
def test_measurements_run_and_peers_agree(measure):
    work = measure.prepare(CPU)
    assert seconds(work.run, CPU, repeats=1) > 0
    assert work.nbytes > 0
    assert (work.peer is None) == (measure.peer is None)
    if work.peer is not None:
        work.peer()


def test_bytes_of_a_decode():
    tiny = Sizes(batch=2, context=16, kv_heads=1, queries_per_head=1, head_dim=64)
    (decode, int4r) = [measure for measure in measures(tiny) if measure.name in ("decode", "decode.int4r")]
    assert decode.prepare(CPU).nbytes == 2 * 16 * 2 * 64 * 2
    assert int4r.prepare(CPU).nbytes == 2 * 16 * 2 * (32 + 4)
    assert decode.prepare(CPU).flops == 4 * 16 * 2 * 64
