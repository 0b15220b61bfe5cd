"""Hinting: what callers know of a request's blocks, on its way from the engine's API to the store."""

from collections.abc import Callable, Sequence

from kvtier.connector.parts import Parts
from kvtier.hints import Hint
from kvtier.hooks import FinishReason, RequestView
from kvtier.store import TieredStore

__all__ = ["Hinting", "block_hints"]


def block_hints(request: RequestView, start: int, stop: int, parts: int) -> list[Hint] | None:
    """One hint per part of blocks [start, stop), or None where nothing is known of them."""
    if request.hints is None:
        return None
    return [hint for depth in range(start, stop) for hint in [request.hints.at(depth)] * parts]


class Hinting:
    """Hints for blocks that are there already, and the end of sessions.

    Args:
        store: is told.
        parts: of a block.
    """

    def __init__(self, store: TieredStore, parts: Parts) -> None:
        self._store = store
        self._parts = parts
        self._last_turns: dict[str, str] = {}  # request -> session that ends with it
        self._ending: dict[str, str] = {}

    def admitted(self, request: RequestView) -> None:
        """The request starts: what it found, wherever that is, is of its session and priority from now on."""
        if request.hints is None:
            return
        if request.hints.end_of_session and request.hints.session is not None:
            self._last_turns[request.id] = request.hints.session
        blocks = len(request.chain)
        hints: Sequence[Hint] | None = block_hints(request, 0, blocks, len(self._parts))
        if blocks and hints is not None:
            self._store.hint(self._parts.keys(request.chain), hints)

    def finished(self, request_id: str, reason: FinishReason) -> None:
        """The request ended, for good unless it was preempted."""
        session = self._last_turns.pop(request_id, None)
        if session is not None and reason != "preempt":
            self._ending[request_id] = session

    def settle(self, is_saving: Callable[[str], bool]) -> None:
        """End the sessions whose last request has nothing on its way to the store any more."""
        for request_id in [request_id for request_id in self._ending if not is_saving(request_id)]:
            self._store.end_session(self._ending.pop(request_id))
