"""Namespaces that ended: their numbers are forgotten once nothing speaks of them any more."""

from collections import OrderedDict
from collections.abc import Callable, MutableMapping

from kvtier.keys import forget_namespace
from kvtier.service.cache.namespaces import OpenNamespace
from kvtier.store import TieredStore

__all__ = ["Leaving"]

# Of store namespaces, one per part: about 300 bytes each.
_MOST = 1 << 16


class Leaving:
    """What a tenant's clients made and dropped, so that names without end take no memory without end.

    A call that began before a namespace was dropped may still put a block of it. So its numbers stay for as long as
    such a call can last, and for as long as host holds something of it; what comes late is told in its name.

    Not thread-safe: of whoever names and drops.

    Args:
        store: of the tenant.
        parts: of its namespaces, by number.
        patience: seconds after which no call is under way any more that began before.
        clock: monotonic seconds.
        most: store namespaces that leave at a time.
    """

    def __init__(
        self,
        store: TieredStore,
        parts: MutableMapping[int, tuple[OpenNamespace, int]],
        patience: float,
        clock: Callable[[], float],
        most: int = _MOST,
    ) -> None:
        self._store = store
        self._parts = parts
        self._patience = patience
        self._clock = clock
        self._most = most
        self._spaces: OrderedDict[tuple[int, ...], float] = OrderedDict()
        self._count = 0

    def add(self, space: OpenNamespace) -> None:
        """A namespace ended, or never began."""
        if space.indices not in self._spaces:
            self._count += space.parts
        self._spaces[space.indices] = self._clock()
        self._spaces.move_to_end(space.indices)

    def back(self, space: OpenNamespace) -> None:
        """It begins again."""
        if self._spaces.pop(space.indices, None) is not None:
            self._count -= space.parts

    def sweep(self) -> None:
        """Forget those whose time has come."""
        before = self._clock() - self._patience
        due = [indices for indices, since in self._spaces.items() if since <= before]
        held = self._store.host.usage().keys() if due else set()
        for indices in due:
            left = held & set(indices)
            if left:
                # It came late; who reads it has as long again.
                self._store.clear(self._store.host.name, ns=left)
                self._spaces[indices] = self._clock()
                self._spaces.move_to_end(indices)
                continue
            del self._spaces[indices]
            self._count -= len(indices)
            for index in indices:
                self._parts.pop(index, None)
                self._store.forget(index)
                forget_namespace(index)

    @property
    def is_full(self) -> bool:
        """Whether so many leave that no further one may come now."""
        return self._count >= self._most
