"""Least recently used, tail first: the coldest block leaves first, and of one batch the deepest."""

from collections.abc import Sequence

from kvtier.errors import LeaseError

__all__ = ["LruPolicy"]

_ABSENT = -1
_NO_PARENT = -1


class LruPolicy:
    """Tail-first LRU. Implements `kvtier.policies.EvictionPolicy`.

    A doubly linked list threaded through arrays indexed by slot, so that every event is O(1) and allocates nothing:

        cold  _end <-> deepest of the oldest batch <-> ... <-> first block of the newest batch <-> _end  hot

    A slot's parent may be inserted after it in the same batch; it must not be removed before it.
    """

    def __init__(self) -> None:
        # Index 0 is the list's end; slot s lives at s + 1.
        self._colder = [0]
        self._hotter = [0]
        self._parent = [_NO_PARENT]
        self._children = [0]
        self._pins = [0]

    def insert(self, slots: Sequence[int], parents: Sequence[int | None]) -> None:
        """See `EvictionPolicy.insert`."""
        self._grow(max([*slots, *(parent for parent in parents if parent is not None)], default=-1))
        for slot, parent in zip(slots, parents, strict=True):
            node = slot + 1
            if self._hotter[node] != _ABSENT:
                raise LeaseError(f"slot {slot} is in the policy already; remove it before it is reused")
            if parent is not None:
                self._parent[node] = parent + 1
                self._children[parent + 1] += 1
            self._link_hottest(node)

    def hit(self, slots: Sequence[int]) -> None:
        """See `EvictionPolicy.hit`."""
        for slot in slots:
            self._unlink(slot + 1)
            self._link_hottest(slot + 1)

    def remove(self, slots: Sequence[int]) -> None:
        """See `EvictionPolicy.remove`. Children come before their parents."""
        for slot in slots:
            node = slot + 1
            if self._children[node] or self._hotter[node] == _ABSENT:
                raise LeaseError(f"slot {slot} has {self._children[node]} live children or is absent: cannot remove it")
            self._unlink(node)
            self._hotter[node] = _ABSENT
            self._pins[node] = 0
            parent = self._parent[node]
            if parent != _NO_PARENT:
                self._children[parent] -= 1
                self._parent[node] = _NO_PARENT

    def pin(self, slots: Sequence[int]) -> None:
        """See `EvictionPolicy.pin`."""
        for slot in slots:
            self._pins[slot + 1] += 1

    def unpin(self, slots: Sequence[int]) -> None:
        """See `EvictionPolicy.unpin`."""
        for slot in slots:
            if self._pins[slot + 1] < 1:
                raise LeaseError(f"slot {slot} is not pinned: cannot unpin it")
            self._pins[slot + 1] -= 1

    def victims(self, count: int) -> list[int]:
        """See `EvictionPolicy.victims`. A parent follows when all its children are among the victims before it."""
        chosen: list[int] = []
        chosen_children: dict[int, int] = {}
        passed: set[int] = set()
        node = self._hotter[0]
        while node and len(chosen) < count:
            candidate = node
            # A parent colder than its last child was passed over: it goes right after that child.
            while len(chosen) < count and self._leaf(candidate, chosen_children):
                chosen.append(candidate - 1)
                passed.discard(candidate)
                candidate = self._parent[candidate]
                if candidate == _NO_PARENT:
                    break
                chosen_children[candidate] = chosen_children.get(candidate, 0) + 1
                if candidate not in passed:
                    break
            else:
                passed.add(candidate)
            node = self._hotter[node]
        return chosen

    def _leaf(self, node: int, chosen_children: dict[int, int]) -> bool:
        return not self._pins[node] and self._children[node] == chosen_children.get(node, 0)

    def _grow(self, slot: int) -> None:
        missing = slot + 2 - len(self._hotter)
        if missing > 0:
            self._colder += [_ABSENT] * missing
            self._hotter += [_ABSENT] * missing
            self._parent += [_NO_PARENT] * missing
            self._children += [0] * missing
            self._pins += [0] * missing

    def _link_hottest(self, node: int) -> None:
        hottest = self._colder[0]
        self._hotter[hottest] = node
        self._colder[node] = hottest
        self._hotter[node] = 0
        self._colder[0] = node

    def _unlink(self, node: int) -> None:
        colder, hotter = self._colder[node], self._hotter[node]
        self._hotter[colder] = hotter
        self._colder[hotter] = colder
