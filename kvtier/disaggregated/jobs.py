"""Jobs: prompts that are being prefilled for others, and how far the shared directory shows them."""

import time
from asyncio import Task
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.disaggregated.identity import Side
from kvtier.errors import TierError
from kvtier.store.lookup import leading_run, present

__all__ = ["Job", "Visibility"]

_ANSWER_SECONDS = 1.0
_QUIET_SECONDS = 1.0
_HUNG_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class Job:
    """One prompt.

    keys        [0 ...... visible) [visible ............ total)
                 in the directory   computed or not, and not there yet

    Args:
        id: the connection's.
        keys: store keys of the blocks that are wanted, block-major.
        total: how many blocks they are.
        visible: of them, leading ones that are in the shared directory.
        computed: whether the engine is through with it.
        moved: when that, or `visible`, changed for the last time.
        task: what drives the engine.
    """

    id: int
    keys: Sequence[bytes]
    total: int
    visible: int = 0
    computed: bool = False
    moved: float = field(default_factory=time.monotonic)
    task: Task[None] | None = None

    def complete(self) -> bool:
        """Whether all that is wanted was computed and is there."""
        return self.computed and self.visible == self.total


class Visibility:
    """Looks jobs up in the shared directory. For use from one thread.

    Args:
        side: whose directory that is.
    """

    def __init__(self, side: Side) -> None:
        self._store = side.store
        self._tier = side.directory
        self._exact = side.identity.exact
        self._parts = len(side.parts)

    def is_given_up(self, job: Job, now: float) -> bool:
        """Whether what was computed of a job does not arrive: it was dropped on its way, or the directory hangs."""
        quiet = now - job.moved
        if not job.computed or quiet < _QUIET_SECONDS:
            return False
        # A new directory may take a while to take its first block: what is queued for it is not lost, nor what a busy
        # machine has not brought into host by now.
        return quiet >= _HUNG_SECONDS or (not self._store.waiting_bytes and self._in_host(job))

    def advanced(self, jobs: Iterable[Job]) -> list[Job]:
        """Those of which more blocks are there than before. One batch for all, as long as nothing has come."""
        waiting = [job for job in jobs if job.visible < job.total]
        try:
            here = self._present([self._block(job, job.visible) for job in waiting])
            moved = [job for job, there in zip(waiting, here, strict=True) if there]
            for job in moved:
                job.visible += 1 + leading_run(job.total - job.visible - 1, self._from(job, job.visible + 1))
                job.moved = time.monotonic()
        except TierError:
            return []  # it does not answer; whoever waits for it has a deadline
        return moved

    def _in_host(self, job: Job) -> bool:
        """Whether the next block has come into host, from where it goes to the directory."""
        try:
            return all(present(self._store.host, self._block(job, job.visible), _ANSWER_SECONDS, exact=self._exact))
        except TierError:
            return True  # nothing comes from a host that is closed

    def _from(self, job: Job, first: int) -> Callable[[Sequence[int]], Sequence[bool]]:
        return lambda places: self._present([self._block(job, first + at) for at in places])

    def _block(self, job: Job, at: int) -> Sequence[bytes]:
        return job.keys[at * self._parts : (at + 1) * self._parts]

    def _present(self, blocks: Sequence[Sequence[bytes]]) -> list[bool]:
        """Which of these blocks are there in all their parts."""
        keys = [key for block in blocks for key in block]
        here = present(self._tier, keys, _ANSWER_SECONDS, exact=self._exact) if keys else []
        return [all(here[at : at + self._parts]) for at in range(0, len(here), self._parts)]
