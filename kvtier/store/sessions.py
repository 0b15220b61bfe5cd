"""Sessions: which blocks belong to which conversation alone, and when its next turn may come."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtier.hints import Hint
from kvtier.policies.prefetch import NoPrefetch, PrefetchPolicy

__all__ = ["SessionBook", "Turns"]

_QUIET_SECONDS = 1.0


class SessionBook:
    """A bounded record of the keys that sessions put. Thread-safe.

    A key that two sessions named, or a session and somebody without one, belongs to nobody. What is forgotten costs
    a refetch at most.

    Args:
        limit: keys, of all sessions together; the session that was quiet longest is forgotten first.
    """

    def __init__(self, limit: int = 1 << 20) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._keys: OrderedDict[str, dict[bytes, None]] = OrderedDict()
        self._owner: dict[bytes, str] = {}
        self._shared: OrderedDict[bytes, None] = OrderedDict()
        self._count = 0

    def note(self, keys: Sequence[bytes], hints: Sequence[Hint]) -> set[str]:
        """These keys were put, or hinted at, with these hints; returns the sessions among them."""
        sessions = {hint.session for hint in hints if hint.session is not None}
        if not sessions and not self._keys:
            return sessions
        with self._lock:
            for key, hint in zip(keys, hints, strict=True):
                self._note(key, hint.session)
            while self._count > self._limit:
                self._forget(next(iter(self._keys)))
            while len(self._shared) > self._limit:
                self._shared.popitem(last=False)
        return sessions

    def _note(self, key: bytes, session: str | None) -> None:
        if session is not None:
            known = self._keys.setdefault(session, {})
            self._keys.move_to_end(session)
            self._count += key not in known
            known[key] = None
        owner = self._owner.get(key)
        if key in self._shared or (owner is not None and owner != session):
            self._owner.pop(key, None)
            self._shared[key] = None
            self._shared.move_to_end(key)
        elif session is not None:
            self._owner[key] = session

    def keys(self, session: str) -> list[bytes]:
        """Everything that a session put, in order."""
        with self._lock:
            return list(self._keys.get(session, ()))

    def end(self, session: str) -> list[bytes]:
        """Forget a session; returns the keys that were its alone."""
        with self._lock:
            return self._forget(session)

    def _forget(self, session: str) -> list[bytes]:
        known = self._keys.pop(session, {})
        self._count -= len(known)
        own = [key for key in known if self._owner.get(key) == session]
        for key in own:
            del self._owner[key]
        return own

    def __len__(self) -> int:
        return len(self._keys)


class Turns:
    """Tells a prefetch policy when turns end, and asks it what is due. Thread-safe.

    A turn has ended once nothing was put for its session for a second.

    Args:
        policy: predicts.
        book: what to bring.
        clock: the store's.
    """

    def __init__(self, policy: PrefetchPolicy, book: SessionBook, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._book = book
        self._clock = clock
        self._lock = threading.Lock()
        self._active: dict[str, float] = {}

    def note(self, sessions: set[str]) -> None:
        """Something was put for these sessions."""
        if isinstance(self._policy, NoPrefetch):
            return
        now = self._clock()
        with self._lock:
            self._active.update(dict.fromkeys(sessions, now))

    def end(self, session: str) -> None:
        """No further turn follows."""
        with self._lock:
            self._active.pop(session, None)
            self._policy.ended(session)

    def due(self) -> list[tuple[str, Sequence[bytes]]]:
        """Sessions whose next turn is expected, and what it needs in host."""
        now = self._clock()
        with self._lock:
            quiet = [session for session, last in self._active.items() if now - last >= _QUIET_SECONDS]
            for session in quiet:
                self._policy.turn_ended(session, self._book.keys(session), self._active.pop(session))
            return list(self._policy.due(now))
