"""A tier of one's own: blocks in ordinary process memory, below the host tier.

python examples/own_tier.py [MODEL]
"""

import sys
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtier import LLM, SamplingParams
from kvtier.cpu import HostTier
from kvtier.errors import FormatMismatch, LeaseError, TierUnavailable
from kvtier.formats import fidelity
from kvtier.hints import NO_HINT, Hint
from kvtier.metrics import Metrics
from kvtier.policies import LruPolicy
from kvtier.store import TieredStore
from kvtier.tiers import (
    OWN_WORK,
    BlockRef,
    Completions,
    Done,
    Exists,
    Full,
    Handle,
    Owner,
    Reservation,
    Status,
    Ticket,
    TierCaps,
    block_checksum,
    expired,
    namespaces_in,
)


@dataclass(eq=False, slots=True)
class Record:
    """One version of a block: reserved until it has a node; leased `leases` times."""

    ref: BlockRef
    fmt: str
    data: NDArray[np.uint8]
    checksum: bytes = b""
    leases: int = 0
    node: "Node | None" = None

    @property
    def rank(self) -> tuple[bool, int]:
        return self.ref.exact, fidelity(self.fmt)


@dataclass(eq=False, slots=True)
class Node:
    """A block that is ready: its slot in the policy, and its best version."""

    slot: int
    record: Record
    children: set[bytes] = field(default_factory=set)


class HeapHandle(Handle):
    __slots__ = ("anchor", "hint", "leased", "record")

    def __init__(self, record: Record, owner: Owner, *, leased: bool, anchor: Node | None, hint: Hint) -> None:
        super().__init__(record.ref, record.data.nbytes, record.fmt, owner)
        self.record, self.leased, self.anchor, self.hint = record, leased, anchor, hint
        self.checksum = record.checksum


class HeapTier:
    """Implements `kvtier.tiers.Tier`. The lock covers the tables; bytes are copied outside it."""

    caps = TierCaps(variable_size=True)

    def __init__(self, capacity_bytes: int, *, metrics: Metrics | None = None, name: str = "heap") -> None:
        self.name = name
        self._capacity = capacity_bytes
        self._metrics = metrics or Metrics()
        self._lock = threading.Lock()
        self._completions = Completions()
        self._policy = LruPolicy()
        self._used = 0
        self._nodes: dict[bytes, Node] = {}
        self._orphans: dict[bytes, set[bytes]] = {}  # by the key of the absent parent
        self._pending: dict[bytes, list[Record]] = {}
        self._held: dict[Owner, dict[HeapHandle, None]] = {}
        self._keys: dict[int, bytes] = {}  # by slot
        self._free_slots: list[int] = []
        self._closed = False

    # ---- readers

    def contains(self, keys: Sequence[bytes], deadline: float | None = None, *, exact: bool = False) -> Ticket:
        if expired(deadline):
            return self._finish([Status.TIMEOUT] * len(keys))
        with self._lock:
            return self._finish([Status.OK if self._find(key, exact=exact) else Status.MISS for key in keys])

    def acquire(
        self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None, *, exact: bool = False
    ) -> Ticket:
        if expired(deadline):
            return self._finish([Status.TIMEOUT] * len(keys))
        handles: list[HeapHandle] = []
        with self._lock:
            self._require_open()
            slots = []
            for key in keys:
                node = self._find(key, exact=exact)
                if node is None:
                    break
                node.record.leases += 1
                slots.append(node.slot)
                handles.append(self._hold(HeapHandle(node.record, owner, leased=True, anchor=None, hint=NO_HINT)))
            self._policy.pin(slots)
            if not owner.startswith(OWN_WORK):
                self._policy.hit(slots[::-1])
        return self._finish([Status.OK] * len(handles) + [Status.MISS] * (len(keys) - len(handles)), handles)

    def read(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        with self._lock:
            handles = self._live([handle for handle, _ in items], leased=True)
        for handle, (_, out) in zip(handles, items, strict=True):
            if out.readonly or out.nbytes < handle.nbytes:
                raise FormatMismatch(f"buffer of {out.nbytes} bytes: expected {handle.nbytes} writable bytes")
        if expired(deadline):
            return self._finish([Status.TIMEOUT] * len(items))
        return self._finish([self._read(handle.record, out) for handle, (_, out) in zip(handles, items, strict=True)])

    def _read(self, record: Record, out: memoryview) -> Status:
        chosen = out[: record.data.nbytes]
        np.copyto(np.frombuffer(chosen, np.uint8), record.data)
        if block_checksum(record.ref, record.fmt, chosen) == record.checksum:
            return Status.OK
        with self._lock:
            if record.node is not None:
                self._drop(record.ref.key)
                self._metrics.corrupt_blocks.labels(self.name).inc()
        return Status.CORRUPT

    def release(self, handles: Sequence[Handle]) -> None:
        with self._lock:
            if not self._closed:
                self._end(self._live(handles, leased=True))

    def release_owner(self, owner: Owner) -> None:
        with self._lock:
            self._end(list(self._held.get(owner, ())))

    # ---- writers

    def reserve(
        self,
        refs: Sequence[BlockRef],
        sizes: Sequence[int],
        fmts: Sequence[str],
        owner: Owner,
        hints: Sequence[Hint] | None = None,
    ) -> list[Reservation]:
        results: list[Reservation] = []
        refused: set[bytes | None] = set()
        with self._lock:
            self._require_open()
            for at, (ref, nbytes, fmt) in enumerate(zip(refs, sizes, fmts, strict=True)):
                result = self._existing(ref.key, (ref.exact, fidelity(fmt)))
                if result is None and ref.parent in refused:
                    result = Full("parent_refused")
                elif result is None:
                    result = self._reserve(ref, nbytes, fmt, owner, NO_HINT if hints is None else hints[at])
                if ref.parent in refused or isinstance(result, Full):
                    refused.add(ref.key)
                results.append(result)
        return results

    def _existing(self, key: bytes, rank: tuple[bool, int]) -> Reservation | None:
        node = self._nodes.get(key)
        if node is not None and node.record.rank >= rank:
            return Exists(ready=True)
        if any(record.rank >= rank for record in self._pending.get(key, ())):
            return Exists(ready=False)
        return None

    def _reserve(self, ref: BlockRef, nbytes: int, fmt: str, owner: Owner, hint: Hint) -> Reservation:
        if nbytes > self._capacity:
            return Full("oversized")
        anchor = None if ref.parent is None else self._nodes.get(ref.parent)
        # What a block hangs from must not leave to make room for it.
        pinned = [] if anchor is None else [anchor.slot]
        self._policy.pin(pinned)
        while self._used + nbytes > self._capacity:
            victims = self._policy.victims(1, [ref.key])
            if not victims:
                self._policy.unpin(pinned)
                return Full("no_space")
            self._drop(self._keys[victims[0]], evicted=True)
        self._used += nbytes
        record = Record(ref, fmt, np.empty(nbytes, np.uint8))
        self._pending.setdefault(ref.key, []).append(record)
        return self._hold(HeapHandle(record, owner, leased=False, anchor=anchor, hint=hint))

    def write(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        with self._lock:
            handles = self._live([handle for handle, _ in items], leased=False)
        if expired(deadline):
            return self._finish([Status.TIMEOUT] * len(items))
        for handle, (_, data) in zip(handles, items, strict=True):
            record, chosen = handle.record, data[: handle.nbytes]
            np.copyto(record.data, np.frombuffer(chosen, np.uint8))
            record.checksum = block_checksum(record.ref, record.fmt, chosen)
        return self._finish([Status.OK] * len(items))

    def commit(self, handles: Sequence[Handle]) -> None:
        with self._lock:
            reserved = self._live(handles, leased=False)
            unwritten = next((handle for handle in reserved if not handle.record.checksum), None)
            if unwritten is not None:
                raise LeaseError(f"block {unwritten.ref.key.hex()} was never written: write it or abort")
            for handle in reversed(reserved):  # deepest first, as the policy wants them
                self._commit(handle)
                self._end([handle])

    def _commit(self, handle: HeapHandle) -> None:
        """Give the record a node, unless its parent left or a better version came meanwhile."""
        record, key = handle.record, handle.ref.key
        if handle.anchor is not None and handle.anchor.record.node is not handle.anchor:
            return
        node = self._nodes.get(key)
        if node is None:
            record.node = self._insert(record, handle.hint)
        elif node.record.rank < record.rank:
            self._policy.unpin([node.slot] * node.record.leases)
            self._detach(node.record)
            node.record, record.node = record, node
            self._policy.hit([node.slot])

    def _insert(self, record: Record, hint: Hint) -> Node:
        key, parent = record.ref.key, record.ref.parent
        above = None if parent is None else self._nodes.get(parent)
        slot = self._free_slots.pop() if self._free_slots else len(self._nodes)
        node = Node(slot, record, self._orphans.pop(key, set()))
        self._nodes[key], self._keys[slot] = node, key
        self._policy.insert([node.slot], [key], [None if above is None else above.slot], [hint])
        for child in node.children:
            self._policy.adopt(self._nodes[child].slot, node.slot)
        if above is not None:
            above.children.add(key)
        elif parent is not None:
            self._orphans.setdefault(parent, set()).add(key)
        return node

    def abort(self, handles: Sequence[Handle]) -> None:
        with self._lock:
            self._end([h for h in handles if isinstance(h, HeapHandle) and not h.leased and self._holds(h)])

    def hint(self, keys: Sequence[bytes], hints: Sequence[Hint]) -> None:
        with self._lock:
            known = [(self._nodes[key].slot, hint) for key, hint in zip(keys, hints, strict=True) if key in self._nodes]
            self._policy.hint([slot for slot, _ in known], [hint for _, hint in known])

    # ---- removal

    def remove(self, keys: Sequence[bytes]) -> Ticket:
        with self._lock:
            there = [key in self._nodes for key in keys]
            for key in keys:
                self._drop(key)
        return self._finish([Status.OK if was else Status.MISS for was in there])

    def clear(self, ns: int | Collection[int] | None = None) -> Ticket:
        spaces = namespaces_in(ns)
        with self._lock:
            for key in [key for key, node in self._nodes.items() if spaces is None or node.record.ref.ns in spaces]:
                self._drop(key)
        return self._finish([Status.OK])

    def _drop(self, key: bytes, *, evicted: bool = False) -> None:
        """A block leaves, and all that descends from it, deepest first."""
        line = [key] if key in self._nodes else []
        for above in line:
            line += self._nodes[above].children
        for gone in reversed(line):
            node = self._nodes.pop(gone)
            parent = node.record.ref.parent
            if parent is not None:
                above_node = self._nodes.get(parent)
                siblings = self._orphans.get(parent, set()) if above_node is None else above_node.children
                siblings.discard(gone)
                if not siblings:
                    self._orphans.pop(parent, None)
            self._policy.remove([node.slot], evicted=evicted)
            self._free_slots.append(node.slot)
            self._detach(node.record)

    # ---- the whole

    def poll(self) -> list[Done]:
        return self._completions.poll()

    def stats(self) -> dict[str, int]:
        with self._lock:
            held = [handle.leased for handles in self._held.values() for handle in handles]
            return {
                "blocks": len(self._nodes),
                "bytes": self._used,
                "capacity_bytes": self._capacity,
                "leases": sum(held),
                "reservations": len(held) - sum(held),
            }

    def flush(self) -> None:
        pass  # memory cannot be made more durable

    def close(self) -> None:
        self.clear()
        with self._lock:
            self._closed = True
            self._end([handle for handles in list(self._held.values()) for handle in handles])

    # ---- bookkeeping, under the lock

    def _find(self, key: bytes, *, exact: bool) -> Node | None:
        node = self._nodes.get(key)
        return None if node is None or (exact and not node.record.ref.exact) else node

    def _hold(self, handle: HeapHandle) -> HeapHandle:
        self._held.setdefault(handle.owner, {})[handle] = None
        return handle

    def _holds(self, handle: HeapHandle) -> bool:
        return handle in self._held.get(handle.owner, ())

    def _live(self, handles: Sequence[Handle], *, leased: bool) -> list[HeapHandle]:
        known = [h for h in handles if isinstance(h, HeapHandle) and h.leased == leased and self._holds(h)]
        if len(set(known)) < len(handles):
            raise LeaseError(f"{len(handles)} handles: expected live ones, each once; take a new lease or reservation")
        return known

    def _end(self, handles: Sequence[HeapHandle]) -> None:
        for handle in handles:
            del self._held[handle.owner][handle]
            if not self._held[handle.owner]:
                del self._held[handle.owner]
            record, anchor = handle.record, handle.anchor
            if handle.leased:
                record.leases -= 1
                if record.node is not None:
                    self._policy.unpin([record.node.slot])
            else:
                self._pending[record.ref.key].remove(record)
                if not self._pending[record.ref.key]:
                    del self._pending[record.ref.key]
                if anchor is not None and anchor.record.node is anchor:
                    self._policy.unpin([anchor.slot])
            self._free(record)

    def _detach(self, record: Record) -> None:
        """A record is no longer to be found; its bytes go with its last lease."""
        record.node = None
        self._free(record)

    def _free(self, record: Record) -> None:
        if record.node is None and not record.leases:
            self._used -= record.data.nbytes

    def _require_open(self) -> None:
        if self._closed:
            raise TierUnavailable(f"tier {self.name} is closed: open another one")

    def _finish(self, statuses: Sequence[Status], handles: Sequence[Handle] = ()) -> Ticket:
        return self._completions.finish(Ticket(), statuses, handles)


def main() -> int:
    store = TieredStore(HostTier(64 << 20), [HeapTier(256 << 20)])
    prompt = "Boats longer than twelve metres moor at the outer pier. " * 20 + "Where do long boats moor?"
    with LLM(sys.argv[1] if len(sys.argv) > 1 else None, store=store, num_blocks=64) as llm:
        for place in ("nowhere", "heap"):
            found = llm.generate(prompt, SamplingParams(max_tokens=4, temperature=0.0)).metrics
            print(f"found in {place}: {found.loaded_tokens} loaded, {found.computed_tokens} computed")
            llm.flush()
            llm.clear_device_cache()
            llm.clear_tier("host")
    store.close()
    return 0 if found.loaded_tokens else 1


if __name__ == "__main__":
    sys.exit(main())
