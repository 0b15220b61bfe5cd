"""DeviceCopies: tells host which of its blocks the device holds too, since those may leave first."""

from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvtier.store import TieredStore

__all__ = ["DeviceCopies"]


@dataclass(slots=True)
class _Copy:
    """What a device block holds: the store keys of its parts; `marked`: the store was told."""

    keys: tuple[bytes, ...]
    marked: bool = False


class DeviceCopies:
    """Follows blocks from the moment they are saved or loaded until the device writes over them.

    Args:
        store: is told in batches, by `flush`.
    """

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._copies: dict[int, _Copy] = {}
        self._holders: Counter[bytes] = Counter()
        self._changes: dict[bytes, bool] = {}

    def filled(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """These device blocks now hold what `keys`, part by part, name."""
        parts = len(keys) // max(len(block_ids), 1)
        self.overwritten(set(block_ids))
        for at, block_id in enumerate(block_ids):
            self._copies[block_id] = _Copy(tuple(keys[at * parts : (at + 1) * parts]))

    def stored(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """These blocks are in the store: a copy of them, where the device still holds it, is one too many."""
        parts = len(keys) // max(len(block_ids), 1)
        for at, block_id in enumerate(block_ids):
            copy = self._copies.get(block_id)
            if copy is None or copy.marked or copy.keys[0] != keys[at * parts]:
                continue
            copy.marked = True
            self._holders[copy.keys[0]] += 1
            if self._holders[copy.keys[0]] == 1:
                self._note(copy.keys, above=True)

    def overwritten(self, block_ids: AbstractSet[int]) -> None:
        """These device blocks may hold something else from now on."""
        for block_id in self._copies.keys() & block_ids:
            copy = self._copies.pop(block_id)
            if not copy.marked:
                continue
            self._holders[copy.keys[0]] -= 1
            if not self._holders[copy.keys[0]]:
                del self._holders[copy.keys[0]]
                self._note(copy.keys, above=False)

    def _note(self, keys: Iterable[bytes], *, above: bool) -> None:
        self._changes |= dict.fromkeys(keys, above)

    def flush(self) -> None:
        """Tell the store what changed since the last call."""
        changes, self._changes = self._changes, {}
        for above in (True, False):
            keys = [key for key, is_above in changes.items() if is_above is above]
            if keys:
                self._store.duplicate(keys, above=above)
