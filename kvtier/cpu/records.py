"""RecordTable: which blocks the host tier holds, who holds on to them, and which leave. No bytes, no locks.

holds of an extent = its reservation, or being its node's current version
                   + leases + operations that are copying its bytes right now
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from typing import NamedTuple, TypeVar

from kvtier.cpu.holds import GONE, Extent, Fidelity, HostHandle, Lease, Node, Orphans, leave_as_much, usage
from kvtier.cpu.region import round_up
from kvtier.cpu.slab import HostSlab
from kvtier.errors import LeaseError, TierError
from kvtier.formats import fidelity
from kvtier.hints import NO_HINT, Hint
from kvtier.policies import EvictionPolicy
from kvtier.tiers import BlockRef, Exists, Full, Handle, Owner, Reservation

__all__ = ["Changes", "RecordTable"]

_EVICTIONS = 1 << 12
_MORE_SLOTS = 64
_NO_KEY = b""

_Kind = TypeVar("_Kind", Extent, Lease)


class Changes(NamedTuple):
    """What became ready and what went since somebody emptied them."""

    stored: list[BlockRef]
    removed: list[tuple[int, bytes]]


class RecordTable:
    """Index, prefix tree, holds and eviction of one host tier. Not thread-safe: the tier's lock covers it.

    Invariants:
        1. An extent's slab slot is freed exactly when its last hold ends.
        2. A node is pinned in the policy once per lease of its current extent and per reservation it anchors.
        3. A node goes with all its descendants. A child that is committed while its parent is absent is a root until
           the parent comes.
    """

    def __init__(self, slab: HostSlab, policy: EvictionPolicy) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.leases = 0
        self.reservations = 0
        self.evicted = 0
        self.evictions: deque[bytes] = deque(maxlen=_EVICTIONS)
        self.usage: dict[int, list[int]] = {}  # records and bytes by namespace
        self.changes: Changes | None = None  # somebody wants to know them
        self._slab = slab
        self._policy = policy
        self._pending: dict[bytes, tuple[Extent, ...]] = {}  # each better than those before it
        self._orphans = Orphans()
        self._held: dict[Owner, dict[HostHandle, None]] = {}
        self._slots: list[Node | None] = []
        self._free_slots: list[int] = []

    # ---- writers

    def reserve(
        self, refs: Sequence[BlockRef], sizes: Sequence[int], fmts: Sequence[str], owner: Owner, hints: Sequence[Hint]
    ) -> list[Reservation]:
        """See `Tier.reserve`."""
        ranks = {fmt: ((False, fidelity(fmt)), (True, fidelity(fmt))) for fmt in set(fmts)}
        wanted = [ranks[fmt][ref.exact] for ref, fmt in zip(refs, fmts, strict=True)]
        offsets = self._room_for_all(refs, sizes)
        if not offsets:
            return self._reserve_each(list(zip(refs, sizes, fmts, wanted, hints, strict=True)), owner)
        extents = list(map(Extent, refs, sizes, fmts, wanted, offsets, hints, repeat(owner)))
        self._reserve(extents, owner)
        return list(extents)

    def _room_for_all(self, refs: Sequence[BlockRef], sizes: Sequence[int]) -> list[int]:
        """Offsets for a batch of one size that is new here, which is nearly every batch.

        Empty for every other one, and where no simple eviction makes room: nothing has changed then.
        """
        if not (refs and self._are_new(refs) and sizes.count(sizes[0]) == len(refs)):
            return []
        offsets = self._slab.allocate_many(sizes[0], len(refs))
        try:
            if len(offsets) < len(refs):
                offsets += self._take_over(refs, sizes[0], len(refs) - len(offsets))
        finally:
            good = len(offsets) == len(refs)
            for offset in () if good else offsets:
                self._slab.free(offset)
        return offsets if good else []

    def _are_new(self, refs: Sequence[BlockRef]) -> bool:
        """Whether there is nothing of these keys, and none of them twice."""
        keys = {ref.key for ref in refs}
        return len(keys) == len(refs) and self.nodes.keys().isdisjoint(keys) and self._pending.keys().isdisjoint(keys)

    def _take_over(self, refs: Sequence[BlockRef], nbytes: int, count: int) -> list[int]:
        """Evict `count` records that leave as much room each; their offsets. Empty: the next victims are others."""
        if self._slab.over:  # after a resize: to take over would keep it so
            return []
        nodes = self.nodes
        anchors = [node.slot for ref in refs if (node := nodes.get(ref.parent or _NO_KEY)) is not None]
        self._policy.pin(anchors)
        try:
            victims = self._victims(count, [ref.key for ref in refs[-count:]])
            if len(victims) < count or not leave_as_much(victims, nbytes):
                return []
            self._remove(victims, evicted=True)
        finally:
            self._policy.unpin(anchors)
        self.evicted += count
        return [node.extent.offset for node in victims]

    def _reserve_each(
        self, records: Sequence[tuple[BlockRef, int, str, Fidelity, Hint]], owner: Owner
    ) -> list[Reservation]:
        """One record after the other, each evicting what it needs."""
        refs = [record[0] for record in records]
        kept: list[int] | None = None
        results: list[Reservation] = []
        refused: set[bytes] = set()
        victims: list[Node] = []
        try:
            for at, (ref, nbytes, fmt, rank, hint) in enumerate(records):
                orphaned = ref.parent in refused
                result: Reservation | None = self._existing(ref.key, rank)
                if result is None and orphaned:
                    result = Full("parent_refused")
                elif result is None and nbytes > self._slab.capacity:
                    result = Full("oversized")
                elif result is None:
                    offset = self._slab.allocate(nbytes)
                    if offset is None:
                        kept = self._pin_found(records) if kept is None else kept
                        offset = self._make_room(nbytes, victims, refs[at:])
                    result = Full("no_space")
                    if offset is not None:
                        result = Extent(ref, nbytes, fmt, rank, offset, hint, owner)
                        self._reserve([result], owner)
                if orphaned or isinstance(result, Full):
                    refused.add(ref.key)
                results.append(result)
        except BaseException:
            # A third party's policy died: nobody will ever hear of what was reserved until then.
            self.abort(result for result in results if isinstance(result, Extent))
            raise
        finally:
            self._policy.unpin(kept or ())
        return results

    def _pin_found(self, records: Sequence[tuple[BlockRef, int, str, Fidelity, Hint]]) -> list[int]:
        """Slots, pinned: neither what a batch finds here nor what it hangs from may leave to make room for it."""
        kept = []
        for ref, _, _, least, _ in records:
            node = self.nodes.get(ref.key)
            if node is not None and node.extent.fidelity >= least:
                kept.append(node.slot)
            anchor = self._parent_of(ref)
            if anchor is not None:
                kept.append(anchor.slot)
        self._policy.pin(kept)
        return kept

    def _parent_of(self, ref: BlockRef) -> Node | None:
        return None if ref.parent is None else self.nodes.get(ref.parent)

    def _existing(self, key: bytes, least: Fidelity) -> Exists | None:
        node = self.nodes.get(key)
        if node is not None and node.extent.fidelity >= least:
            return Exists(ready=True)
        versions = self._pending.get(key)
        if versions is not None and versions[-1].fidelity >= least:
            return Exists(ready=False)
        return None

    def _reserve(self, extents: Sequence[Extent], owner: Owner) -> None:
        nodes, pending = self.nodes, self._pending
        anchors = [nodes.get(extent.ref.parent or _NO_KEY) for extent in extents]
        pinned = [anchor.slot for anchor in anchors if anchor is not None]
        try:
            if pinned:
                self._policy.pin(pinned)
        except BaseException:
            for extent in extents:
                self._drop_hold(extent)
            raise
        for extent, anchor in zip(extents, anchors, strict=True):
            extent.holder = self
            extent.anchor = anchor
            key = extent.ref.key
            pending[key] = (*pending[key], extent) if key in pending else (extent,)
        self._held.setdefault(owner, {}).update(dict.fromkeys(extents))
        self.reservations += len(extents)

    def rename(
        self, extents: Sequence[Extent], refs: Sequence[BlockRef], owner: Owner, hints: Sequence[Hint]
    ) -> list[Reservation]:
        """See `GatewayTier.rename`."""
        rows = list(zip(extents, refs, hints, strict=True))
        if self._are_new(refs):
            self._rename(rows, owner)
            return list(extents)
        results: list[Reservation] = []
        for row in rows:
            extent, ref, _ = row
            existing = self._existing(ref.key, (ref.exact, fidelity(extent.fmt)))
            if existing is None:
                self._rename([row], owner)
            results.append(existing or extent)
        return results

    def _rename(self, rows: Sequence[tuple[Extent, BlockRef, Hint]], owner: Owner) -> None:
        extents = [extent for extent, _, _ in rows]
        self._end_reservations(extents)
        self._unpin_anchors(extents)
        for extent, ref, hint in rows:
            extent.rename(ref, (ref.exact, fidelity(extent.fmt)), hint, owner)
        self._reserve(extents, owner)

    def _make_room(self, nbytes: int, victims: list[Node], incoming: Sequence[BlockRef]) -> int | None:
        """Evict one by one until there is room. `victims` are those of this batch still to go, next one last."""
        offset = None
        while offset is None:
            if not victims:
                victims += reversed(self._victims(len(incoming), [ref.key for ref in incoming]))
                if not victims:
                    return None
            node = victims.pop()
            if node.slot != GONE:
                self.evicted += self.drop(node, evicted=True)
            offset = self._slab.allocate(nbytes)
        return offset

    def _victims(self, count: int, incoming: Sequence[bytes] = ()) -> list[Node]:
        """What the policy names, as far as it is here: whoever believed a bad one would look for room for ever."""
        slots = self._policy.victims(count, incoming)
        named = [self._slots[slot] for slot in slots if 0 <= slot < len(self._slots)]
        return [node for node in named if node is not None]

    def _unpin_anchors(self, extents: Sequence[Extent]) -> None:
        pinned: list[int] = []
        for extent in extents:
            anchor, extent.anchor = extent.anchor, None
            if anchor is not None and anchor.slot != GONE:
                pinned.append(anchor.slot)
        if pinned:
            self._policy.unpin(pinned)

    def commit(self, extents: Sequence[Extent]) -> None:
        """Make written reservations, parents first, current."""
        fresh: list[Node] = []
        hints: list[Hint] = []
        self._end_reservations(extents)
        nodes = self.nodes
        for extent in extents:
            node = nodes.get(extent.ref.key)
            if node is None:
                fresh.append(self._add_node(extent))
                hints.append(extent.hint)
            elif node.extent.fidelity >= extent.fidelity:
                self._drop_hold(extent)
            else:
                if node in fresh:  # two versions in one batch: the policy must know the first before its second
                    self._insert(fresh, hints)
                    fresh, hints = [], []
                self._replace(node, extent)
        self._insert(fresh, hints)
        self._unpin_anchors(extents)
        if self.changes is not None:
            # Of two versions of a key the better one counts, and of one that was no better, nothing.
            self.changes.stored.extend(extent.ref for extent in extents if extent.node is not None)

    def _insert(self, fresh: list[Node], hints: list[Hint]) -> None:
        slots: list[int] = []
        keys: list[bytes] = []
        parents: list[int | None] = []
        for node in reversed(fresh):
            slots.append(node.slot)
            keys.append(node.extent.ref.key)
            parents.append(None if node.parent is None else node.parent.slot)
        self._policy.insert(slots, keys, parents, None if hints.count(NO_HINT) == len(hints) else hints[::-1])
        for node in fresh if self._orphans.of else ():
            for child in list(self._orphans.of.get(node.extent.ref.key, ())):
                self._find_parent(child)

    def _find_parent(self, root: Node) -> None:
        """Hang a root below its parent if that is here, and not below the root itself: wrong keys can say so."""
        parent = self._parent_of(root.extent.ref)
        if parent is None or parent.root is root:
            return
        self._orphans.discard(root, parent.extent.ref.key)
        root.parent = parent
        parent.add(root)
        self._policy.adopt(root.slot, parent.slot)

    def _add_node(self, extent: Extent) -> Node:
        if not self._free_slots:
            start = len(self._slots)
            self._slots += [None] * _MORE_SLOTS
            self._free_slots += range(start + _MORE_SLOTS - 1, start - 1, -1)
        key, _, _, named, _ = extent.ref
        parent = None if named is None else self.nodes.get(named)
        node = extent.node = Node(self._free_slots.pop(), extent, parent)
        if parent is not None:
            parent.add(node)
        elif named is not None:
            self._orphans.add(node, named)
        self._slots[node.slot] = node
        self.nodes[key] = node
        self._account(extent, 1)
        return node

    def _account(self, extent: Extent, sign: int) -> None:
        ns = extent.ref.ns
        row = self.usage.get(ns)
        if row is None:
            row = self.usage[ns] = [0, 0]
        row[0] += sign
        row[1] += sign * extent.nbytes
        if not row[0]:
            del self.usage[ns]

    def _replace(self, node: Node, extent: Extent) -> None:
        old, node.extent, extent.node = node.extent, extent, node
        old.node = None
        self._account(extent, 1)
        self._account(old, -1)
        if node.parent is None and old.ref.parent != extent.ref.parent:
            self._replant(node, old.ref.parent)
        self._policy.unpin([node.slot] * old.leases)
        self._policy.hit((node.slot,))
        if extent.hint is not NO_HINT:
            self._policy.hint((node.slot,), (extent.hint,))
        self._drop_hold(old)

    def _replant(self, root: Node, waited_for: bytes | None) -> None:
        """A root's new version names another parent: the old one may not have known it."""
        if waited_for is not None:
            self._orphans.discard(root, waited_for)
        if root.extent.ref.parent is not None:
            self._orphans.add(root, root.extent.ref.parent)
            self._find_parent(root)

    def abort(self, handles: Iterable[HostHandle]) -> None:
        """Drop those of the handles that still are reservations; each counts once."""
        live = (handle for handle in handles if isinstance(handle, Extent) and handle.holder is self)
        reserved = list(dict.fromkeys(live))
        self._end_reservations(reserved)
        self._unpin_anchors(reserved)
        for extent in reserved:
            self._drop_hold(extent)

    def _end_reservations(self, extents: Sequence[Extent]) -> None:
        self._forget(extents)
        self.reservations -= len(extents)
        pending = self._pending
        for extent in extents:
            versions = pending.pop(extent.ref.key)
            if len(versions) > 1:
                pending[extent.ref.key] = tuple(version for version in versions if version is not extent)

    # ---- readers

    def lease(self, keys: Iterable[bytes], owner: Owner, *, exact: bool, renew: bool) -> list[Lease]:
        """Lease the leading keys that are ready (`exact`: and exact); `renew` their recency."""
        handles: list[Lease] = []
        slots: list[int] = []
        for key in keys:
            node = self.nodes.get(key)
            if node is None or (exact and not node.extent.ref.exact):
                break
            node.extent.holds += 1
            node.extent.leases += 1
            handles.append(Lease(node.extent, owner, self))
            slots.append(node.slot)
        if handles:
            self._held.setdefault(owner, {}).update(dict.fromkeys(handles))
            self.leases += len(handles)
            slots.reverse()
            if renew:
                self._policy.hit(slots)
            self._policy.pin(slots)
        return handles

    def release(self, handles: Sequence[Lease]) -> None:
        """End leases."""
        pinned: list[int] = []
        self._forget(handles)
        for handle in handles:
            extent = handle.extent
            extent.leases -= 1
            if extent.node is not None:
                pinned.append(extent.node.slot)
            self._drop_hold(extent)
        self.leases -= len(handles)
        self._policy.unpin(pinned)

    def require(self, handles: Sequence[Handle], kind: type[_Kind]) -> list[_Kind]:
        """The handles, if they are live, distinct, and all leases or all reservations (`kind`).

        Raises:
            LeaseError: one is not.
        """
        live = [handle for handle in handles if isinstance(handle, kind) and handle.holder is self]
        if len(set(live)) == len(handles):
            return live
        name = "lease" if kind is Lease else "reservation"
        good: set[Handle] = set(live)
        bad = next((handle for handle in handles if handle not in good), None)
        if bad is None:
            raise LeaseError(f"the same {name} twice in a batch of {len(handles)}: each may be used once")
        raise _not_live(bad, name)

    def live(self, handles: Sequence[Handle]) -> list[HostHandle]:
        """The handles, if they are live leases or reservations.

        Raises:
            LeaseError: one is not.
        """
        live = [handle for handle in handles if isinstance(handle, HostHandle) and handle.holder is self]
        if len(live) == len(handles):
            return live
        raise _not_live(next(handle for handle in handles if handle not in live), "hold")

    def release_owner(self, owner: Owner) -> None:
        """End all leases and reservations of an owner."""
        held = list(self._held.get(owner, ()))
        self.release([handle for handle in held if isinstance(handle, Lease)])
        self.abort(held)

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

    def _forget(self, handles: Sequence[HostHandle]) -> None:
        for handle in handles:
            handle.holder = None
            held = self._held[handle.owner]
            del held[handle]
            if not held:
                del self._held[handle.owner]

    def _drop_hold(self, extent: Extent) -> None:
        extent.holds -= 1
        if extent.holds == 0:
            self._slab.free(extent.offset)

    # ---- order

    def shrink(self, most: int) -> bool:
        """Evict up to `most` records while more is used than may be; False: that is all that can be done now."""
        for node in self._victims(most) if self._slab.over else ():
            if not self._slab.over:
                return False
            if node.slot != GONE:
                self.evicted += self.drop(node, evicted=True)
        return self._slab.over and bool(self._victims(1))

    def replace_policy(self, policy: EvictionPolicy) -> None:
        """Let another policy decide from now on. It learns of the records coldest first, with the hints they have."""
        tree = [node for node in self.nodes.values() if node.parent is None]
        for node in tree:
            tree.extend(node.children)
        free = self._victims(len(tree))
        seen = set(free)
        order = free + [node for node in reversed(tree) if node not in seen]
        policy.insert(
            [node.slot for node in order],
            [node.extent.ref.key for node in order],
            [None if node.parent is None else node.parent.slot for node in order],
            [node.extent.hint for node in order],
        )
        pending = [extent for versions in self._pending.values() for extent in versions]
        anchors = [extent.anchor for extent in pending if extent.anchor is not None and extent.anchor.slot != GONE]
        policy.pin([node.slot for node in order for _ in range(node.extent.leases)])
        policy.pin([anchor.slot for anchor in anchors])
        self._policy = policy

    def hint(self, keys: Sequence[bytes], hints: Sequence[Hint]) -> None:
        """See `Tier.hint`."""
        found = [(node, hint) for key, hint in zip(keys, hints, strict=True) if (node := self.nodes.get(key))]
        self._policy.hint([node.slot for node, _ in found], [hint for _, hint in found])
        for node, hint in found:
            node.extent.hint = hint

    def duplicate(self, keys: Iterable[bytes], *, above: bool) -> None:
        """See `HostTier.duplicate`."""
        self._policy.duplicate([node.slot for key in keys if (node := self.nodes.get(key))], above=above)

    def coldest(self, count: int) -> list[bytes]:
        """See `HostTier.coldest`."""
        return [node.extent.ref.key for node in self._victims(count)]

    # ---- removal

    def drop(self, node: Node, *, evicted: bool = False) -> int:
        """Remove a node and its descendants; returns how many. Their bytes stay while somebody holds them."""
        doomed = [node]
        for parent in doomed:
            doomed.extend(parent.children)
        doomed.reverse()
        self._remove(doomed, evicted=evicted)
        for gone in doomed:
            self._drop_hold(gone.extent)
        return len(doomed)

    def _remove(self, doomed: Sequence[Node], *, evicted: bool) -> None:
        """Take nodes, children before parents, out of everything; the memory of their extents stays allocated."""
        slots = [node.slot for node in doomed]
        self._policy.remove(slots, evicted=evicted)
        self._free_slots += slots
        if self.changes is not None:
            self.changes.removed.extend((node.extent.ref.ns, node.extent.ref.key) for node in doomed)
        for node in doomed:
            extent = node.extent
            key, _, _, named, _ = extent.ref
            if node.parent is not None:
                node.parent.discard(node)
            elif named is not None:
                self._orphans.discard(node, named)
            if evicted:
                self.evictions.append(key)
            self._slots[node.slot] = None
            node.slot = GONE
            extent.node = None
            del self.nodes[key]
            self._account(extent, -1)

    def drop_keys(self, keys: Iterable[bytes]) -> int:
        """Remove what is there of these keys, with descendants; returns how many records went."""
        # A key may have gone as a descendant of an earlier one.
        return sum(self.drop(node) for key in keys if (node := self.nodes.get(key)) is not None)

    def keys_in(self, spaces: Collection[int] | None) -> list[bytes]:
        """Of what is there in these namespaces; None: in all."""
        return [key for key, node in self.nodes.items() if spaces is None or node.extent.ref.ns in spaces]

    def check(self) -> None:
        """Verify every invariant.

        Raises:
            TierError: one is broken.
        """
        self._slab.check()
        handles = [handle for held in self._held.values() for handle in held]
        leases = Counter(handle.extent for handle in handles if isinstance(handle, Lease))
        pending = [extent for versions in self._pending.values() for extent in versions]
        extents = {node.extent for node in self.nodes.values()} | set(pending) | set(leases)
        expected = Counter(pending) + Counter(node.extent for node in self.nodes.values()) + leases
        reserved = {handle for handle in handles if isinstance(handle, Extent)}
        orphans = {id(n) for n in self.nodes.values() if n.parent is None and n.extent.ref.parent is not None}
        used = sum(round_up(extent.nbytes) for extent in extents)
        facts = {
            "holds": all(extent.holds >= expected[extent] and extent.leases == leases[extent] for extent in extents),
            "reservations": reserved == set(pending) and self.reservations == len(pending),
            "leases": self.leases == leases.total(),
            "tree": all(self._in_tree(key, node) for key, node in self.nodes.items()),
            "slots": len(self._slots) - len(self._free_slots) == len(self.nodes),
            "orphans": {id(node) for nodes in self._orphans.of.values() for node in nodes} == orphans,
            "bytes": used <= self._slab.used_bytes <= self._slab.nbytes,
            "usage": self.usage == usage(node.extent for node in self.nodes.values()),
            "disjoint": len({extent.offset for extent in extents}) == len(extents),
        }
        broken = [name for name, good in facts.items() if not good]
        if broken:
            raise TierError(f"host records are inconsistent: {', '.join(broken)}")

    def _in_tree(self, key: bytes, node: Node) -> bool:
        linked = self._slots[node.slot] is node and node.extent.node is node and node.extent.ref.key == key
        children = all(child.parent is node and child.slot != GONE for child in node.children)
        if node.parent is None:
            named = self._parent_of(node.extent.ref)
            return linked and children and (named is None or named.root is node)
        parent = node.parent
        return linked and children and parent.slot != GONE and node in parent.children


def _not_live(handle: Handle, kind: str) -> LeaseError:
    return LeaseError(
        f"handle of block {handle.ref.key.hex()} (owner {handle.owner!r}) is no live {kind} of this tier: "
        "it ended before, or was never one"
    )
