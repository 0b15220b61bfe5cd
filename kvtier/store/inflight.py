"""Joins: a second put or load of a key in flight waits for the first instead of repeating it."""

import threading
from collections.abc import Iterable, Sequence

__all__ = ["InFlight"]


class InFlight:
    """Which keys are being written into the host tier right now, and by whom others can wait for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[bytes, threading.Event] = {}

    def claim(self, keys: Sequence[bytes]) -> tuple[list[bool], list[threading.Event]]:
        """Claim what nobody works on.

        Returns:
            Per key, whether it is now the caller's; and the events of the others' keys, set when they are through.
        """
        event = threading.Event()
        mine, theirs = [], []
        with self._lock:
            for key in keys:
                holder = self._events.get(key)
                mine.append(holder is None)
                if holder is None:
                    self._events[key] = event
                elif holder is not event:
                    theirs.append(holder)
        return mine, theirs

    def finish(self, keys: Iterable[bytes]) -> None:
        """The caller's claimed keys were written, or never will be."""
        with self._lock:
            for event in {self._events.pop(key) for key in keys}:
                event.set()
