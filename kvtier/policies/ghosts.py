"""GhostList: keys of blocks that left lately, oldest first."""

import sys
from collections import OrderedDict

from kvtier.keys import STORE_KEY_BYTES

__all__ = ["GhostList"]

_KEY_BYTES = sys.getsizeof(bytes(STORE_KEY_BYTES))


class GhostList:
    """At most `limit` keys; the oldest is forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Not a dict: taking the first key of one that shrinks from its front walks over every key that is gone.
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        """Remember a key as the newest."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._limit:
            self.forget_oldest()

    def discard(self, key: bytes) -> bool:
        """Forget a key; whether it was there."""
        if key not in self._keys:
            return False
        del self._keys[key]
        return True

    def forget_oldest(self) -> None:
        """Forget the oldest key; there must be one."""
        self._keys.popitem(last=False)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, keys included."""
        return sys.getsizeof(self._keys) + _KEY_BYTES * len(self._keys)
