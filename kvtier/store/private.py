"""Private objects: KV that one owner alone may use, in host, for as long as it says.

Each is a reservation that is never committed: no look-up finds it, no put joins it, nothing evicts it, and it goes to
no tier below. It ends with `drop`, or with the tier.
"""

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import chain, repeat
from typing import NamedTuple

from kvtier.keys import STORE_KEY_BYTES, namespace_index
from kvtier.layout import Span
from kvtier.store.gateway import GatewayTier
from kvtier.store.lanes import Lane, Operation, Steps
from kvtier.store.port import Port
from kvtier.tiers import OWN_WORK, RECEIVING, BlockRef, Handle, Reservation, Status, block_checksum

__all__ = ["PrivateObject", "PrivateObjects"]

_OWNER = OWN_WORK + "private"
_NAMESPACE = hashlib.sha256(b"kvtier private objects").digest()
_RAW = "raw"


class PrivateObject(NamedTuple):
    """One part of one block, raw. Whoever was given it ends it."""

    handle: Handle
    checksum: bytes


class PrivateObjects:
    """Keeps private objects in host. Thread-safe.

    Args:
        host, gate: the host tier and its port.
        lane: where bytes are copied.
    """

    def __init__(self, host: GatewayTier, gate: Port, lane: Lane) -> None:
        self._host = host
        self._gate = gate
        self._lane = lane
        self._ns = namespace_index(_NAMESPACE)

    def keep(self, buffers: Sequence[memoryview]) -> "Future[tuple[PrivateObject, ...]]":
        """Copy raw parts into host, all of them or, where it has no room, none. The buffers must stay as they are."""
        nothing: tuple[PrivateObject, ...] = ()
        return Operation(self._steps(buffers), lambda: nothing).start()

    def _steps(self, buffers: Sequence[memoryview]) -> Steps[tuple[PrivateObject, ...]]:
        yield self._lane
        return self._gate.attempt("keep", lambda: self._keep(buffers), ())

    def _keep(self, buffers: Sequence[memoryview]) -> tuple[PrivateObject, ...]:
        refs = [BlockRef(key, self._ns, 0, None, exact=True) for key in _keys(len(buffers))]
        slots = self._host.reserve(refs, [data.nbytes for data in buffers], [_RAW] * len(refs), _OWNER)
        handles = [slot for slot in slots if isinstance(slot, Handle)]
        written = False
        try:
            if len(handles) == len(buffers):
                statuses = self._host.write(list(zip(handles, buffers, strict=True))).wait().statuses
                written = all(status is Status.OK for status in statuses)
        finally:
            if not written:
                self._host.abort(handles)
        if not written:
            return ()
        return tuple(
            PrivateObject(handle, block_checksum(handle.ref, _RAW, data))
            for handle, data in zip(handles, buffers, strict=True)
        )

    def room(self, sizes: Sequence[int], above: Sequence[bytes] = ()) -> list[Handle]:
        """Memory to receive blocks of these sizes into, to be put with `owned`; none where host does not have it all.

        Whoever was given it ends it by `give_up`, whatever became of the put.

        Args:
            sizes: bytes of each.
            above: store keys of what the blocks hang from, one for each of them at most: those that are in host do not
                leave to make this room, nor as long as it is held.
        """
        parents = chain(above, repeat(None))
        refs = [
            BlockRef(key, self._ns, -1, parent, exact=True)
            for key, parent in zip(_keys(len(sizes)), parents, strict=False)
        ]
        nothing: list[Reservation] = []
        slots = self._gate.attempt(
            "room", lambda: self._host.reserve(refs, sizes, [_RAW] * len(refs), RECEIVING), nothing
        )
        handles = [slot for slot in slots if isinstance(slot, Handle)]
        if len(handles) < len(sizes):
            self.give_up(handles)
            return []
        return handles

    def give_up(self, handles: Sequence[Handle]) -> None:
        """End what `room` gave. Idempotent."""
        if handles:
            self._gate.attempt("give_up", lambda: self._host.abort(handles), None)

    def spans(self, objects: Iterable[PrivateObject]) -> list[Span]:
        """Where they lie in host's regions: the leading ones that are as they were when they were kept."""
        return self._gate.attempt("private", lambda: self._good(objects), [])

    def _good(self, objects: Iterable[PrivateObject]) -> list[Span]:
        spans: list[Span] = []
        for handle, checksum in objects:
            if block_checksum(handle.ref, _RAW, self._host.buffer(handle)[: handle.nbytes]) != checksum:
                break
            spans.append(self._host.span(handle))
        return spans

    def drop(self, objects: Iterable[PrivateObject]) -> None:
        """End them. Idempotent."""
        handles = [handle for handle, _ in objects]
        if handles:
            self._gate.attempt("drop", lambda: self._host.abort(handles), None)


def _keys(count: int) -> list[bytes]:
    """Keys that nobody knows."""
    random = secrets.token_bytes(STORE_KEY_BYTES * count)
    return [random[at : at + STORE_KEY_BYTES] for at in range(0, len(random), STORE_KEY_BYTES)]
