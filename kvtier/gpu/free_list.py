"""FreeList: a doubly linked list of block ids whose links are two arrays."""

from collections.abc import Iterator

__all__ = ["FreeList"]


class FreeList:
    """Ids 0..capacity-1 in an order; every operation takes constant time and allocates nothing.

    The list is a ring through one sentinel, so no operation has a special case for its ends. After
    `FreeKVCacheBlockQueue` of vLLM, without an object per block. Membership is the caller's to know.

    Args:
        capacity: number of ids; at first all are in the list, in ascending order.
    """

    __slots__ = ("_next", "_previous", "_sentinel", "size")

    def __init__(self, capacity: int) -> None:
        self.size = capacity
        self._sentinel = capacity
        self._next: list[int] = [*range(1, capacity + 1), 0]
        self._previous: list[int] = [capacity, *range(capacity)]

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        at = self._next[self._sentinel]
        while at != self._sentinel:
            yield at
            at = self._next[at]

    def pop_first(self) -> int:
        """Take out the first id; the list must not be empty."""
        first = self._next[self._sentinel]
        self.remove(first)
        return first

    def remove(self, item: int) -> None:
        """Take out an id that is in the list."""
        before, after = self._previous[item], self._next[item]
        self._next[before] = after
        self._previous[after] = before
        self.size -= 1

    def push_first(self, item: int) -> None:
        """Put in an id that is not in the list, before all others."""
        self._link(self._sentinel, item, self._next[self._sentinel])

    def push_last(self, item: int) -> None:
        """Put in an id that is not in the list, after all others."""
        self._link(self._previous[self._sentinel], item, self._sentinel)

    def _link(self, before: int, item: int, after: int) -> None:
        self._next[before] = self._previous[after] = item
        self._previous[item], self._next[item] = before, after
        self.size += 1
