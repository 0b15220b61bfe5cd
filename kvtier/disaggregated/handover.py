"""Handover: one prompt that another engine prefills, as the decode side sees it."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Ending", "Handover", "Outcome"]

Ending: TypeAlias = Literal["finished", "failed", "lost", "late", "cancelled"]
"""finished: all came that will come. failed: the engine did not compute it. lost: the connection ended. late: its
deadline passed, or the peer got nowhere. cancelled: nobody wanted it any more."""


class Outcome(NamedTuple):
    """How a handover ended, and how many leading blocks are in the shared directory."""

    ending: Ending
    blocks: int


class Handover:
    """A prompt on its way. Changed by its client's thread only, but for `cancel`.

    Args:
        total: blocks that are wanted.
        cancel: tells the client.
        arrived: told (start, stop) of blocks that have come into the shared directory, in the client's thread.
    """

    def __init__(self, total: int, cancel: Callable[[], object], arrived: Callable[[int, int], None] | None) -> None:
        self.future: Future[Outcome] = Future()  # resolved exactly once, whatever happens to the peer
        # asyncio would cancel it together with whoever waits for it, and nobody would tell the peer: `cancel` does.
        self.future.set_running_or_notify_cancel()
        self.total = total
        self.blocks = 0
        self.computed = False
        self._cancel = cancel
        self._arrived = arrived

    def cancel(self) -> None:
        """Nobody wants it any more. Of no effect once it has ended. From any thread."""
        if not self.future.done():
            self._cancel()

    def advance(self, blocks: int) -> None:
        """So many blocks are there now; for the client."""
        start, self.blocks = self.blocks, max(self.blocks, min(blocks, self.total))
        if self.blocks > start and self._arrived is not None:
            self._arrived(start, self.blocks)

    def end(self, ending: Ending) -> None:
        """Nothing more will come; for the client."""
        if not self.future.done():
            self.future.set_result(Outcome(ending, self.blocks))
