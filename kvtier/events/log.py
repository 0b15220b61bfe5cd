"""EventLog: the latest changes of a store's tiers, numbered, for whoever follows them."""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.tiers import BlockRef

__all__ = ["Event", "EventLog", "Kind", "Since"]

_CAPACITY = 1 << 16

_T = TypeVar("_T")

Kind: TypeAlias = Literal["stored", "removed", "cleared"]
"""What happened to blocks of a tier."""


class Event(NamedTuple):
    """One change of one tier: blocks of one namespace.

    sequence: 1 for the log's first, without gaps. time: seconds since the epoch. tier: its name. ns:
    `keys.namespace_index`; None for a tier that was cleared as a whole. refs: of `stored`, parents first; a key that is
    stored already has a better copy now. keys: store keys, of `stored` and `removed`. reason: of `removed` and
    `cleared`: `capacity`, `removed`, `damaged`, `cleared`, `closed`. whose: what the log's owner then had for `ns`.
    """

    sequence: int
    time: float
    kind: Kind
    tier: str
    ns: int | None
    refs: "tuple[BlockRef, ...]" = ()
    keys: tuple[bytes, ...] = ()
    reason: str = ""
    whose: Any = None


class _Change(NamedTuple):
    """An event without its number and time."""

    kind: Kind
    tier: str
    ns: int | None
    refs: "tuple[BlockRef, ...]" = ()
    keys: tuple[bytes, ...] = ()
    reason: str = ""


class Since(NamedTuple):
    """Events after a sequence number, oldest first. gap: some before them are not kept any more."""

    events: list[Event]
    gap: bool


class EventLog:
    """The latest events, as many as hold `capacity` blocks. Thread-safe; one lock and one append per batch.

    To follow: `since(at)`, then `wait(at)`, and so on with the last sequence number that was seen. After a gap what is
    known of the tiers is void: look them up anew, or wait for the next `cleared`.

    Args:
        capacity: blocks of all events that are kept, at least 1; an event without blocks counts as one.
        clock: seconds since the epoch.
        whose: says what a namespace is to the owner of the log, when something becomes of it; called under locks.

    Attributes:
        epoch: names this log; another one after a restart, whose sequence numbers begin anew.

    Raises:
        ConfigError: a capacity below 1.
    """

    def __init__(
        self,
        capacity: int = _CAPACITY,
        *,
        clock: Callable[[], float] = time.time,
        whose: Callable[[int], object] = lambda _: None,
    ) -> None:
        if capacity < 1:
            raise ConfigError(f"event log of {capacity} blocks: expected at least 1")
        self.epoch = secrets.token_hex(8)
        self._capacity = capacity
        self._clock = clock
        self._whose = whose
        self._events: deque[Event] = deque()
        self._weight = 0
        self._last = 0
        self._changed = threading.Condition()
        self._listeners: tuple[Callable[[], None], ...] = ()

    @property
    def last(self) -> int:
        """Sequence number of the latest event, 0 before the first."""
        return self._last

    # ---- what tiers tell

    def stored(self, tier: str, refs: "Sequence[BlockRef]") -> None:
        """Blocks are ready in a tier from now on. Tiers call it in the order of their changes, and under their lock."""
        if refs:
            groups = _by_namespace([(ref.ns, ref) for ref in refs])
            self._append([_Change("stored", tier, ns, some, tuple([ref.key for ref in some])) for ns, some in groups])

    def removed(self, tier: str, ns_keys: Sequence[tuple[int, bytes]], reason: str) -> None:
        """Blocks, as (namespace, store key), are not in a tier any more."""
        if ns_keys:
            groups = _by_namespace(ns_keys)
            self._append([_Change("removed", tier, ns, (), keys, reason) for ns, keys in groups])

    def cleared(self, tier: str, ns: int | None, reason: str = "cleared") -> None:
        """Nothing of a namespace (None: of any) is in a tier any more."""
        self._append([_Change("cleared", tier, ns, reason=reason)])

    def _append(self, changes: "Sequence[_Change]") -> None:
        now = self._clock()
        with self._changed:
            for change in changes:
                self._last += 1
                whose = None if change.ns is None else self._whose(change.ns)
                self._events.append(Event(self._last, now, *change, whose))
                self._weight += max(len(change.keys), 1)
            while self._weight > self._capacity and len(self._events) > 1:
                self._weight -= max(len(self._events.popleft().keys), 1)
            self._changed.notify_all()
            listeners = self._listeners
        for listener in listeners:
            listener()

    # ---- who follows

    def since(self, sequence: int, limit: int = 1024) -> Since:
        """Up to `limit` events after a sequence number, and whether some that came before them are gone.

        A number that this log never gave out is another log's: that is a gap, and all that is kept is the answer.
        """
        with self._changed:
            first = self._events[0].sequence if self._events else self._last + 1
            gap = not first - 1 <= sequence <= self._last
            start = 0 if gap else sequence + 1 - first
            stop = min(start + limit, len(self._events))
            # By index: those at the end, which followers ask for, are not reached by way of all others.
            return Since([self._events[at] for at in range(start, stop)], gap)

    def wait(self, sequence: int, timeout: float | None = None) -> bool:
        """Until there are events after a sequence number, `timeout` seconds at most; whether there are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._last > sequence, timeout)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Have `listener` called after every change, in the thread that made it and under its tier's lock.

        It must return at once and touch no tier: set an event, wake a loop. Returns what ends it.
        """
        with self._changed:
            self._listeners = (*self._listeners, listener)

        def end() -> None:
            with self._changed:
                # Equality, since bound methods are made anew by every look.
                self._listeners = tuple(one for one in self._listeners if one != listener)

        return end


def _by_namespace(items: Sequence[tuple[int, _T]]) -> list[tuple[int, tuple[_T, ...]]]:
    """Split a batch by namespace, in order; nearly every batch has one."""
    groups: dict[int, list[_T]] = {}
    for ns, item in items:
        groups.setdefault(ns, []).append(item)
    return [(ns, tuple(some)) for ns, some in groups.items()]
