"""Joins: a second put or load of a key in flight waits for the first instead of repeating it."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from kvtier.tiers import BlockRef

__all__ = ["Claim", "InFlight"]


class Claim(NamedTuple):
    """What `InFlight.claim` answers.

    mine: per ref, whether it is now the caller's. theirs: the events of the others' keys, set when they are through.
    """

    mine: list[bool]
    theirs: list[threading.Event]


class InFlight:
    """Which keys are being written into one tier right now, and by whom others can wait for them.

    What is in flight lossy does not keep an exact one from being written beside it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._going: dict[tuple[bytes, bool], tuple[BlockRef, threading.Event]] = {}
        self._deleted: set[bytes] = set()

    def claim(self, refs: Sequence[BlockRef]) -> Claim:
        """Claim what nobody works on at this or higher fidelity."""
        event = threading.Event()
        mine, theirs = [], []
        with self._lock:
            if not self._going and len({ref.key for ref in refs}) == len(refs):
                self._going = {(ref.key, ref.exact): (ref, event) for ref in refs}
                return Claim([True] * len(refs), [])
            for ref in refs:
                holder = self._going.get((ref.key, True))
                if holder is None and not ref.exact:
                    holder = self._going.get((ref.key, False))
                mine.append(holder is None)
                if holder is None:
                    self._going[ref.key, ref.exact] = ref, event
                elif holder[1] is not event:
                    theirs.append(holder[1])
        return Claim(mine, theirs)

    def finish(self, refs: Sequence[BlockRef]) -> list[bytes]:
        """The caller's claimed keys were written, or never will be.

        Returns:
            Those that were deleted meanwhile, for the caller to remove again.
        """
        deleted = []
        with self._lock:
            events = set()
            if len(refs) == len(self._going) and not self._deleted:  # nobody else's are in flight
                events = {event for _, event in self._going.values()}
                self._going.clear()
                refs = ()
            for ref in refs:
                events.add(self._going.pop((ref.key, ref.exact))[1])
                if ref.key in self._deleted:
                    deleted.append(ref.key)
                    if (ref.key, not ref.exact) not in self._going:
                        self._deleted.discard(ref.key)
            for event in events:
                event.set()
        return deleted

    def delete(self, is_gone: Callable[[BlockRef], bool]) -> None:
        """What of these blocks is in flight was deleted."""
        with self._lock:
            self._deleted.update(ref.key for ref, _ in self._going.values() if is_gone(ref))

    def going(self, keys: Collection[bytes]) -> list[threading.Event]:
        """The events of those of these keys that are in flight, see `Claim.theirs`."""
        with self._lock:
            return [event for (key, _), (_, event) in self._going.items() if key in keys]

    @staticmethod
    def wait(events: Iterable[threading.Event], deadline: float | None) -> None:
        """Wait until others' keys are through, or until the deadline."""
        for event in events:
            event.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
