"""Looking up where blocks are, without waiting for it where a tier is a network away."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from kvtier.connector.futures import settled
from kvtier.store import StoreMatch, TieredStore

__all__ = ["LookUps"]


class _LookUp(NamedTuple):
    first: int
    found: Future[StoreMatch]


class LookUps:
    """Look-ups of waiting requests, one each. Not thread-safe: the scheduler half's.

    Args:
        store: where blocks are.
        parts: per block.
    """

    def __init__(self, store: TieredStore, parts: int) -> None:
        self._store = store
        self._parts = parts
        self._going: dict[str, _LookUp] = {}

    def found(
        self, request_id: str, keys: Sequence[bytes], first: int, *, lossy: bool | None
    ) -> tuple[str, ...] | None:
        """Tier of each block of the leading run of `keys`, whose first block is at depth `first`; None: ask again."""
        if not self._store.has_remote:
            return self._store.match(keys, parts=self._parts, lossy=lossy, depth=first).tiers
        going = self._going.get(request_id)
        if going is None or going.first != first:
            found = self._store.find(keys, parts=self._parts, lossy=lossy, depth=first)
            going = self._going[request_id] = _LookUp(first, found)
        if not going.found.done():
            return None
        del self._going[request_id]
        return settled(going.found, StoreMatch(())).tiers

    def pending(self, request_id: str) -> bool:
        """Whether a request's look-up is under way, or its answer was not asked for yet."""
        return request_id in self._going

    def unanswered(self, request_id: str, first: int) -> bool:
        """Whether `found` would say None: before keys are made for it, step after step."""
        going = self._going.get(request_id)
        return going is not None and going.first == first and not going.found.done()

    def end(self, request_id: str) -> None:
        """The request waits no more."""
        self._going.pop(request_id, None)
