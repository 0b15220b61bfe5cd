"""Expected: blocks that an engine will have, because prompts with them were sent there."""

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["Expected"]


class Expected:
    """A container of keys. For use from one thread.

    Events say what was stored; until then, and of engines that tell nothing, the router knows only where it sent what.

    Args:
        bound: blocks that are expected there after their requests have ended, at most; the latest ones.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._under_way: dict[bytes, int] = {}
        self._kept: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._under_way or key in self._kept

    def __len__(self) -> int:
        return len(self._under_way) + len(self._kept)

    def begin(self, keys: Sequence[bytes]) -> None:
        """A prompt with these blocks is sent there."""
        for key in keys:
            self._under_way[key] = self._under_way.get(key, 0) + 1

    def end(self, keys: Sequence[bytes], *, keep: bool) -> None:
        """Its request has ended; `keep`: the engine had the prompt's KV, and nobody will tell what becomes of it."""
        for key in keys:
            left = self._under_way[key] - 1
            if left:
                self._under_way[key] = left
            else:
                del self._under_way[key]
        if not keep:
            return
        # Tails first: what many prompts share is forgotten last.
        for key in reversed(keys):
            self._kept[key] = None
            self._kept.move_to_end(key)
        while len(self._kept) > self._bound:
            self._kept.popitem(last=False)

    def forget(self) -> None:
        """The engine was away: what it had may be gone."""
        self._kept.clear()
