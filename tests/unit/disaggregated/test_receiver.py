"""What is handed over, and how much of host what comes early may take."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
from disaggregated_world import BLOCKS, PROMPT, RunningPrefill
from patience import until
from store_world import FarTier

from kvtier import SamplingParams
from kvtier.cpu import HostTier
from kvtier.disaggregated import HandoverOptions
from kvtier.disaggregated.handover import Outcome
from kvtier.disaggregated.receiving import Receiver, Reception
from kvtier.errors import ConfigError
from kvtier.store import TieredStore

GREEDY = SamplingParams(max_tokens=1)


@pytest.fixture
def receiver(prefill: RunningPrefill) -> Iterator[Receiver]:
    receiver = Receiver(prefill.side, prefill.path, HandoverOptions(least_tokens=20))
    yield receiver
    receiver.close()


def outcome(reception: Reception | None) -> Outcome:
    assert reception is not None
    return reception.handover.future.result(20)


def test_what_is_short_or_there_or_to_be_scored_is_computed_here(prefill: RunningPrefill, receiver: Receiver) -> None:
    assert receiver.begin(PROMPT[:19], GREEDY) is None
    assert receiver.begin(PROMPT, SamplingParams(prompt_logprobs=0)) is None
    assert outcome(receiver.begin(PROMPT[:60], GREEDY)) == Outcome("finished", 14)
    assert receiver.begin(PROMPT[:60], GREEDY) is None
    assert receiver.begin(PROMPT[:70], GREEDY) is None  # 14 tokens are missing
    reception = receiver.begin(PROMPT, GREEDY)
    assert outcome(reception) == Outcome("finished", BLOCKS)
    metrics = prefill.llm.store.metrics
    assert metrics.value("handovers_total", ending="finished") == 2
    assert metrics.value("handed_blocks_total") == BLOCKS
    assert not metrics.value("handovers_total", ending="away")
    receiver.close()
    assert receiver.begin([7, *PROMPT], GREEDY) is None
    assert metrics.value("handovers_total", ending="away") == 1


def test_a_salted_prompt_is_handed_over_to_those_who_know_the_salt(prefill: RunningPrefill, receiver: Receiver) -> None:
    salted = SamplingParams(max_tokens=1, cache_salt="ours")
    assert outcome(receiver.begin(PROMPT, salted)) == Outcome("finished", BLOCKS)
    assert receiver.begin(PROMPT, salted) is None  # it is there
    assert outcome(receiver.begin(PROMPT, SamplingParams(max_tokens=1, cache_salt="theirs"))).blocks == BLOCKS
    assert len(prefill.side.store.match(prefill.side.keys(PROMPT)).tiers) == 0
    assert len(prefill.side.store.match(prefill.side.keys(PROMPT, "ours")).tiers) == BLOCKS


def test_what_comes_early_leaves_half_of_host_to_others(prefill: RunningPrefill, receiver: Receiver) -> None:
    store, keys = prefill.llm.store, prefill.side.keys(PROMPT)
    room = store.host.stats()["capacity_bytes"] // 2 // prefill.side.block_bytes
    assert receiver.prefetch(keys * 50, "a", 0, room - 3) == room - 3
    assert receiver.prefetch(keys, "b", 0, 10) == 3
    assert receiver.prefetch(keys, "c", 0, 10) == 0
    receiver.give_back("a", room - 3)
    assert receiver.prefetch(keys, "c", 5, 10) == 5
    assert receiver.prefetch(keys, "c", 7, 5) == 0


def test_a_reception_gives_its_room_back_once(prefill: RunningPrefill, receiver: Receiver) -> None:
    room = receiver._room
    prefill.model.let(0)
    reception = receiver.begin(PROMPT, GREEDY)
    assert reception is not None
    prefill.crawl(reception.handover)
    until(lambda: receiver._room < room)
    reception.close()
    reception.close()
    assert outcome(reception).ending == "cancelled"
    until(lambda: prefill.server.jobs == 0)
    assert receiver._room == room


@pytest.mark.parametrize("options", [{"least_tokens": 0}, {"patience": 0}, {"deadline": float("nan")}])
def test_options_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected at least 1 token"):
        HandoverOptions(**options)


def test_nobody_waits_for_a_remote_tier(prefill: RunningPrefill) -> None:
    far = FarTier()
    store = TieredStore(HostTier(1 << 20), [far])
    with contextlib.closing(store):
        receiver = Receiver(replace(prefill.side, store=store), prefill.path, HandoverOptions(least_tokens=20))
        far.answers.clear()
        reception = receiver.begin(PROMPT, GREEDY)
        assert outcome(reception) == Outcome("finished", BLOCKS)
        assert far.asked == []
        far.answers.set()
        reception.close()
        receiver.close()
