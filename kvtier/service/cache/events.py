"""A tenant's block events, in the names that its callers use."""

from collections.abc import Callable
from typing import NamedTuple

from kvtier.events import Event, EventLog
from kvtier.keys import store_keys
from kvtier.service.cache.namespaces import OpenNamespace

__all__ = ["BlockEvent", "Followed", "TenantEvents"]


class BlockEvent(NamedTuple):
    """One change of one tier.

    Args:
        sequence: see `kvtier.events.Event`, as are time, kind, tier and reason.
        namespace: name; None: of every one.
        part: of the blocks; None where `namespace` is None.
        keys: first 16 bytes of chain keys.
        parents: likewise, of `stored`; None for depth 0 or unknown.
        depths: of `stored`.
    """

    sequence: int
    time: float
    kind: str
    tier: str
    namespace: str | None
    part: int | None
    keys: tuple[bytes, ...] = ()
    parents: tuple[bytes | None, ...] = ()
    depths: tuple[int, ...] = ()
    reason: str = ""


class Followed(NamedTuple):
    """Events after a sequence number. gap: some before them are lost. last: the number to go on from."""

    events: list[BlockEvent]
    gap: bool
    last: int


class TenantEvents:
    """What one caller may see of its tenant's `EventLog`. Thread-safe.

    Args:
        log: the tenant's, whose `whose` is a namespace and a part: the namespace may be gone when its events are read.
        sees: whether the caller may use a namespace of this name.
    """

    def __init__(self, log: EventLog, sees: Callable[[str], bool]) -> None:
        self._log = log
        self._sees = sees

    @property
    def epoch(self) -> str:
        """Names the log; another one after a restart."""
        return self._log.epoch

    @property
    def last(self) -> int:
        """Sequence number of the latest event, 0 before the first."""
        return self._log.last

    def since(self, sequence: int, limit: int = 1024) -> Followed:
        """Up to `limit` events after a sequence number; numbers of others' events are left out."""
        events, gap = self._log.since(sequence, limit)
        told = [one for event in events if (one := self._told(event)) is not None]
        last = events[-1].sequence if events else self._log.last if gap else sequence
        return Followed(told, gap, last)

    def wait(self, sequence: int, timeout: float | None = None) -> bool:
        """See `EventLog.wait`."""
        return self._log.wait(sequence, timeout)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """See `EventLog.listen`."""
        return self._log.listen(listener)

    def _told(self, event: Event) -> BlockEvent | None:
        head = (event.sequence, event.time, event.kind, event.tier)
        if event.ns is None:
            return BlockEvent(*head, None, None, reason=event.reason)
        whose: tuple[OpenNamespace, int] | None = event.whose
        if whose is None or not self._sees(whose[0].spec.name):
            return None
        space, part = whose
        keys = tuple(store_keys(event.keys, space.masks[part]))
        parents = tuple(space.masked([ref.parent for ref in event.refs], part))
        depths = tuple(ref.depth for ref in event.refs)
        return BlockEvent(*head, space.spec.name, part, keys, parents, depths, event.reason)
