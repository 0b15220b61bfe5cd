"""DeviceCopies: what the device holds of the store's blocks, where host is to hold it only as long as it has room."""

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from kvtier.store import TieredStore
from kvtier.tiers import BlockRef

__all__ = ["DeviceCopies", "Leaving"]

_T = TypeVar("_T")


class Leaving(NamedTuple):
    """A device block that is about to be overwritten, and what it holds until then: one ref per part."""

    block_id: int
    refs: tuple[BlockRef, ...]


@dataclass(slots=True)
class _Copy:
    """What a device block holds; `saved`: its bytes are right, and the store had them once."""

    refs: tuple[BlockRef, ...]
    saved: bool = False


class DeviceCopies:
    """Follows blocks from the moment they are saved or loaded until the device writes over them.

    While they are there, host is told that it may drop them first. When the last device block with some content is
    about to be overwritten and host did drop it, that block is leaving: it has to be saved again.

    Only exact blocks are followed: what was decoded from a lossy record must not be encoded once more.

    Args:
        store: is told in batches, once per step.
        parts: of a block.
        exclusive: False: host keeps what the device holds too like everything else, and nothing is followed.
    """

    def __init__(self, store: TieredStore, parts: int, *, exclusive: bool) -> None:
        self._store = store
        self._parts = parts
        self._exclusive = exclusive
        self._copies: dict[int, _Copy] = {}
        self._holders: Counter[bytes] = Counter()
        self._changes: dict[bytes, bool] = {}

    def filled(self, block_ids: Sequence[int], refs: Sequence[BlockRef]) -> None:
        """These device blocks now hold what `refs`, part by part, name, or will once this step has run."""
        if not self._exclusive:
            return
        self._overwritten(set(block_ids))
        for at, block_id in enumerate(block_ids):
            own = self._block(refs, at)
            if all(ref.exact for ref in own):
                self._copies[block_id] = _Copy(own)

    def stored(self, block_ids: Sequence[int], refs: Sequence[BlockRef]) -> None:
        """These blocks are in the store: a copy of them, where the device still holds it, is one too many."""
        for at, block_id in enumerate(block_ids):
            copy = self._copies.get(block_id)
            if copy is None or copy.saved or copy.refs != self._block(refs, at):
                continue
            copy.saved = True
            self._holders[copy.refs[0].key] += 1
            if self._holders[copy.refs[0].key] == 1:
                self._note(copy, above=True)

    def leading(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> int:
        """How many leading ones of these device blocks hold what `keys` name, and will be saved when they leave."""
        for at, block_id in enumerate(block_ids):
            copy = self._copies.get(block_id)
            if copy is None or not copy.saved or copy.refs[0].key != keys[at * self._parts]:
                return at
        return len(block_ids)

    def leaving(self, block_ids: AbstractSet[int]) -> list[Leaving]:
        """These device blocks may hold something else from now on: what is to be saved before, parents first."""
        gone = self._overwritten(block_ids)
        # Before host is asked: as long as it thinks that the device holds them too, they may leave at any moment.
        self._tell()
        keys = [ref.key for leaving in gone for ref in leaving.refs]
        there = self._store.held(keys, exact=True) if keys else []
        missing = [leaving for at, leaving in enumerate(gone) if not all(self._block(there, at))]
        return sorted(missing, key=lambda leaving: leaving.refs[0].depth)

    def close(self) -> None:
        """The device holds nothing any more."""
        self._overwritten(set(self._copies))
        self._tell()

    def _overwritten(self, block_ids: AbstractSet[int]) -> list[Leaving]:
        """Forget these blocks; those that were saved, and that no other device block equals."""
        last = []
        for block_id in self._copies.keys() & block_ids:
            copy = self._copies.pop(block_id)
            if not copy.saved:
                continue
            key = copy.refs[0].key
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._note(copy, above=False)
                last.append(Leaving(block_id, copy.refs))
        return last

    def _block(self, values: Sequence[_T], at: int) -> tuple[_T, ...]:
        return tuple(values[at * self._parts : (at + 1) * self._parts])

    def _note(self, copy: _Copy, *, above: bool) -> None:
        self._changes |= dict.fromkeys((ref.key for ref in copy.refs), above)

    def _tell(self) -> None:
        changes, self._changes = self._changes, {}
        for above in (True, False):
            keys = [key for key, is_above in changes.items() if is_above is above]
            if keys:
                self._store.duplicate(keys, above=above)
