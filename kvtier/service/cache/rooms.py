"""Rooms: host memory that bytes are received into and then stay in, as blocks that were put."""

from collections.abc import Sequence

from kvtier.service.cache.errors import ServiceError
from kvtier.service.cache.inflight import InFlight
from kvtier.store import TieredStore
from kvtier.tiers import Handle

__all__ = ["Room", "Rooms"]

# Of a tenant's host memory: what is being received must not crowd out what is kept.
_SHARE = 8


class Room:
    """Memory for the bytes of some blocks. Nobody finds them there until they are put.

    Args:
        rooms: where it is from.
        handles: reservations in host.
        views: their memory, writable; not to be touched after a put that had them.
    """

    def __init__(self, rooms: "Rooms", handles: Sequence[Handle], views: Sequence[memoryview]) -> None:
        self._rooms = rooms
        self.handles = handles
        self.views = views

    def close(self) -> None:
        """Give back what no put took. Idempotent."""
        handles, self.handles = self.handles, ()
        self._rooms.give_back(handles)


class Rooms:
    """The rooms of one tenant. Thread-safe.

    Args:
        store: the tenant's.
        quota: its bytes in host.
    """

    def __init__(self, store: TieredStore, quota: int) -> None:
        self._store = store
        self._lent = InFlight(quota // _SHARE)

    def take(self, sizes: Sequence[int]) -> Room | None:
        """A room for blocks of these sizes; None: there is none now."""
        nbytes = sum(sizes)
        try:
            self._lent.take(nbytes)
        except ServiceError:
            return None
        handles = self._store.private.room(sizes)
        if not handles:
            self._lent.give(nbytes)
            return None
        host = self._store.host
        return Room(self, handles, [host.buffer(handle)[: handle.nbytes] for handle in handles])

    def give_back(self, handles: Sequence[Handle]) -> None:
        """End what a room had."""
        self._store.private.give_up(handles)
        self._lent.give(sum(handle.nbytes for handle in handles))
