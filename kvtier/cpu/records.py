"""RecordTable: which blocks the host tier holds, who holds on to them, and which leave. No bytes, no locks.

node     a ready key: its place in the prefix tree and in the eviction policy
extent   one version of a record's bytes in the slab; a replaced or removed one lives on until its last hold ends
handle   a reservation or a lease, which is one hold on an extent

holds of an extent = its reservation, or being its node's current version
                   + leases + operations that are copying its bytes right now
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.cpu.region import round_up
from kvtier.cpu.slab import HostSlab
from kvtier.errors import LeaseError, TierError
from kvtier.policies import EvictionPolicy
from kvtier.tiers import BlockRef, Exists, Full, Handle, Owner, Reservation

__all__ = ["Extent", "HostHandle", "Node", "RecordTable"]

_GONE = -1


class Extent:
    """Bytes of one record. `array` is uint8 [padded bytes]; `checksum` is empty until they are written."""

    __slots__ = ("array", "checksum", "fmt", "holds", "leases", "nbytes", "node", "offset", "ref")

    def __init__(self, ref: BlockRef, nbytes: int, fmt: str, offset: int, array: NDArray[np.uint8]) -> None:
        self.ref = ref
        self.nbytes = nbytes
        self.fmt = fmt
        self.offset = offset
        self.array = array
        self.checksum = b""
        self.holds = 1
        self.leases = 0
        self.node: Node | None = None


class Node:
    """A ready key. `slot` is its number in the eviction policy, -1 once it is gone."""

    __slots__ = ("children", "extent", "parent", "slot")

    def __init__(self, slot: int, extent: Extent, parent: "Node | None") -> None:
        self.slot = slot
        self.extent = extent
        self.parent = parent
        self.children: set[Node] = set()


class HostHandle(Handle):
    """A hold in the host tier. `anchor`: the parent that a reservation keeps from being evicted."""

    __slots__ = ("anchor", "extent", "leased")

    def __init__(self, extent: Extent, owner: Owner, *, leased: bool, anchor: Node | None = None) -> None:
        super().__init__(extent.ref, extent.nbytes, extent.fmt, owner)
        self.extent = extent
        self.leased = leased
        self.anchor = anchor


class RecordTable:
    """Index, prefix tree, holds and eviction of one host tier. Not thread-safe: the tier's lock covers it.

    Invariants:
        1. An extent's slab slot is freed exactly when its last hold ends.
        2. A node is pinned in the policy once per lease of its current extent and per reservation it anchors.
        3. A node goes with all its descendants. A child that is committed while its parent is absent is a root.
    """

    def __init__(self, slab: HostSlab, policy: EvictionPolicy) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.leases = 0
        self.reservations = 0
        self.evicted = 0
        self._slab = slab
        self._policy = policy
        self._pending: tuple[dict[bytes, Extent], dict[bytes, Extent]] = ({}, {})  # by exactness
        self._held: dict[Owner, dict[HostHandle, None]] = {}
        self._slots: list[Node | None] = []
        self._free_slots: list[int] = []

    # ---- writers

    def reserve(
        self, refs: Sequence[BlockRef], sizes: Sequence[int], fmts: Sequence[str], owner: Owner
    ) -> list[Reservation]:
        """See `Tier.reserve`."""
        results: list[Reservation] = []
        refused: set[bytes] = set()
        victims: list[int] = []
        for at, (ref, nbytes, fmt) in enumerate(zip(refs, sizes, fmts, strict=True)):
            orphaned = ref.parent in refused
            result: Reservation | None = self._existing(ref)
            if result is None and orphaned:
                result = Full("parent_refused")
            if result is None:
                result = self._reserve(ref, nbytes, fmt, owner, victims, len(refs) - at)
            if orphaned or isinstance(result, Full):
                refused.add(ref.key)
            results.append(result)
        return results

    def _existing(self, ref: BlockRef) -> Exists | None:
        node = self.nodes.get(ref.key)
        if node is not None and node.extent.ref.exact >= ref.exact:
            return Exists(ready=True)
        lossy, exact = self._pending
        if ref.key in exact or (not ref.exact and ref.key in lossy):
            return Exists(ready=False)
        return None

    def _reserve(
        self, ref: BlockRef, nbytes: int, fmt: str, owner: Owner, victims: list[int], remaining: int
    ) -> HostHandle | Full:
        if nbytes > self._slab.nbytes:
            return Full("oversized")
        anchor = self.nodes.get(ref.parent) if ref.parent is not None else None
        if anchor is not None:
            self._policy.pin((anchor.slot,))
            victims.clear()
        offset = self._make_room(nbytes, victims, remaining)
        if offset is None:
            self._unpin_anchor(anchor)
            return Full("no_space")
        extent = Extent(ref, nbytes, fmt, offset, self._slab.region.array[offset : offset + round_up(nbytes)])
        self._pending[ref.exact][ref.key] = extent
        handle = HostHandle(extent, owner, leased=False, anchor=anchor)
        self._held.setdefault(owner, {})[handle] = None
        self.reservations += 1
        return handle

    def _make_room(self, nbytes: int, victims: list[int], remaining: int) -> int | None:
        """Allocate, evicting one by one. `victims` are those of this batch that are still to go, next one last."""
        offset = self._slab.allocate(nbytes)
        while offset is None:
            if not victims:
                victims += reversed(self._policy.victims(remaining))
                if not victims:
                    return None
            node = self._slots[victims.pop()]
            if node is not None:
                self.evicted += self.drop(node)
            offset = self._slab.allocate(nbytes)
        return offset

    def _unpin_anchor(self, anchor: Node | None) -> None:
        if anchor is not None and anchor.slot != _GONE:
            self._policy.unpin((anchor.slot,))

    def commit(self, handles: Sequence[HostHandle]) -> None:
        """Make written reservations, parents first, current."""
        fresh: list[Node] = []
        for handle in handles:
            self._end_reservation(handle)
            extent = handle.extent
            node = self.nodes.get(extent.ref.key)
            if node is None:
                fresh.append(self._add_node(extent))
            elif node.extent.ref.exact and not extent.ref.exact:
                self._drop_hold(extent)
            else:
                self._replace(node, extent)
        fresh.reverse()
        parents = [None if node.parent is None else node.parent.slot for node in fresh]
        self._policy.insert([node.slot for node in fresh], parents)
        for handle in handles:
            self._unpin_anchor(handle.anchor)

    def _add_node(self, extent: Extent) -> Node:
        slot = self._free_slots.pop() if self._free_slots else len(self._slots)
        parent = self.nodes.get(extent.ref.parent) if extent.ref.parent is not None else None
        node = Node(slot, extent, parent)
        extent.node = node
        if parent is not None:
            parent.children.add(node)
        if slot == len(self._slots):
            self._slots.append(node)
        else:
            self._slots[slot] = node
        self.nodes[extent.ref.key] = node
        return node

    def _replace(self, node: Node, extent: Extent) -> None:
        old, node.extent, extent.node = node.extent, extent, node
        old.node = None
        self._policy.unpin([node.slot] * old.leases)
        self._policy.hit((node.slot,))
        self._drop_hold(old)

    def abort(self, handles: Iterable[HostHandle]) -> None:
        """Drop those of the handles that still are reservations."""
        for handle in handles:
            if not handle.leased and self._is_held(handle):
                self._end_reservation(handle)
                self._unpin_anchor(handle.anchor)
                self._drop_hold(handle.extent)

    def _end_reservation(self, handle: HostHandle) -> None:
        self._forget(handle)
        self.reservations -= 1
        del self._pending[handle.ref.exact][handle.ref.key]

    # ---- readers

    def lease(self, keys: Iterable[bytes], owner: Owner) -> list[HostHandle]:
        """Lease the leading keys that are ready, and renew their recency."""
        handles: list[HostHandle] = []
        slots: list[int] = []
        for key in keys:
            node = self.nodes.get(key)
            if node is None:
                break
            node.extent.holds += 1
            node.extent.leases += 1
            handles.append(HostHandle(node.extent, owner, leased=True))
            slots.append(node.slot)
        if handles:
            self._held.setdefault(owner, {}).update(dict.fromkeys(handles))
            self.leases += len(handles)
            slots.reverse()
            self._policy.hit(slots)
            self._policy.pin(slots)
        return handles

    def release(self, handles: Sequence[HostHandle]) -> None:
        """End leases."""
        pinned: list[int] = []
        for handle in handles:
            self._forget(handle)
            extent = handle.extent
            extent.leases -= 1
            if extent.node is not None:
                pinned.append(extent.node.slot)
            self._drop_hold(extent)
        self.leases -= len(handles)
        self._policy.unpin(pinned)

    def require(self, handles: Sequence[Handle], *, leased: bool | None = None) -> list[HostHandle]:
        """The handles, if they are live, distinct, and leases or reservations as asked (None: either).

        Raises:
            LeaseError: one is not.
        """
        live = [handle for handle in handles if isinstance(handle, HostHandle) and self._fits(handle, leased=leased)]
        if len(set(live)) == len(handles):
            return live
        kind = {None: "hold", True: "lease", False: "reservation"}[leased]
        good = set(live)
        bad = next((handle for handle in handles if handle not in good), None)
        if bad is None:
            raise LeaseError(f"the same {kind} twice in a batch of {len(handles)}: each may be used once")
        raise LeaseError(
            f"handle of block {bad.ref.key.hex()} (owner {bad.owner!r}) is no live {kind} of this tier: "
            "it ended before, or was never one"
        )

    def _fits(self, handle: HostHandle, *, leased: bool | None) -> bool:
        return self._is_held(handle) and (leased is None or handle.leased is leased)

    def held_by(self, owner: Owner) -> list[HostHandle]:
        """All live handles of an owner."""
        return list(self._held.get(owner, ()))

    def owners(self) -> list[Owner]:
        """Everyone who holds something."""
        return list(self._held)

    def hold(self, handles: Iterable[HostHandle]) -> None:
        """Keep the handles' bytes, whatever ends meanwhile, until `unhold`."""
        for handle in handles:
            handle.extent.holds += 1

    def unhold(self, handles: Iterable[HostHandle]) -> None:
        """Undo `hold`."""
        for handle in handles:
            self._drop_hold(handle.extent)

    def _is_held(self, handle: HostHandle) -> bool:
        return handle in self._held.get(handle.owner, ())

    def _forget(self, handle: HostHandle) -> None:
        held = self._held[handle.owner]
        del held[handle]
        if not held:
            del self._held[handle.owner]

    def _drop_hold(self, extent: Extent) -> None:
        extent.holds -= 1
        if extent.holds == 0:
            self._slab.free(extent.offset)

    # ---- removal

    def drop(self, node: Node) -> int:
        """Remove a node and its descendants; returns how many. Their bytes stay while somebody holds them."""
        doomed = [node]
        for parent in doomed:
            doomed.extend(parent.children)
        doomed.reverse()
        self._policy.remove([gone.slot for gone in doomed])
        if node.parent is not None:
            node.parent.children.discard(node)
        for gone in doomed:
            self._slots[gone.slot] = None
            self._free_slots.append(gone.slot)
            gone.slot = _GONE
            gone.extent.node = None
            del self.nodes[gone.extent.ref.key]
            self._drop_hold(gone.extent)
        return len(doomed)

    def drop_keys(self, keys: Iterable[bytes]) -> int:
        """Remove what is there of these keys, with descendants; returns how many records went."""
        # A key may have gone as a descendant of an earlier one.
        return sum(self.drop(node) for key in keys if (node := self.nodes.get(key)) is not None)

    def check(self) -> None:
        """Verify every invariant.

        Raises:
            TierError: one is broken.
        """
        self._slab.check()
        handles = [handle for held in self._held.values() for handle in held]
        leases = Counter(handle.extent for handle in handles if handle.leased)
        pending = [extent for side in self._pending for extent in side.values()]
        extents = {node.extent for node in self.nodes.values()} | set(pending) | set(leases)
        expected = Counter(pending) + Counter(node.extent for node in self.nodes.values()) + leases
        reserved = {handle.extent for handle in handles if not handle.leased}
        tree = all(
            self._slots[node.slot] is node
            and node.extent.node is node
            and (node.parent is None or (node.parent.slot != _GONE and node in node.parent.children))
            and all(child.parent is node and child.slot != _GONE for child in node.children)
            for node in self.nodes.values()
        )
        used = sum(round_up(extent.nbytes) for extent in extents)
        facts = {
            "holds": all(extent.holds >= expected[extent] and extent.leases == leases[extent] for extent in extents),
            "reservations": reserved == set(pending) and self.reservations == len(pending),
            "leases": self.leases == leases.total(),
            "tree": tree and len(self._slots) - len(self._free_slots) == len(self.nodes),
            "bytes": used <= self._slab.used_bytes <= self._slab.nbytes,
            "disjoint": len({extent.offset for extent in extents}) == len(extents),
        }
        broken = [name for name, good in facts.items() if not good]
        if broken:
            raise TierError(f"host records are inconsistent: {', '.join(broken)}")
