"""Prefetch: which sessions' blocks to bring up before their next turn."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from statistics import median
from typing import Protocol

from kvtier.errors import CapacityError

__all__ = ["NextTurn", "NoPrefetch", "PrefetchPolicy"]

_OWN_GAPS = 8
_ALL_GAPS = 255


class PrefetchPolicy(Protocol):
    """Told of turns, asked what is due. Not thread-safe: its caller takes turns. `now` is in seconds."""

    def turn_ended(self, session: str, keys: Sequence[bytes], now: float) -> None:
        """A session's turn is over; its next one will start with these blocks."""
        ...

    def due(self, now: float) -> list[tuple[str, Sequence[bytes]]]:
        """Sessions whose next turn is expected about now, each once per turn, and their blocks."""
        ...

    def ended(self, session: str) -> None:
        """A session has no further turn."""
        ...


class NoPrefetch:
    """Nothing is fetched early."""

    def turn_ended(self, session: str, keys: Sequence[bytes], now: float) -> None:
        """See `PrefetchPolicy.turn_ended`."""

    def due(self, now: float) -> list[tuple[str, Sequence[bytes]]]:
        """See `PrefetchPolicy.due`."""
        return []

    def ended(self, session: str) -> None:
        """See `PrefetchPolicy.ended`."""


class _Session:
    __slots__ = ("due", "gaps", "keys", "last")

    def __init__(self) -> None:
        self.keys: Sequence[bytes] = ()
        self.last: float | None = None
        self.due: float | None = None
        self.gaps: deque[float] = deque(maxlen=_OWN_GAPS)


class NextTurn:
    """Expects a session's next turn after the median of its own gaps; without any, after the median of all.

    Args:
        lead_seconds: how long before the expected turn its blocks are due.
        capacity: sessions that are remembered; the one whose turn is longest ago is forgotten first.
        most_keys: likewise, of all sessions together.

    Raises:
        CapacityError: no session.
    """

    def __init__(self, lead_seconds: float = 5.0, capacity: int = 10_000, most_keys: int = 1 << 20) -> None:
        if capacity < 1:
            raise CapacityError(f"prefetch for {capacity} sessions: expected at least one")
        self._lead = lead_seconds
        self._capacity = capacity
        self._most_keys = most_keys
        self._count = 0
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._gaps: deque[float] = deque(maxlen=_ALL_GAPS)
        self._queue: list[tuple[float, str]] = []

    def turn_ended(self, session: str, keys: Sequence[bytes], now: float) -> None:
        """See `PrefetchPolicy.turn_ended`."""
        state = self._sessions.setdefault(session, _Session())
        self._sessions.move_to_end(session)
        if state.last is not None:
            state.gaps.append(now - state.last)
            self._gaps.append(now - state.last)
        self._count += len(keys) - len(state.keys)
        state.keys, state.last, state.due = keys, now, None
        gaps = state.gaps or self._gaps
        if gaps:
            state.due = now + max(median(gaps) - self._lead, 0.0)
            self._enqueue(state.due, session)
        while len(self._sessions) > self._capacity or self._count > self._most_keys:
            self._count -= len(self._sessions.popitem(last=False)[1].keys)

    def due(self, now: float) -> list[tuple[str, Sequence[bytes]]]:
        """See `PrefetchPolicy.due`."""
        found: list[tuple[str, Sequence[bytes]]] = []
        while self._queue and self._queue[0][0] <= now:
            at, session = heappop(self._queue)
            state = self._sessions.get(session)
            if state is not None and state.due == at:
                state.due = None
                found.append((session, state.keys))
        return found

    def ended(self, session: str) -> None:
        """See `PrefetchPolicy.ended`."""
        state = self._sessions.pop(session, None)
        self._count -= 0 if state is None else len(state.keys)

    def _enqueue(self, at: float, session: str) -> None:
        heappush(self._queue, (at, session))
        if len(self._queue) > 2 * self._capacity:
            self._queue = [(state.due, name) for name, state in self._sessions.items() if state.due is not None]
            heapify(self._queue)
