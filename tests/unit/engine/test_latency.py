"""The step model against steps whose time is known."""

from random import Random

import pytest

from kvtier.engine.latency import LoadModel, StepModel, StepWork


def cost(work: StepWork) -> float:
    return 0.004 + 0.0003 * work.decodes + 2e-7 * work.context + 0.0005 * work.prefill


def works(count: int) -> list[StepWork]:
    random = Random(1)
    return [
        StepWork(decodes := random.randrange(1, 16), decodes * random.randrange(50, 900), random.randrange(200))
        for _ in range(count)
    ]


def learned(noise: float = 0.0, count: int = 60) -> StepModel:
    model, random = StepModel(), Random(2)
    for work in works(count):
        model.observe(work, cost(work) * (1 + random.uniform(-noise, noise)))
    return model


@pytest.mark.parametrize(("noise", "error"), [(0.0, 1e-3), (0.2, 0.1)])
def test_what_was_seen_predicts_what_was_not(noise: float, error: float) -> None:
    model = learned(noise)
    for work in (StepWork(1, 50, 0), StepWork(12, 6000, 150), StepWork(0, 0, 400)):
        assert model.seconds(work) == pytest.approx(cost(work), rel=error, abs=1e-3)


def test_the_limit_keeps_the_time() -> None:
    model = learned()
    for seconds in (0.02, 0.05, 0.1):
        limit = model.prefill_limit(8, 3000, seconds)
        assert limit is not None
        assert cost(StepWork(8, 3000, limit)) <= seconds * 1.001 <= cost(StepWork(8, 3000, limit + 3)) * 1.002
    assert model.prefill_limit(8, 3000, 0.001) < 0  # type: ignore[operator]
    assert model.prefill_seconds(100) == pytest.approx(0.05, rel=1e-2)


def test_nothing_is_known_before_a_few_steps() -> None:
    model = learned(count=3)
    assert model.seconds(StepWork(1, 1, 1)) is None
    assert model.prefill_limit(1, 1, 1.0) is None
    assert model.prefill_seconds(10) == 0.0
    model.observe(StepWork(0, 0, 0), 1.0)
    model.observe(StepWork(1, 1, 0), 0.0)
    assert model.seconds(StepWork(1, 1, 1)) is None


def test_steps_of_one_kind_only_predict_their_like_and_nothing_absurd() -> None:
    model = StepModel()
    for _ in range(20):
        model.observe(StepWork(4, 400, 0), 0.01)
    assert model.seconds(StepWork(4, 400, 0)) == pytest.approx(0.01, rel=1e-6)
    assert 0 < model.seconds(StepWork(1, 100, 0)) <= 0.01  # type: ignore[operator]
    assert model.prefill_limit(4, 400, 1.0) is None


def test_a_machine_that_became_slower_is_followed() -> None:
    model = learned()
    for work in works(200):
        model.observe(work, 3 * cost(work))
    assert model.seconds(StepWork(8, 3000, 100)) == pytest.approx(3 * cost(StepWork(8, 3000, 100)), rel=0.05)


def test_no_coefficient_is_negative_whatever_the_noise() -> None:
    random = Random(3)
    for _ in range(20):
        model = StepModel()
        for work in works(12):
            model.observe(work, random.uniform(0.001, 0.1))
        times = [model.seconds(StepWork(0, 0, prefill)) for prefill in (0, 10, 100)]
        assert times == sorted(times)  # type: ignore[type-var]
        assert times[0] >= 0  # type: ignore[operator]


def test_loads_cost_what_they_did() -> None:
    loads = LoadModel()
    assert loads.seconds(100) == 0.0
    for tokens in (64, 128, 512):
        loads.observe(tokens, tokens * 1e-4)
    loads.observe(0, 5.0)
    assert loads.seconds(1000) == pytest.approx(0.1)
