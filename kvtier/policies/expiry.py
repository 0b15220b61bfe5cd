"""Expiry: the hints that count of live slots, and when each of them lapses."""

import sys
from array import array
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kvtier.hints import Hint

__all__ = ["Expiry"]

_LONGEST = 1e9  # seconds, thirty years: in ns it still fits a column


class _Noted(NamedTuple):
    hint: Hint
    since: int


class Expiry:
    """Hints by slot, only where one says something, and a heap of the instants at which they change their meaning.

    A timer that a later use has made too early is set again when it goes off; nothing is taken out of the heap before.

    Args:
        used: column of the last use of each slot [ns].
    """

    def __init__(self, used: "array[int]") -> None:
        self.hints: dict[int, _Noted] = {}
        self._used = used
        self._timers: list[tuple[int, int]] = []
        self._set: dict[int, int] = {}  # slot -> when its timer goes off
        self._limit = 64

    def note(self, slot: int, hint: Hint, now: int) -> bool:
        """Take a slot's hint in place of an earlier one; whether it says anything about eviction."""
        if hint.priority == 1 and hint.ttl is None and hint.reuse != "none":
            self.forget(slot)
            return False
        self.hints[slot] = _Noted(hint, now)
        self.renew(slot, now)
        return True

    def renew(self, slot: int, now: int) -> None:
        """A slot with a hint was used: what has lapsed holds again."""
        at = self._next_end(slot, now)
        if at is not None and at < self._set.get(slot, at + 1):
            self._set[slot] = at
            heappush(self._timers, (at, slot))
            self._compact()

    def forget(self, slot: int) -> None:
        """A slot is gone, or nothing is known of it any more."""
        self.hints.pop(slot, None)
        self._set.pop(slot, None)

    def dead(self, slot: int, now: int) -> bool:
        """Whether a slot is of no more use."""
        noted = self.hints.get(slot)
        return noted is not None and (noted.hint.reuse == "none" or now >= self._ttl_end(slot, noted))

    def weight(self, slot: int, now: int) -> float:
        """The priority of a slot while it holds, then 1."""
        noted = self.hints.get(slot)
        if noted is None or now >= self._priority_end(slot, noted):
            return 1.0
        return noted.hint.priority

    def due(self, now: int) -> Iterator[int]:
        """Slots whose hints lapsed, each once."""
        while self._timers and self._timers[0][0] <= now:
            at, slot = heappop(self._timers)
            if self._set.get(slot) == at:
                del self._set[slot]
                self.renew(slot, now)
                yield slot

    def _ttl_end(self, slot: int, noted: _Noted) -> int:
        ttl = _LONGEST if noted.hint.ttl is None else noted.hint.ttl
        return self._used[slot] + _nanoseconds(ttl)

    def _priority_end(self, slot: int, noted: _Noted) -> int:
        return max(self._used[slot], noted.since) + _nanoseconds(noted.hint.priority_ttl)

    def _next_end(self, slot: int, now: int) -> int | None:
        noted = self.hints[slot]
        if noted.hint.reuse == "none":
            return None
        ends = []
        if noted.hint.ttl is not None:
            ends.append(self._ttl_end(slot, noted))
        if noted.hint.priority != 1:
            ends.append(self._priority_end(slot, noted))
        return min((end for end in ends if end > now), default=None)

    def _compact(self) -> None:
        if len(self._timers) > self._limit:
            self._timers = [(at, slot) for slot, at in self._set.items()]
            heapify(self._timers)
            self._limit = 2 * len(self._timers) + 64

    @property
    def nbytes(self) -> int:
        """Bytes of memory; the hints themselves are their givers'."""
        return sys.getsizeof(self.hints) + sys.getsizeof(self._set) + sys.getsizeof(self._timers)


def _nanoseconds(seconds: float) -> int:
    return int(min(seconds, _LONGEST) * 1e9)
