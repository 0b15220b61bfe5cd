"""Rooms: host memory that bytes are received into and then stay in, as blocks that were put."""

from collections.abc import Sequence

from kvtier.cpu.region import round_up
from kvtier.keys import STORE_KEY_BYTES
from kvtier.service.cache.errors import ServiceError
from kvtier.service.cache.inflight import InFlight
from kvtier.service.cache.namespaces import BlockNames, OpenNamespace
from kvtier.store import Received, TieredStore
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
        heads: what to hash before the bytes of each, for the record's checksum; None: that is not known.
    """

    def __init__(
        self,
        rooms: "Rooms",
        handles: Sequence[Handle],
        views: Sequence[memoryview],
        heads: Sequence[bytes | None],
    ) -> None:
        self._rooms = rooms
        self.handles = handles
        self.views = views
        self.heads = heads

    def received(self, checksums: Sequence[bytes]) -> list[Received]:
        """What lies in it, with xxh3_128(head + bytes) of each; b"" where there was no head."""
        return [
            Received(handle, head or b"", checksum)
            for handle, head, checksum in zip(self.handles, self.heads, checksums, strict=True)
        ]

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

    def resize(self, quota: int) -> None:
        """The tenant has so many bytes in host from now on; what is lent stays lent."""
        self._lent.limit = quota // _SHARE

    def take(self, space: OpenNamespace, names: BlockNames, sizes: Sequence[int]) -> Room | None:
        """A room for these blocks, of these sizes; None: there is none now, or none is needed.

        What is there already, or is encoded, is not received into host memory: others would have to leave for it. What
        the blocks hang from does not leave for them.
        """
        heads = space.heads(names)
        keys = [head[:STORE_KEY_BYTES] for head in heads if head is not None]
        if self._store.encodes(space.indices[0]) or any(self._store.host.refs(keys)):
            return None
        nbytes = _occupied(sizes)
        try:
            self._lent.take(nbytes)
        except ServiceError:
            return None
        try:
            handles = self._store.private.room(sizes, space.above(names))
        except BaseException:  # a policy of somebody else's
            self._lent.give(nbytes)
            raise
        if not handles:
            self._lent.give(nbytes)
            return None
        views = zip(self._store.host.buffers(handles), sizes, strict=True)
        return Room(self, handles, [view[:nbytes] for view, nbytes in views], heads)

    def give_back(self, handles: Sequence[Handle]) -> None:
        """End what a room had."""
        try:
            self._store.private.give_up(handles)
        finally:
            self._lent.give(_occupied([handle.nbytes for handle in handles]))


def _occupied(sizes: Sequence[int]) -> int:
    """Bytes of host memory that blocks of these sizes take: many of a byte each must not be taken for nothing."""
    return sum(map(round_up, sizes))
