"""What this process knows of objects: their tables, and which records they hold."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.remote.objects.packing import Record, Table

__all__ = ["Directory", "Known"]


@dataclass(frozen=True, slots=True)
class Known:
    """An object as it was seen. tag: of this version of it, None where the store gives none. seen: when."""

    last: bytes
    table: Table
    tag: str | None
    seen: float


class Directory:
    """The objects seen last, by the name of their last record and by those of all. Thread-safe.

    A hint: objects come and go without anybody here being told.

    Args:
        limit: objects, of which those seen longest ago go first.
        fresh: seconds for which an object that was seen is taken to be still there.
        clock: monotonic seconds.
    """

    def __init__(self, limit: int, fresh: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._fresh = fresh
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: OrderedDict[bytes, Known] = OrderedDict()
        # Chains that part within a run have its first blocks in common: a record may lie in several objects.
        self._places: dict[bytes, dict[bytes, Record]] = {}
        self._damaged: set[bytes] = set()

    def put(self, last: bytes, table: Table, tag: str | None) -> Known:
        """An object was seen, or written."""
        known = Known(last, table, tag, self._clock())
        with self._lock:
            self._forget(last)
            self._objects[last] = known
            for record in table.records:
                self._places.setdefault(record.name, {})[last] = record
            while len(self._objects) > self._limit:
                self._forget(next(iter(self._objects)))
        return known

    def damaged(self, last: bytes) -> None:
        """An object is there, and cannot be read."""
        with self._lock:
            self._forget(last)
            self._damaged.add(last)

    def is_damaged(self, last: bytes) -> bool:
        """Whether that was said of it, and nothing since."""
        return last in self._damaged

    def forget(self, last: bytes) -> None:
        """An object is gone, or another one."""
        with self._lock:
            self._forget(last)

    def _forget(self, last: bytes) -> None:
        self._damaged.discard(last)
        known = self._objects.pop(last, None)
        for record in () if known is None else known.table.records:
            places = self._places[record.name]
            del places[last]
            if not places:
                del self._places[record.name]

    def find(self, name: bytes) -> tuple[Known, Record] | None:
        """The object seen last that holds a record, and where in it; None: nobody saw one."""
        with self._lock:
            return self._find(name, None)

    def find_chain(self, names: Sequence[bytes]) -> list[tuple[Known, Record] | None]:
        """`find` for records in chain order: each in the object of what comes after it, if that holds it.

        So a run's records, of which the last is in one object only, are all found in that one: records of one name are
        not the same to the last bit in each.
        """
        places: list[tuple[Known, Record] | None] = []
        below: dict[bytes, bytes] = {}
        with self._lock:
            for name in reversed(names):
                # Exact and lossy records are never in one object.
                found = self._find(name, below.get(name[-1:]))
                if found is not None:
                    below[name[-1:]] = found[0].last
                places.append(found)
        places.reverse()
        return places

    def _find(self, name: bytes, preferred: bytes | None) -> tuple[Known, Record] | None:
        places = self._places.get(name)
        if not places:
            return None
        last = preferred if preferred is not None and preferred in places else next(reversed(places))
        return self._objects[last], places[last]

    def holding(self, name: bytes) -> list[bytes]:
        """The objects that hold a record."""
        with self._lock:
            return list(self._places.get(name, ()))

    def is_fresh(self, known: Known) -> bool:
        """Whether it was seen a moment ago."""
        return self._clock() - known.seen < self._fresh
