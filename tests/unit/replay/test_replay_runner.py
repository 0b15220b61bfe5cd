"""The replay against an independent model, and against itself with other tiers."""

from pathlib import Path
from typing import ClassVar

import pytest
from replay_reference import infinite_hits, lru_hits, random_trace, token_ratio

from kvtier.errors import CapacityError, ConfigError, CorruptObject
from kvtier.policies import LruPolicy
from kvtier.replay import (
    Outcome,
    ReadOptions,
    ReplayPlan,
    Trace,
    TraceRequest,
    clock,
    optimum_ratio,
    read_trace,
    replay,
    replay_all,
)
from kvtier.replay.foresight import Foresight, hint_source
from kvtier.replay.records import Records
from kvtier.replay.report import prefill_flops

TRACES = Path(__file__).parents[2] / "data/traces"
POLICIES = ["lru", "arc", "clock2", "s3fifo"]


@pytest.fixture(scope="module")
def mooncake():
    return read_trace(TRACES / "mooncake_conversation.jsonl")


@pytest.fixture(scope="module", params=range(2))
def conversations(request):
    return random_trace(request.param)


def found(outcome: Outcome) -> float:
    return sum(tier.hit_tokens for tier in outcome.tiers.values())


# ---- one tier


@pytest.mark.parametrize("capacity", [5, 40, 150])
def test_lru_in_host_finds_what_the_model_finds(conversations, capacity):
    outcome = replay(conversations, ReplayPlan(capacity))
    hits = lru_hits(conversations, capacity)
    assert outcome.hit_tokens == pytest.approx(token_ratio(conversations, hits), abs=1e-12)
    saved = sum(
        prefill_flops(min(count * 16, request.tokens))
        for count, request in zip(hits, conversations.requests, strict=True)
    )
    assert outcome.saved_compute == pytest.approx(
        saved / sum(prefill_flops(request.tokens) for request in conversations.requests), abs=1e-12
    )
    host = outcome.tiers["host"]
    written = conversations.touches - sum(hits)
    assert host.blocks <= capacity
    assert host.written_bytes == (written - host.dropped.get("no_space", 0)) * outcome.block_bytes or host.dropped
    assert host.read_bytes == sum(hits) * outcome.block_bytes


def test_lru_on_a_published_trace(mooncake):
    for capacity in (300, 1500):
        outcome = replay(mooncake, ReplayPlan(capacity))
        assert outcome.hit_tokens == pytest.approx(token_ratio(mooncake, lru_hits(mooncake, capacity)), abs=1e-12)


@pytest.mark.parametrize("policy", POLICIES)
def test_room_for_everything_finds_everything_that_came_before(conversations, policy):
    outcome = replay(conversations, ReplayPlan(conversations.blocks, policy=policy))
    assert outcome.hit_tokens == pytest.approx(token_ratio(conversations, infinite_hits(conversations)), abs=1e-12)
    assert outcome.tiers["host"].evicted == {}


@pytest.mark.parametrize("capacity", [20, 100])
def test_no_policy_beats_the_optimum(conversations, capacity):
    plans = [ReplayPlan(capacity, policy=policy) for policy in POLICIES]
    for outcome in replay_all(conversations, plans):
        # A block that is not full makes the optimum in blocks an estimate in tokens.
        assert outcome.hit_tokens <= outcome.optimum_hit_tokens + 0.01
        assert outcome.optimum_hit_tokens == optimum_ratio(conversations, capacity)


def test_a_prompt_longer_than_the_tier_keeps_its_head():
    request = TraceRequest(0.0, 160, tuple(range(10)))
    trace = Trace("made", 16, (request, request), 10)
    outcome = replay(trace, ReplayPlan(4))
    assert outcome.hit_tokens == pytest.approx(4 / 20)
    assert sum(outcome.tiers["host"].dropped.values()) > 0


# ---- several tiers


def test_the_device_is_an_lru_in_front(conversations):
    outcome = replay(conversations, ReplayPlan(60, device_blocks=20))
    alone = token_ratio(conversations, lru_hits(conversations, 20))
    assert outcome.tiers["device"].hit_tokens == pytest.approx(alone, abs=1e-12)
    assert outcome.tiers["device"].blocks <= 20
    assert outcome.hit_tokens == pytest.approx(found(outcome))
    assert outcome.hit_tokens > alone


def test_exclusive_tiers_hold_a_block_once_and_lose_none(conversations):
    plans = [ReplayPlan(60, device_blocks=20, copies=copies) for copies in ("inclusive", "exclusive")]
    inclusive, exclusive = (replay(conversations, plan) for plan in plans)
    assert inclusive.hit_tokens < exclusive.hit_tokens
    assert exclusive.tiers["host"].written_bytes > inclusive.tiers["host"].written_bytes
    # Exclusive tiers are one LRU of the room of both, but for prompts that are larger than a gap.
    both = token_ratio(conversations, lru_hits(conversations, 80))
    assert exclusive.hit_tokens == pytest.approx(both, abs=0.03)


@pytest.mark.parametrize("rule", ["through", "leave"])
def test_a_large_nvme_tier_loses_nothing(conversations, rule):
    plan = ReplayPlan(150, nvme_blocks=conversations.blocks + 8, write_rule=rule)
    outcome = replay(conversations, plan)
    everything, host = infinite_hits(conversations), lru_hits(conversations, 150)
    assert outcome.hit_tokens == pytest.approx(token_ratio(conversations, everything), abs=1e-12)
    assert outcome.tiers["host"].hit_tokens == pytest.approx(token_ratio(conversations, host), abs=1e-12)
    written = outcome.nvme_bytes_written // outcome.block_bytes
    assert written == conversations.blocks if rule == "through" else written < conversations.blocks
    # Each block that host alone would have missed came up from NVMe.
    promoted = outcome.tiers["nvme"].read_bytes // outcome.block_bytes
    assert promoted == sum(everything) - sum(host)


def test_what_leaves_host_too_early_is_counted(conversations):
    # A tenth of 40 blocks is less than a prompt.
    outcome = replay(conversations, ReplayPlan(40, nvme_blocks=conversations.blocks + 8, write_rule="leave"))
    assert outcome.hit_tokens < token_ratio(conversations, infinite_hits(conversations))
    assert outcome.tiers["nvme"].dropped["evicted_before_write"] > 0


def test_second_touch_writes_less(conversations):
    plans = [ReplayPlan(40, nvme_blocks=400, write_rule=rule) for rule in ("leave", "second_touch")]
    often, seldom = (replay(conversations, plan) for plan in plans)
    assert 0 < seldom.nvme_bytes_written < often.nvme_bytes_written


def test_blocks_of_full_length_are_stored_and_verified_on_real_tiers(conversations, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    plan = ReplayPlan(40, nvme_blocks=conversations.blocks + 8, block_bytes=5000, full_bytes=True, write_rule="through")
    outcome = replay(conversations, plan)
    assert outcome.hit_tokens == pytest.approx(token_ratio(conversations, infinite_hits(conversations)), abs=1e-12)
    assert outcome.nvme_bytes_written == conversations.blocks * 5000
    assert list(tmp_path.iterdir()) == [], "the directory of the NVMe tier is gone"


def test_wrong_bytes_are_noticed(conversations, monkeypatch):
    data, written = Records.data, set()

    def changing(self, ref):
        # What was written once is not what is expected later.
        expected = ref if ref not in written else ref._replace(exact=False)
        written.add(ref)
        return data(self, expected)

    monkeypatch.setattr(Records, "data", changing)
    with pytest.raises(CorruptObject, match="handed out other bytes"):
        replay(conversations, ReplayPlan(200, block_bytes=4096, full_bytes=True))


# ---- hints


@pytest.mark.parametrize("capacity", [20, 60])
def test_true_hints_help(conversations, capacity):
    plans = [ReplayPlan(capacity, hints=hints) for hints in ("none", "true")]
    plain, hinted = replay_all(conversations, plans)
    assert hinted.hit_tokens > plain.hit_tokens
    assert hinted.hit_tokens <= hinted.optimum_hit_tokens + 0.01


def test_foresight_is_true_for_each_block_and_use(conversations):
    source = Foresight(conversations)
    for number, request in enumerate(conversations.requests):
        later = {block for after in conversations.requests[number + 1 :] for block in after.blocks}
        dead = [hint.reuse == "none" for hint in source.hints(number, request)]
        assert dead == [block not in later for block in request.blocks]


def test_half_of_the_hints_are_wrong_and_the_same_ones_for_a_seed(conversations):
    def given(source):
        return [hint.reuse == "none" for n, r in enumerate(conversations.requests) for hint in source.hints(n, r)]

    true, wrong = given(Foresight(conversations)), given(hint_source("half-wrong", conversations, 7))
    share = sum(a != b for a, b in zip(true, wrong, strict=True)) / len(true)
    assert 0.45 < share < 0.55
    assert given(hint_source("half-wrong", conversations, 7)) == wrong
    assert given(hint_source("half-wrong", conversations, 8)) != wrong


def test_hints_of_the_trace_end_sessions():
    trace = read_trace(TRACES / "agents", ReadOptions(block_tokens=64))
    outcome = replay(trace, ReplayPlan(trace.blocks // 4, hints="trace"))
    assert 0 < outcome.hit_tokens < 1


def test_a_trace_without_sessions_has_no_hints_of_its_own(mooncake):
    with pytest.raises(ConfigError, match="names no sessions"):
        replay(mooncake, ReplayPlan(100, hints="trace"))
    with pytest.raises(ConfigError, match="hints 'maybe': expected one of none, true"):
        replay(mooncake, ReplayPlan(100, hints="maybe"))


# ---- time


class Watching(LruPolicy):
    """Remembers what time its events happened at."""

    seen: ClassVar[list[float]] = []

    def __init__(self, capacity_blocks, *, clock):
        super().__init__(capacity_blocks, clock=clock)
        self._watched = clock

    def insert(self, *arguments):
        self.seen.append(self._watched())
        super().insert(*arguments)


def test_policies_live_in_the_time_of_the_trace(conversations):
    Watching.seen.clear()
    outcome = replay(conversations, ReplayPlan(50, policy="test_replay_runner:Watching"))
    times = [request.at for request in conversations.requests]
    assert set(Watching.seen) <= set(times)
    assert Watching.seen == sorted(Watching.seen)
    assert Watching.seen[-1] > times[-1] / 2
    samples = outcome.samples
    assert [sample.at for sample in samples] == sorted(sample.at for sample in samples)
    assert 0 < samples[-1].occupied["host"] <= 1


def test_time_can_be_scaled(monkeypatch):
    slept = []
    monkeypatch.setattr(clock.time, "sleep", slept.append)
    monkeypatch.setattr(clock.time, "monotonic", lambda: 50.0)
    scaled = clock.TraceClock(10.0)
    for at in (0.0, 2.0, 5.0):
        scaled.advance(at)
        assert scaled() == at
    assert slept == pytest.approx([0.0, 0.2, 0.5])


def test_a_simulated_drive_is_as_busy_as_a_real_one_would_be():
    requests = tuple(TraceRequest(at / 10, 16, (at,)) for at in range(4))
    outcome = replay(Trace("made", 16, requests, 4), ReplayPlan(4, nvme_blocks=8, write_rule="through"))
    assert outcome.tiers["nvme"].busy_seconds == pytest.approx(4 * (1e-4 + outcome.block_bytes / 6e9))


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"capacity_blocks": 0}, "capacity of 0 blocks: expected at least 1"),
        ({"nvme_blocks": -1}, "nvme of -1 blocks: expected at least 0"),
        ({"copies": "two"}, "copies 'two': expected one of inclusive, exclusive"),
        ({"write_rule": "never"}, "write 'never': expected one of through, leave, second_touch"),
        ({"policy": "best"}, "'best': unknown, expected one of lru"),
        ({"time_scale": 0.0}, "time-scale 0: expected a factor above 0"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(conversations, change, says):
    with pytest.raises(ConfigError, match=says):
        replay(conversations, ReplayPlan(**{"capacity_blocks": 10, **change}))


def test_more_memory_than_there_is_is_refused(conversations):
    with pytest.raises(CapacityError):
        replay(conversations, ReplayPlan(1 << 40))
