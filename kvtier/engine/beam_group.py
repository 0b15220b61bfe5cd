"""BeamGroup: the requests that are one search's beams, in step with each other.

A beam whose candidates are there pauses until those of all others are. What does not go on is ended first, then the
others fork, so that a search never holds more tails than beams. A beam that was preempted meanwhile comes back with the
same candidates.
"""

from collections.abc import Sequence
from itertools import count

from kvtier.engine.beam import BeamSearch, Candidate
from kvtier.engine.request import MARK, Request
from kvtier.engine.scheduler import Scheduler

__all__ = ["BeamGroup"]


class BeamGroup:
    """One request's beam search, as the scheduler sees it.

    Attributes:
        search: what was found.
        beams: the requests, in the search's order.

    Args:
        search: at its start.
        first: the request that computes the prompt.
    """

    def __init__(self, search: BeamSearch, first: Request) -> None:
        self.search = search
        self.beams = [first]
        self._name = first.id
        self._numbers = count(1)
        self._brought: dict[str, list[Candidate]] = {}

    def bring(self, request: Request, candidates: Sequence[tuple[int, float]]) -> bool:
        """A beam's candidates are there; returns whether those of all beams are."""
        request.settled = True
        self._brought[request.id] = [Candidate(*candidate) for candidate in candidates]
        return len(self._brought) == len(self.beams)

    def advance(self, scheduler: Scheduler, now: float) -> list[tuple[Request, Request]]:
        """All candidates are there: go on with the best, at time `now`, or end all beams.

        Returns:
            The beams that are new, each with the one that it was forked from.
        """
        going = self.search.advance([self._brought[beam.id] for beam in self.beams])
        self._brought.clear()
        parents = {choice.parent for choice in going}
        for at, beam in enumerate(self.beams):
            if at not in parents:
                scheduler.end(beam.id, "stop")
        beams, kept, forks = [], set[int](), []
        for choice in going:
            parent = self.beams[choice.parent]
            if choice.parent in kept:
                parent = self._forked(scheduler, parent, choice.token, now)
                forks.append((parent, self.beams[choice.parent]))
            kept.add(choice.parent)
            beams.append(parent)
        for beam, choice in zip(beams, going, strict=True):
            if beam is self.beams[choice.parent]:
                beam.append([choice.token], now)
        self.beams = beams
        return forks

    def _forked(self, scheduler: Scheduler, parent: Request, token: int, now: float) -> Request:
        child = parent.twin(f"{self._name}{MARK}{next(self._numbers)}")
        child.append([token], now)
        scheduler.fork(parent, child)
        return child
