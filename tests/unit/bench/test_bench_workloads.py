"""What a bench is going to ask: how much, how long, when, and what is the same as before."""

import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from kvtier.bench import Conversations, Pace, SharedPrefix, Unrelated
from kvtier.bench.scripts import Piece
from kvtier.bench.texts import Texts
from kvtier.bench.traced import Traced
from kvtier.errors import ConfigError
from kvtier.replay import ReadOptions, Trace, TraceRequest, read_trace

TRACES = Path(__file__).parents[2] / "data/traces"
AT_ONCE = Pace()


def lengths(scripts):
    return [[(turn.tokens, turn.output_tokens) for turn in script.turns] for script in scripts]


def prompts(scripts, texts):
    """Of every request, in order, as if nothing were answered."""
    return [
        texts.write([piece for turn in script.turns[: number + 1] for piece in turn.pieces])
        for script in scripts
        for number in range(len(script.turns))
    ]


def common(one, other):
    words = zip(one.split(), other.split(), strict=False)
    return next((at for at, (a, b) in enumerate(words) if a != b), min(len(one.split()), len(other.split())))


def test_conversations_have_a_history_of_their_own():
    scripts = Conversations(chats=3, turns=2, prompt_tokens=40, turn_tokens=7, output_tokens=5).scripts(AT_ONCE, 1)
    assert lengths(scripts) == [[(40, 5), (7, 5)]] * 3
    assert [[turn.is_first for turn in script.turns] for script in scripts] == [[True, False]] * 3
    assert len({script.session for script in scripts}) == 3
    asked = prompts(scripts, Texts(1))
    assert asked[1].startswith(asked[0])
    assert all(common(one, other) < 10 for one in asked[:2] for other in asked[2:])
    assert scripts[0].tokens == 40 + 5 + 7 + 5


def test_questions_share_their_document_and_nothing_else():
    scripts = SharedPrefix(documents=3, questions=4, prompt_tokens=30, turn_tokens=5).scripts(AT_ONCE, 2)
    assert len(scripts) == 12
    seen = set()
    for script, asked in zip(scripts, prompts(scripts, Texts(2)), strict=True):
        document = " ".join(asked.split()[:30])
        assert script.turns[0].is_first == (document not in seen)
        seen.add(document)
    assert len(seen) == 3
    # The last question about a document ends its session, and no other does.
    last = {script.session: at for at, script in enumerate(scripts)}
    assert {at for at, script in enumerate(scripts) if script.ends_session} == set(last.values())
    assert [script.session for script in scripts] != sorted(script.session for script in scripts)


def test_unrelated_prompts_share_nothing():
    asked = prompts(Unrelated(requests=20, prompt_tokens=50).scripts(AT_ONCE, 3), Texts(3))
    assert max(common(one, other) for one, other in pairwise(sorted(asked))) < 5
    assert {len(text.split()) for text in asked} == {50}


@pytest.mark.parametrize("kind", [Conversations, SharedPrefix, Unrelated])
def test_a_seed_says_it_all(kind):
    pace = Pace(rate=3.0)
    workload = kind(spread=0.5)
    assert workload.scripts(pace, 5) == workload.scripts(pace, 5)
    assert workload.scripts(pace, 5) != workload.scripts(pace, 6)
    assert prompts(kind().scripts(pace, 5), Texts(5)) == prompts(kind().scripts(pace, 5), Texts(5))
    assert not set(prompts(kind().scripts(pace, 5), Texts(5))) & set(prompts(kind().scripts(pace, 5), Texts(6)))


def test_lengths_vary_as_far_as_they_are_told_to():
    scripts = Unrelated(requests=2000, prompt_tokens=100, output_tokens=10, spread=0.4).scripts(AT_ONCE, 0)
    tokens = [script.turns[0].tokens for script in scripts]
    assert (min(tokens), max(tokens)) == (60, 140)
    assert statistics.fmean(tokens) == pytest.approx(100, rel=0.03)
    assert {script.turns[0].output_tokens for script in scripts} == set(range(6, 15))


def test_starts_come_at_the_rate_that_was_asked_for():
    gaps = {}
    for arrivals in ("fixed", "poisson"):
        scripts = Unrelated(requests=4000).scripts(Pace(8.0, arrivals), 0)
        gaps[arrivals] = [after.at - before.at for before, after in pairwise(scripts)]
        assert scripts[0].at == 0
    assert gaps["fixed"] == pytest.approx([0.125] * 3999)
    # Of an exponential distribution mean and deviation are one.
    assert statistics.fmean(gaps["poisson"]) == pytest.approx(0.125, rel=0.05)
    assert statistics.stdev(gaps["poisson"]) == pytest.approx(0.125, rel=0.1)
    assert all(script.at is None for script in Unrelated().scripts(Pace(), 0))


def test_people_think_between_turns_and_not_before_the_first():
    def pauses(arrivals):
        scripts = Conversations(chats=500, turns=3, think=2.0).scripts(Pace(arrivals=arrivals), 0)
        assert all(script.turns[0].pause == 0 for script in scripts)
        return [turn.pause for script in scripts for turn in script.turns[1:]]

    assert set(pauses("fixed")) == {2.0}
    assert statistics.fmean(pauses("poisson")) == pytest.approx(2.0, rel=0.1)


def test_a_trace_keeps_its_times_its_lengths_and_what_it_shares():
    requests = (
        TraceRequest(0.0, 25, (0, 1, 2), output_tokens=8),
        TraceRequest(3.0, 30, (0, 1, 3), "s", ends_session=True),
        TraceRequest(4.0, 12, (4,)),
    )
    trace = Trace("made", 10, requests, 5)
    scripts = Traced(trace, output_tokens=6, time_scale=2.0).scripts(AT_ONCE, 0)
    assert [script.at for script in scripts] == [0.0, 1.5, 2.0]
    assert lengths(scripts) == [[(25, 8)], [(30, 6)], [(12, 6)]]
    assert [script.turns[0].is_first for script in scripts] == [True, False, True]
    assert [(script.session, script.ends_session) for script in scripts][1] == ("s", True)
    one, other, third = prompts(scripts, Texts(0))
    assert common(one, other) == 20
    assert common(one, third) < 5
    short = Traced(trace, output_tokens=6, length_scale=0.5).scripts(AT_ONCE, 0)
    assert lengths(short)[0] == [(5 + 5 + 2, 4)]
    one, other, _ = prompts(short, Texts(0))
    assert common(one, other) == 10


@pytest.mark.parametrize(
    ("name", "answers"),
    [("mooncake_conversation.jsonl", [500, 490]), ("azure_2023_conv.csv", [44, 109]), ("agents", [479])],
)
def test_answers_are_as_long_as_the_trace_says(name, answers):
    trace = read_trace(TRACES / name, ReadOptions(limit=len(answers)))
    if name == "agents":
        trace = read_trace(TRACES / name / "trace_0167.json", ReadOptions(limit=1))
    assert [script.turns[0].output_tokens for script in Traced(trace).scripts(AT_ONCE, 0)] == answers


def test_a_shorter_text_begins_a_longer_one_and_words_have_a_price():
    texts = Texts(4)
    assert texts.write([Piece("a", 90)]).startswith(texts.write([Piece("a", 30)]))
    assert len(Texts(4, tokens_per_word=3.0).write([Piece("a", 90)]).split()) == 30
    assert len(Texts(4, tokens_per_word=9.0).write([Piece("a", 1)]).split()) == 1


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Conversations(chats=0), "chats 0: expected at least 1"),
        (lambda: Conversations(think=-1.0), "think -1: expected at least 0"),
        (lambda: SharedPrefix(prompt_tokens=0), "prompt-tokens 0"),
        (lambda: Unrelated(spread=1.5), "spread 1.5: expected a share"),
        (lambda: Unrelated(spread=float("nan")), "spread nan"),
        (lambda: Pace(rate=0.0), "rate 0: expected a number of starts per second"),
        (lambda: Pace(arrivals="burst"), "arrivals 'burst': expected one of poisson, fixed"),
        (lambda: Traced(Trace("made", 1, (), 0), time_scale=0.0), "time-scale 0"),
        (lambda: Traced(Trace("made", 1, (), 0)).scripts(Pace(2.0), 0), "rate 2: a trace has its own times"),
    ],
)
def test_sizes_that_do_not_do_are_named(make, expected):
    with pytest.raises(ConfigError, match=expected):
        make()
