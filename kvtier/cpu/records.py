"""RecordTable: which blocks the host tier holds, who holds on to them, and which leave. No bytes, no locks.

holds of an extent = its reservation, or being its node's current version
                   + leases + operations that are copying its bytes right now
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from kvtier.cpu.holds import GONE, Extent, Fidelity, HostHandle, Node
from kvtier.cpu.region import round_up
from kvtier.cpu.slab import HostSlab
from kvtier.errors import LeaseError, TierError
from kvtier.formats import fidelity
from kvtier.hints import NO_HINT, Hint
from kvtier.policies import EvictionPolicy
from kvtier.tiers import BlockRef, Exists, Full, Handle, Owner, Reservation

__all__ = ["RecordTable"]

_EVICTIONS = 1 << 16


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
        self._slab = slab
        self._policy = policy
        self._pending: dict[bytes, dict[Fidelity, Extent]] = {}
        self._orphans: dict[bytes, set[Node]] = {}  # by the key of the absent parent
        self._held: dict[Owner, dict[HostHandle, None]] = {}
        self._slots: list[Node | None] = []
        self._free_slots: list[int] = []

    # ---- writers

    def reserve(
        self, refs: Sequence[BlockRef], sizes: Sequence[int], fmts: Sequence[str], owner: Owner, hints: Sequence[Hint]
    ) -> list[Reservation]:
        """See `Tier.reserve`."""
        ranks = {fmt: fidelity(fmt) for fmt in set(fmts)}
        wanted = [(ref.exact, ranks[fmt]) for ref, fmt in zip(refs, fmts, strict=True)]
        kept: list[int] | None = None
        results: list[Reservation] = []
        refused: set[bytes] = set()
        victims: list[Node] = []
        try:
            for at, (ref, nbytes, fmt) in enumerate(zip(refs, sizes, fmts, strict=True)):
                orphaned = ref.parent in refused
                result: Reservation | None = self._existing(ref.key, wanted[at])
                if result is None and orphaned:
                    result = Full("parent_refused")
                elif result is None and nbytes > self._slab.nbytes:
                    result = Full("oversized")
                elif result is None:
                    offset = self._slab.allocate(nbytes)
                    if offset is None:
                        kept = self._pin_found(refs, wanted) if kept is None else kept
                        offset = self._make_room(nbytes, victims, refs[at:])
                    result = Full("no_space")
                    if offset is not None:
                        memory = self._slab.region.view(offset, round_up(nbytes))
                        result = self._reserve(Extent(ref, nbytes, fmt, wanted[at], offset, memory), owner, hints[at])
                if orphaned or isinstance(result, Full):
                    refused.add(ref.key)
                results.append(result)
        except BaseException:
            # A third party's policy died: nobody will ever hear of what was reserved until then.
            self.abort(result for result in results if isinstance(result, HostHandle))
            raise
        finally:
            self._policy.unpin(kept or ())
        return results

    def _pin_found(self, refs: Sequence[BlockRef], wanted: Sequence[Fidelity]) -> list[int]:
        """Slots, pinned: neither what a batch finds here nor what it hangs from may leave to make room for it."""
        kept = []
        for ref, least in zip(refs, wanted, strict=True):
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
        if versions is not None and max(versions) >= least:
            return Exists(ready=False)
        return None

    def _reserve(self, extent: Extent, owner: Owner, hint: Hint) -> HostHandle:
        anchor = self._parent_of(extent.ref)
        if anchor is not None:
            self._policy.pin((anchor.slot,))
        self._pending.setdefault(extent.ref.key, {})[extent.fidelity] = extent
        handle = HostHandle(extent, owner, leased=False, anchor=anchor, hint=hint)
        handle.holder = self
        self._held.setdefault(owner, {})[handle] = None
        self.reservations += 1
        return handle

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

    def _unpin_anchor(self, anchor: Node | None) -> None:
        if anchor is not None and anchor.slot != GONE:
            self._policy.unpin((anchor.slot,))

    def commit(self, handles: Sequence[HostHandle]) -> None:
        """Make written reservations, parents first, current."""
        fresh: list[Node] = []
        hints: list[Hint] = []
        for handle in handles:
            self._end_reservation(handle)
            extent = handle.extent
            node = self.nodes.get(extent.ref.key)
            if node is None:
                fresh.append(self._add_node(extent))
                hints.append(handle.hint)
            elif node.extent.fidelity >= extent.fidelity:
                self._drop_hold(extent)
            else:
                if node in fresh:  # two versions in one batch: the policy must know the first before its second
                    self._insert(fresh, hints)
                    fresh, hints = [], []
                self._replace(node, extent, handle.hint)
        self._insert(fresh, hints)
        for handle in handles:
            self._unpin_anchor(handle.anchor)

    def _insert(self, fresh: list[Node], hints: list[Hint]) -> None:
        deepest_first = fresh[::-1]
        slots = [node.slot for node in deepest_first]
        keys = [node.extent.ref.key for node in deepest_first]
        parents = [None if node.parent is None else node.parent.slot for node in deepest_first]
        self._policy.insert(slots, keys, parents, None if hints.count(NO_HINT) == len(hints) else hints[::-1])
        for node in fresh if self._orphans else ():
            for child in list(self._orphans.get(node.extent.ref.key, ())):
                self._find_parent(child)

    def _find_parent(self, root: Node) -> None:
        """Hang a root below its parent if that is here, and not below the root itself: wrong keys can say so."""
        parent = self._parent_of(root.extent.ref)
        if parent is None or _root_of(parent) is root:
            return
        self._forget_orphan(root, parent.extent.ref.key)
        root.parent = parent
        parent.add(root)
        self._policy.adopt(root.slot, parent.slot)

    def _add_node(self, extent: Extent) -> Node:
        slot = self._free_slots.pop() if self._free_slots else len(self._slots)
        parent = self._parent_of(extent.ref)
        node = Node(slot, extent, parent)
        extent.node = node
        if parent is not None:
            parent.add(node)
        elif extent.ref.parent is not None:
            self._orphans.setdefault(extent.ref.parent, set()).add(node)
        if slot == len(self._slots):
            self._slots.append(node)
        else:
            self._slots[slot] = node
        self.nodes[extent.ref.key] = node
        return node

    def _replace(self, node: Node, extent: Extent, hint: Hint) -> None:
        old, node.extent, extent.node = node.extent, extent, node
        old.node = None
        if node.parent is None and old.ref.parent != extent.ref.parent:
            self._replant(node, old.ref.parent)
        self._policy.unpin([node.slot] * old.leases)
        self._policy.hit((node.slot,))
        if hint is not NO_HINT:
            self._policy.hint((node.slot,), (hint,))
        self._drop_hold(old)

    def _replant(self, root: Node, waited_for: bytes | None) -> None:
        """A root's new version names another parent: the old one may not have known it."""
        if waited_for is not None:
            self._forget_orphan(root, waited_for)
        if root.extent.ref.parent is not None:
            self._orphans.setdefault(root.extent.ref.parent, set()).add(root)
            self._find_parent(root)

    def abort(self, handles: Iterable[HostHandle]) -> None:
        """Drop those of the handles that still are reservations."""
        for handle in handles:
            if not handle.leased and handle.holder is self:
                self._end_reservation(handle)
                self._unpin_anchor(handle.anchor)
                self._drop_hold(handle.extent)

    def _end_reservation(self, handle: HostHandle) -> None:
        self._forget(handle)
        self.reservations -= 1
        versions = self._pending[handle.ref.key]
        del versions[handle.extent.fidelity]
        if not versions:
            del self._pending[handle.ref.key]

    # ---- readers

    def lease(self, keys: Iterable[bytes], owner: Owner, *, exact: bool, renew: bool) -> list[HostHandle]:
        """Lease the leading keys that are ready (`exact`: and exact); `renew` their recency."""
        handles: list[HostHandle] = []
        slots: list[int] = []
        for key in keys:
            node = self.nodes.get(key)
            if node is None or (exact and not node.extent.ref.exact):
                break
            node.extent.holds += 1
            node.extent.leases += 1
            handle = HostHandle(node.extent, owner, leased=True)
            handle.holder = self
            handles.append(handle)
            slots.append(node.slot)
        if handles:
            self._held.setdefault(owner, {}).update(dict.fromkeys(handles))
            self.leases += len(handles)
            slots.reverse()
            if renew:
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
        return handle.holder is self and (leased is None or handle.leased is leased)

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

    def _forget(self, handle: HostHandle) -> None:
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

    def hint(self, keys: Sequence[bytes], hints: Sequence[Hint]) -> None:
        """See `Tier.hint`."""
        found = [(node.slot, hint) for key, hint in zip(keys, hints, strict=True) if (node := self.nodes.get(key))]
        self._policy.hint([slot for slot, _ in found], [hint for _, hint in found])

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
        self._policy.remove([gone.slot for gone in doomed], evicted=evicted)
        if node.parent is not None:
            node.parent.discard(node)
        elif node.extent.ref.parent is not None:
            self._forget_orphan(node, node.extent.ref.parent)
        if evicted:
            self.evictions += [gone.extent.ref.key for gone in doomed]
        for gone in doomed:
            self._slots[gone.slot] = None
            self._free_slots.append(gone.slot)
            gone.slot = GONE
            gone.extent.node = None
            del self.nodes[gone.extent.ref.key]
            self._drop_hold(gone.extent)
        return len(doomed)

    def _forget_orphan(self, node: Node, parent: bytes) -> None:
        siblings = self._orphans[parent]
        siblings.discard(node)
        if not siblings:
            del self._orphans[parent]

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
        pending = [extent for versions in self._pending.values() for extent in versions.values()]
        extents = {node.extent for node in self.nodes.values()} | set(pending) | set(leases)
        expected = Counter(pending) + Counter(node.extent for node in self.nodes.values()) + leases
        reserved = {handle.extent for handle in handles if not handle.leased}
        orphans = {id(n) for n in self.nodes.values() if n.parent is None and n.extent.ref.parent is not None}
        used = sum(round_up(extent.nbytes) for extent in extents)
        facts = {
            "holds": all(extent.holds >= expected[extent] and extent.leases == leases[extent] for extent in extents),
            "reservations": reserved == set(pending) and self.reservations == len(pending),
            "leases": self.leases == leases.total(),
            "tree": all(self._in_tree(key, node) for key, node in self.nodes.items()),
            "slots": len(self._slots) - len(self._free_slots) == len(self.nodes),
            "orphans": {id(node) for nodes in self._orphans.values() for node in nodes} == orphans,
            "bytes": used <= self._slab.used_bytes <= self._slab.nbytes,
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
            return linked and children and (named is None or _root_of(named) is node)
        parent = node.parent
        return linked and children and parent.slot != GONE and node in parent.children


def _root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node
