"""Who is asked when, over rounds, and what is left of them when they end early."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from kvtier.bench import Load, Pace, Unrelated, measure_rounds, seeds_of
from kvtier.bench.targets import Failed, Heard, Question, Usage
from kvtier.errors import ConfigError


class Told:
    """What happened to all targets of a test, in its order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.open = 0
        self.most_open = 0

    def opener(self, place: str, context: int | None = None, fails_at: int | None = None, waits_at: int | None = None):
        opened = 0

        async def opens() -> "Answering":
            nonlocal opened
            opened += 1
            if opened == fails_at:
                raise Failed("unreachable", f"{place} is gone")
            if opened == waits_at:
                self.events.append(("waits", place))
                await asyncio.sleep(3600)
            self.events.append(("open", place))
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            return Answering(self, place, context)

        return opens

    def places(self, kind: str) -> str:
        return "".join(place for event, place in self.events if event == kind)


class Answering:
    """A target that answers at once."""

    model = "echo"

    def __init__(self, told: Told, place: str, context: int | None) -> None:
        self.place = place
        self.context = context
        self._told = told

    async def count(self, question: Question) -> int | None:
        return len(question.messages[0]["content"].split())

    async def answer(self, question: Question) -> AsyncGenerator[Heard, None]:
        self._told.events.append(("ask", question.messages[0]["content"]))
        yield Heard("yes", Usage(9, 1, 0, 0))

    async def close(self) -> None:
        self._told.events.append(("close", self.place))
        self._told.open -= 1


def loads(rounds, requests=2):
    workload = Unrelated(requests=requests, prompt_tokens=20, output_tokens=4)
    return [Load(workload.scripts(Pace(), seed), seed, 1, 0) for seed in seeds_of(7, rounds)]


def ask(openers, rounds=3, **more):
    return asyncio.run(measure_rounds(openers, loads(rounds), **more))


def test_engines_take_turns_in_being_first_and_are_open_one_at_a_time():
    told = Told()
    rounds = ask([told.opener("a"), told.opener("b")], rounds=4, in_process=True)
    assert told.places("open") == "abbaabba"
    assert (told.most_open, told.open) == (1, 0)
    assert [[len(run.answered) for run in runs] for runs in rounds.runs] == [[2] * 4] * 2
    assert [run.place for run in rounds.totals] == ["a", "b"]
    assert [(run.planned, len(run.answered), run.interrupted) for run in rounds.totals] == [(8, 8, False)] * 2


def test_servers_keep_their_order_once_all_have_been_seen():
    told = Told()
    ask([told.opener("a"), told.opener("b")], rounds=2, in_process=False)
    assert told.places("open") == "ab" + "abab"
    first = next(at for at, (event, _) in enumerate(told.events) if event == "ask")
    assert told.events[:first].count(("close", "b")) == 1


def test_a_round_asks_both_the_same_and_another_round_something_else():
    told = Told()
    ask([told.opener("a"), told.opener("b")], rounds=2, in_process=True)
    asked = [text for event, text in told.events if event == "ask"]
    one, other = asked[:4], asked[4:]
    assert one[:2] == one[2:]
    assert other[:2] == other[2:]
    assert len(set(asked)) == 4


def test_seeds_are_the_same_again_and_nobody_else_s():
    assert seeds_of(7, 3)[0] == 7
    assert seeds_of(7, 3) == seeds_of(7, 5)[:3]
    everyone = [seed for first in range(50) for seed in seeds_of(first, 5)]
    assert len(set(everyone)) == 250
    with pytest.raises(ConfigError, match="rounds 0: expected at least 1"):
        seeds_of(7, 0)


def test_what_cannot_be_asked_at_all_is_an_error_and_later_it_is_an_end():
    told = Told()
    for in_process in (True, False):
        with pytest.raises(Failed, match="a is gone"):
            ask([told.opener("a", fails_at=1)], in_process=in_process)
    rounds = ask([told.opener("a"), told.opener("b", fails_at=2)], in_process=True)
    assert str(rounds.error) == "b is gone"
    assert [[len(run.answered) for run in runs] for runs in rounds.runs] == [[2], [2]]
    assert [(run.planned, run.interrupted) for run in rounds.totals] == [(6, True)] * 2
    assert told.open == 0


def test_a_later_round_that_does_not_fit_is_refused_before_the_first():
    told = Told()
    workload = Unrelated(requests=1, prompt_tokens=20, output_tokens=4)
    long = Unrelated(requests=1, prompt_tokens=90, output_tokens=4)
    both = [Load(one.scripts(Pace(), 0), 0, 1, 0) for one in (workload, long)]
    with pytest.raises(ConfigError, match="have 94 tokens, more than echo's context of 50"):
        asyncio.run(measure_rounds([told.opener("a", context=50)], both, in_process=True))
    assert told.places("ask") == ""
    assert told.open == 0


@pytest.mark.parametrize(("waits_at", "rounds_left"), [(1, [1, 0]), (2, [1, 1])])
def test_cancelled_between_two_targets_it_keeps_what_was_measured(waits_at, rounds_left):
    told = Told()

    async def run():
        openers = [told.opener("a"), told.opener("b", waits_at=waits_at)]
        task = asyncio.create_task(measure_rounds(openers, loads(3), in_process=True))
        while ("waits", "b") not in told.events:
            await asyncio.sleep(0)
        task.cancel()
        return await task

    rounds = asyncio.run(run())
    assert [len(runs) for runs in rounds.runs] == rounds_left
    assert (rounds.interrupted, rounds.error) == (True, None)
    assert all(run.interrupted for run in rounds.totals)


def test_cancelled_before_anything_was_measured_it_is_cancelled():
    told = Told()

    async def run():
        task = asyncio.create_task(measure_rounds([told.opener("a", waits_at=1)], loads(1), in_process=True))
        while not told.events:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
