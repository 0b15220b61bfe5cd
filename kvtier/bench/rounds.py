"""Rounds: the same kind of load again and again, on each target in turn.

What else a machine does in one minute hits one target and not the other; over rounds it hits both, and how far rounds
differ says how much of a difference is chance (`comparing`).
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvtier.bench.driving import Load, Run, check_room, measure
from kvtier.bench.targets import Target
from kvtier.errors import ConfigError, KVTierError

__all__ = ["Opener", "Rounds", "measure_rounds", "seeds_of"]

Opener: TypeAlias = Callable[[], Awaitable[Target]]


@dataclass(slots=True)
class Rounds:
    """What came of them.

    Args:
        planned: requests of all rounds together.
        runs: of each target, one for each round in which it was asked.
        interrupted: they were ended before their time.
        error: what ended them; None: nothing did.
    """

    planned: int
    runs: list[list[Run]]
    interrupted: bool = False
    error: KVTierError | None = None

    @property
    def totals(self) -> list[Run]:
        """All rounds of each target as one run; without a target that was not asked."""
        return [self._total(runs) for runs in self.runs if runs]

    def _total(self, runs: Sequence[Run]) -> Run:
        return replace(
            runs[0],
            planned=self.planned,
            samples=[sample for run in runs for sample in run.samples],
            seconds=sum(run.seconds for run in runs),
            interrupted=any(run.interrupted for run in runs) or sum(run.planned for run in runs) < self.planned,
        )


def seeds_of(seed: int, rounds: int) -> list[int]:
    """A seed for each round: the seed itself, then others that no neighbouring seed leads to.

    Raises:
        ConfigError: there is to be no round.
    """
    if rounds < 1:
        raise ConfigError(f"rounds {rounds}: expected at least 1")
    others = (random.Random(f"{seed}/round {number}") for number in range(1, rounds))  # noqa: S311  no secret
    return [seed, *(dice.getrandbits(64) for dice in others)]


async def measure_rounds(
    openers: Sequence[Opener], loads: Sequence[Load], progress: Callable[[], None] = lambda: None, *, in_process: bool
) -> Rounds:
    """Put targets under loads, one after the other in every round. Cancelled, it returns what was measured so far.

    Args:
        openers: of the targets.
        loads: one for each round.
        progress: called at the end of each request.
        in_process: the targets are engines here. One is open at a time, since each wants its memory, and they take
            turns in being asked first, since none finds what another has kept. Servers are all looked at before the
            first is asked, and keep their order: a later one may find what an earlier one left.

    Raises:
        KVTierError: nothing was measured; what ends it later is returned.
    """
    rounds = Rounds(sum(load.requests for load in loads), [[] for _ in openers])
    try:
        for opener in () if in_process else openers:
            async with _opened(opener, loads):
                pass
        for number, load in enumerate(loads):
            order = range(len(openers))
            for at in reversed(order) if in_process and number % 2 else order:
                async with _opened(openers[at], loads) as target:
                    rounds.runs[at].append(await measure(target, load, progress))
                if rounds.runs[at][-1].interrupted:
                    rounds.interrupted = True
                    return rounds
    except asyncio.CancelledError:
        if not any(rounds.runs):
            raise
        rounds.interrupted = True
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
    except KVTierError as error:
        if not any(rounds.runs):
            raise
        rounds.error = error
    return rounds


@asynccontextmanager
async def _opened(opener: Opener, loads: Sequence[Load]) -> AsyncIterator[Target]:
    target = await opener()
    try:
        for load in loads:
            check_room(load, target)
        yield target
    finally:
        await target.close()
