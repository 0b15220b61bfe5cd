"""Asks what the scripts say when they say it, and takes the time of every answer."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvtier.bench.scripts import Script, Turn
from kvtier.bench.targets import Failed, Question, Target, Usage
from kvtier.bench.texts import Texts
from kvtier.errors import ConfigError

__all__ = ["Load", "Run", "Sample", "check_room", "measure"]

# Where a target does not say how long its context is: no model takes more.
_MOST_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times are seconds since the run began.

    Args:
        is_first: nothing that its prompt begins with was sent before.
        due, sent, end: when it was to be sent, was sent, and was answered or failed.
        first: when the first piece of its answer came; None: none did.
        gaps: seconds between two pieces of the answer.
        usage: tokens, as the target counted them; None: it did not.
        error: kind of its failure; None: it was answered.
        message: the failure's.
    """

    is_first: bool
    due: float
    sent: float
    end: float
    first: float | None = None
    gaps: tuple[float, ...] = ()
    usage: Usage | None = None
    error: str | None = None
    message: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from sending it to the first piece; NaN without one."""
        return float("nan") if self.first is None else self.first - self.sent

    @property
    def latency(self) -> float:
        """Seconds from sending it to the end."""
        return self.end - self.sent

    @property
    def output_tokens(self) -> int:
        """Of the answer; where the target did not count them, pieces of the answer."""
        return self.usage.output_tokens if self.usage is not None else len(self.gaps) + (self.first is not None)

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 before there are two."""
        return sum(self.gaps) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(slots=True)
class Run:
    """What one target did.

    Args:
        model, place: of the target.
        planned: requests of the load.
        is_timed: they had times at which they were to be sent.
        samples: of those that ended, in the order in which they did.
        seconds: from the beginning to the end of the last one.
        interrupted: it was ended before all had been asked.
    """

    model: str
    place: str
    planned: int
    is_timed: bool = False
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    def summary(self) -> dict[str, Any]:
        """What a program wants to know of it beside its figures."""
        return {
            "model": self.model,
            "place": self.place,
            "planned": self.planned,
            "answered": len(self.answered),
            "seconds": self.seconds,
            "interrupted": self.interrupted,
        }

    @property
    def answered(self) -> list[Sample]:
        """Those that did not fail."""
        return [sample for sample in self.samples if sample.error is None]


@dataclass(frozen=True, slots=True)
class Load:
    """What a target is put under.

    Args:
        scripts: what is asked, and when.
        seed: of the texts: another one makes others, of which no cache knows anything.
        concurrency: requests under way at once, at most; the others wait in the order in which they came. None: all.
        warm_up: requests before the first that counts.
    """

    scripts: tuple[Script, ...]
    seed: int = 0
    concurrency: int | None = None
    warm_up: int = 1

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency {self.concurrency}: expected at least 1")
        if self.warm_up < 0:
            raise ConfigError(f"warm-up {self.warm_up}: expected a number of requests, 0 or more")

    @property
    def requests(self) -> int:
        """How many count."""
        return sum(len(script.turns) for script in self.scripts)


async def measure(target: Target, load: Load, progress: Callable[[], None] = lambda: None) -> Run:
    """Put a target under a load. Cancelled after the warm-up, it returns what was measured so far.

    Args:
        target: who is asked.
        load: what is asked.
        progress: called at the end of each request.

    Raises:
        ConfigError: a conversation does not fit into the target's context. Nothing of it was asked.
        Failed: the target does not answer the warm-up.
    """
    texts = await Texts.for_target(load.seed, target)
    check_room(load, target)
    drive = _Drive(target, texts, load, progress)
    await drive.warm_up()
    return await drive.run()


def check_room(load: Load, target: Target) -> None:
    """Whether all of a load fits into a target's context.

    Raises:
        ConfigError: a conversation does not.
    """
    longest = max(script.tokens for script in load.scripts)
    room = _MOST_TOKENS if target.context is None else target.context
    if longest > room:
        raise ConfigError(
            f"the longest prompt and its answer have {longest} tokens, more than {target.model}'s context of {room}: "
            "ask for less by prompt-tokens, turns or output-tokens, of a trace by length-scale"
        )


@dataclass(slots=True)
class _Answer:
    """As far as it came."""

    texts: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    usage: Usage | None = None


class _Drive:
    """One target under a load."""

    def __init__(self, target: Target, texts: Texts, load: Load, progress: Callable[[], None]) -> None:
        self._target = target
        self._texts = texts
        self._load = load
        self._place: AbstractAsyncContextManager[None] = (
            nullcontext() if load.concurrency is None else asyncio.Semaphore(load.concurrency)
        )
        self._progress = progress
        self._began = 0.0

    async def warm_up(self) -> None:
        """Ask what resembles the first request, and begins like nothing that is asked later."""
        turn = self._load.scripts[0].turns[0]
        for number in range(self._load.warm_up):
            pieces = [piece._replace(label=f"warm-up {number} {piece.label}") for piece in turn.pieces]
            question = Question(({"role": "user", "content": self._texts.write(pieces)},), turn.output_tokens)
            async with aclosing(self._target.answer(question)) as answer:
                async for _ in answer:
                    pass

    async def run(self) -> Run:
        """Ask everything. Cancelled, it ends with what there is."""
        scripts = self._load.scripts
        is_timed = any(script.at is not None for script in scripts)
        run = Run(self._target.model, self._target.place, self._load.requests, is_timed)
        self._began = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for script in scripts:
                    group.create_task(self._converse(script, run))
        except asyncio.CancelledError:
            run.interrupted = True
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
        run.seconds = self._now()
        return run

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _converse(self, script: Script, run: Run) -> None:
        """One conversation, up to its end or to the first turn that is not answered."""
        messages: list[dict[str, str]] = []
        # Another bench on this server has its own.
        session = f"bench-{self._load.seed}-{script.session}"
        due = script.at or 0.0
        for number, turn in enumerate(script.turns):
            due += turn.pause
            await asyncio.sleep(max(0.0, due - self._now()))
            ends = script.ends_session and number == len(script.turns) - 1
            async with self._place:
                messages.append({"role": "user", "content": self._texts.write(turn.pieces)})
                question = Question(messages, turn.output_tokens, session, ends)
                sample, answer = await self._ask(question, turn, due)
            run.samples.append(sample)
            self._progress()
            if sample.error is not None:
                return
            messages.append({"role": "assistant", "content": answer})
            due = sample.end

    async def _ask(self, question: Question, turn: Turn, due: float) -> tuple[Sample, str]:
        answer = _Answer()
        failure: Failed | None = None
        sent = self._now()
        try:
            await self._listen(question, answer)
        except Failed as error:
            failure = error
        end = self._now()
        if failure is None and not answer.times:
            # Its tokens have no text, as the one that ends an answer: they were there at the end at the latest.
            answer.times.append(end)
        sample = Sample(
            turn.is_first,
            due,
            sent,
            end,
            first=answer.times[0] if answer.times else None,
            gaps=tuple(after - before for before, after in pairwise(answer.times)),
            usage=answer.usage,
            error=None if failure is None else failure.kind,
            message="" if failure is None else str(failure),
        )
        return sample, "".join(answer.texts)

    async def _listen(self, question: Question, answer: _Answer) -> None:
        async with aclosing(self._target.answer(question)) as pieces:
            async for heard in pieces:
                if heard.text or heard.thought:
                    answer.times.append(self._now())
                answer.texts.append(heard.text)
                answer.usage = heard.usage or answer.usage
        if not answer.times and answer.usage is None:
            raise Failed("empty", f"{self._target.place}: an answer with nothing in it")
