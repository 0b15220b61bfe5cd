"""The choice between loading and recomputing, against brute force and against worked examples."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvtier.cost import UNMEASURED, LoadOrRecompute, PrefillMeter, PrefillShape, Run, TierSpeed

KIB = 1 << 10
TOKEN = 64 * KIB
FAST, SLOW = TierSpeed(10e9, 0.0, 0), TierSpeed(10e6, 0.0, 0)


def run(tier: str, tokens: int, token_bytes: int = TOKEN) -> Run:
    return Run(tier, tokens * token_bytes, tokens)


# ---- prefill


def test_recompute_time_of_a_known_model() -> None:
    # Llama-3-8B: 2 P = 1.6e10 FLOP a token, a = 32 layers x 32 heads x 256, at a sustained 495 TFLOP/s.
    shape = PrefillShape(32 * 32 * 256 / 1.6e10)
    rate = 495e12 / 1.6e10
    assert shape.work(0, 8192) / rate == pytest.approx(0.302, rel=0.02)
    assert shape.work(0, 32768) / rate == pytest.approx(1.63, rel=0.02)


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000), st.floats(0, 0.01))
def test_work_of_two_pieces_is_work_of_the_whole(start: int, first: int, second: int, curvature: float) -> None:
    shape = PrefillShape(curvature)
    middle, stop = start + first, start + first + second
    assert shape.work(start, middle) + shape.work(middle, stop) == pytest.approx(shape.work(start, stop))


def test_a_deep_prefill_counts_for_more_tokens() -> None:
    shape = PrefillShape(0.001)
    flat, curved = PrefillMeter(), PrefillMeter(shape)
    for meter in (flat, curved):
        assert meter.seconds(0, 10) is None
        meter.observe(0, 1.0)
        meter.observe(5, 0.0)
        assert meter.tokens_per_second is None
        # 100 tokens behind 1000 others.
        meter.observe(100, 2.0, attended=(1100**2 - 1000**2) // 2)
    assert flat.tokens_per_second == pytest.approx(50)
    assert curved.tokens_per_second == pytest.approx((100 + 0.001 * 210_000) / 2)
    assert curved.seconds(1000, 1100) == pytest.approx(2.0)


def test_the_latest_prefills_count_most() -> None:
    meter = PrefillMeter()
    for _ in range(30):
        meter.observe(100, 1.0)
    for _ in range(30):
        meter.observe(100, 4.0)
    assert meter.tokens_per_second == pytest.approx(25, rel=0.05)


# ---- the choice


def test_a_fast_tier_is_loaded_and_a_slow_one_is_not() -> None:
    model = LoadOrRecompute()
    speeds = {"fast": FAST, "slow": SLOW}
    # A token of 64 KiB: 6.6 us from the fast tier, 6.6 ms from the slow one, 1 ms to compute.
    decision = model.decide([run("fast", 100)], speeds, 1000.0)
    assert decision == (100, "cheaper", "fast", pytest.approx(100 * TOKEN / 10e9), pytest.approx(0.1))
    assert decision.choice(100) == "load"
    decision = model.decide([run("slow", 100)], speeds, 1000.0)
    assert decision == (0, "slow", "slow", 0.0, pytest.approx(0.1))
    assert decision.choice(100) == "recompute"


def test_a_fast_beginning_is_loaded_and_a_slow_end_computed() -> None:
    decision = LoadOrRecompute().decide([run("fast", 64), run("slow", 64)], {"fast": FAST, "slow": SLOW}, 1000.0)
    assert (decision.load_tokens, decision.reason, decision.tier) == (64, "slow", "slow")
    assert decision.choice(128) == "split"


def test_a_slow_middle_is_loaded_where_what_follows_pays_for_it() -> None:
    speeds = {"fast": FAST, "slow": SLOW}
    runs = [run("fast", 64), run("slow", 10), run("fast", 500)]
    assert LoadOrRecompute().decide(runs, speeds, 1000.0).load_tokens == 574
    runs = [run("fast", 64), run("slow", 500), run("fast", 10)]
    assert LoadOrRecompute().decide(runs, speeds, 1000.0).load_tokens == 64


def test_latency_makes_short_runs_expensive() -> None:
    far = {"far": TierSpeed(1e9, 0.05, 0)}
    assert LoadOrRecompute().decide([run("far", 16)], far, 1000.0).load_tokens == 0
    assert LoadOrRecompute().decide([run("far", 160)], far, 1000.0).load_tokens == 160


def test_depth_makes_loading_worth_while() -> None:
    speeds = {"nvme": TierSpeed(TOKEN * 1500, 0.0, 0)}
    model = LoadOrRecompute(PrefillShape(0.001))
    shallow = model.decide([run("nvme", 100)], speeds, 2000.0)
    deep = model.decide([run("nvme", 100)], speeds, 2000.0, start=1000)
    assert (shallow.load_tokens, deep.load_tokens) == (0, 100)


def test_a_queue_flips_the_choice_and_is_named() -> None:
    busy = {"nvme": TierSpeed(1e9, 0.0, int(2e9))}
    decision = LoadOrRecompute().decide([run("nvme", 1000)], busy, 1000.0)
    assert (decision.load_tokens, decision.reason) == (0, "queued")


def test_the_link_into_the_device_is_paid_by_all() -> None:
    slow_link = TierSpeed(10e6, 0.0, 0)
    decision = LoadOrRecompute().decide([run("host", 100)], {"host": FAST}, 1000.0, link=slow_link)
    assert decision.load_tokens == 0


def test_an_unmeasured_tier_is_tried_up_to_a_bound() -> None:
    model = LoadOrRecompute(trial_bytes=10 * TOKEN)
    decision = model.decide([run("new", 8)], {}, 1e6)
    assert (decision.load_tokens, decision.reason) == (8, "unmeasured")
    decision = model.decide([run("host", 20), run("new", 100)], {"host": FAST}, 1000.0)
    assert (decision.load_tokens, decision.reason, decision.tier) == (30, "unmeasured", "new")
    assert model.decide([run("new", 1, 20 * TOKEN)], {}, 1000.0).load_tokens == 1


def test_without_a_prefill_rate_everything_is_loaded() -> None:
    decision = LoadOrRecompute().decide([run("slow", 500)], {"slow": SLOW}, None)
    assert (decision.load_tokens, decision.reason, decision.recompute_seconds) == (500, "no_prefill_rate", None)


def test_a_slow_tier_is_probed_again_and_recovers() -> None:
    now = [100.0]
    model = LoadOrRecompute(probe_seconds=10, probe_bytes=4 * TOKEN, clock=lambda: now[0])
    speeds = {"nvme": SLOW}
    seen = []
    for now[0] in (100.0, 105.0, 110.0, 111.0, 119.0, 120.5):
        decision = model.decide([run("nvme", 100)], speeds, 1000.0)
        seen.append((decision.load_tokens, decision.reason))
    assert seen == [(0, "slow"), (0, "slow"), (4, "probe"), (0, "slow"), (0, "slow"), (4, "probe")]
    speeds["nvme"] = FAST
    assert model.decide([run("nvme", 100)], speeds, 1000.0).load_tokens == 100


SPEEDS = st.builds(TierSpeed, st.floats(1e5, 1e9), st.floats(0, 0.5), st.integers(0, 10**8))
RUNS = st.lists(
    st.builds(Run, st.sampled_from("abc"), st.integers(1, 10**7), st.integers(1, 60)), min_size=1, max_size=5
)


@given(
    runs=RUNS,
    speeds=st.fixed_dictionaries(dict.fromkeys("abc", SPEEDS)),
    rate=st.floats(10, 1e5),
    curvature=st.floats(0, 0.01),
    start=st.integers(0, 500),
)
def test_no_other_cut_is_cheaper(
    runs: list[Run], speeds: dict[str, TierSpeed], rate: float, curvature: float, start: int
) -> None:
    """Brute force over every token that the run could be cut at."""
    total = sum(run.tokens for run in runs)

    def cost(cut: int) -> float:
        seconds, left, seen = 0.0, cut, set()
        for piece in runs:
            taken = min(left, piece.tokens)
            if not taken:
                break
            left -= taken
            speed = speeds[piece.tier]
            assert speed.bytes_per_second is not None
            seconds += taken / piece.tokens * piece.nbytes / speed.bytes_per_second
            if piece.tier not in seen:
                seconds += speed.latency_seconds + speed.queued_bytes / speed.bytes_per_second
                seen.add(piece.tier)
        # Token by token: each one attends to all before it.
        return seconds + sum(1 + curvature * (2 * at + 1) for at in range(start + cut, start + total)) / rate

    decision = LoadOrRecompute(PrefillShape(curvature)).decide(runs, speeds, rate, start=start)
    best = min(cost(cut) for cut in range(total + 1))
    assert cost(decision.load_tokens) == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert decision.reason in {"cheaper", "slow", "queued"}


def test_runs_without_tokens_do_no_harm() -> None:
    decision = LoadOrRecompute().decide([run("fast", 4), run("slow", 0)], {"fast": FAST, "slow": UNMEASURED}, 1000.0)
    assert (decision.load_tokens, decision.tier) == (4, "fast")
