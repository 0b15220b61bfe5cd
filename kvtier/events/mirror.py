"""Mirror: what one engine holds in which tier, as its publisher must know it to answer whoever lost a frame.

An engine tells what its device holds, with tokens; a store's tiers tell what they hold, by store key. The mirror joins
the two, so that every block is told with its tokens whatever tier it is in, and can say at any time all there is.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvtier.events.frames import MEDIA, BlockEvent, BlockRemoved, BlocksCleared, BlockStored
from kvtier.events.log import Event, EventLog
from kvtier.keys import STORE_KEY_BYTES, Namespace, namespace_index, store_keys

__all__ = ["Counts", "Mirror"]

_DEVICE = "device"
_TIERS = (_DEVICE, *(name for name in MEDIA if name != _DEVICE))
_BIT = {name: 1 << at for at, name in enumerate(_TIERS)}
_EVENTS_AT_ONCE = 512
_READ_AT_ONCE = 256
_UNKNOWN = 1 << 16


class _Block(NamedTuple):
    """One block that some tier holds: head of its parent's chain key, tokens, a bit for each tier; of a chain's first
    block its salt.

    Never changed but replaced, so that a copy of the table is all there was at one moment.
    """

    parent: bytes | None
    tokens: "array[int]"  # a list of them takes ten times the room
    tiers: int
    salt: str | None = None


class Counts(NamedTuple):
    """blocks: that are held anywhere and known with their tokens. overflows: times that changes came faster than they
    were sent. missed: changes of tiers that the log did not keep long enough.
    """

    blocks: int
    overflows: int
    missed: int


class Mirror:
    """Implements `gpu.pool.PoolListener`, and follows a store's `EventLog`. Thread-safe; what it is told costs
    microseconds, whoever listens.

    Blocks are named by the first 16 bytes of their chain keys, in every tier. A block whose tokens no device has told
    so far, because another process stored it, is told with its first use here.

    Args:
        block_size: tokens per block.
        log: of the engine's store, if it has one.
        namespace: of the engine's blocks; others in the store are not told. Of blocks of several parts the first
            counts, since they come and go together nearly always.
        window: tokens that one attends to, if that is so in all layers.
        bound: blocks of changes that may wait to be taken; beyond it the next answer is all there is.

    Attributes:
        wake: called after a change, in whatever thread it was made: it must return at once.
    """

    def __init__(
        self,
        block_size: int,
        log: EventLog | None = None,
        namespace: Namespace | None = None,
        *,
        window: int | None = None,
        bound: int = 1 << 16,
    ) -> None:
        self.wake: Callable[[], None] = _nothing
        self._size = block_size
        self._log = log
        self._ns = None if namespace is None else namespace_index(namespace.digest)
        self._mask = bytes(STORE_KEY_BYTES) if namespace is None else namespace.mask()
        self._bound = bound
        self._window = window
        self._lock = threading.Lock()
        self._blocks: dict[bytes, _Block] = {}
        self._unknown: OrderedDict[bytes, int] = OrderedDict()
        self._changes: list[BlockEvent] = []
        self._weight = 0
        self._overflowed = False
        self._overflows = self._missed = 0
        # What the store held before is told when a device uses it.
        self._seen = 0 if log is None else log.last
        self._stop_listening = _nothing if log is None else log.listen(self._awaken)

    # ---- what the device holds

    def named(
        self, keys: Sequence[bytes], parent: bytes | None, tokens: Sequence[int], salt: str | None = None
    ) -> None:
        """See `PoolListener.named`."""
        size = self._size
        heads = [key[:STORE_KEY_BYTES] for key in keys]
        above = [None if parent is None else parent[:STORE_KEY_BYTES], *heads]
        with self._lock:
            for at, head in enumerate(heads):
                block = self._blocks.get(head)
                if block is None:
                    own = array("I", tokens[at * size : (at + 1) * size])
                    block = self._blocks[head] = _Block(
                        above[at], own, self._unknown.pop(head, 0), salt if above[at] is None else None
                    )
                    self._tell_tiers(head, block, block.tiers)
                self._set(head, block, _DEVICE)
        self.wake()

    def unnamed(self, keys: Sequence[bytes]) -> None:
        """See `PoolListener.unnamed`."""
        with self._lock:
            self._unset([key[:STORE_KEY_BYTES] for key in keys], _DEVICE)
        self.wake()

    # ---- what the tiers below hold

    def _follow(self) -> bool:
        """Take in some of what the log has; whether there may be more."""
        if self._log is None:
            return False
        events, gap = self._log.since(self._seen, _READ_AT_ONCE)
        if gap:
            with self._lock:
                # Nobody knows what left meanwhile: better a block too few than one that is not there.
                self._missed += 1
                for tier in _TIERS[1:]:
                    self._clear(tier)
        for event in events:
            # One at a time: the engine's thread waits for this lock, too.
            with self._lock:
                self._apply(event)
        if events:
            self._seen = events[-1].sequence
        return len(events) == _READ_AT_ONCE

    def _apply(self, event: Event) -> None:
        if event.tier not in _BIT or event.ns not in (None, self._ns):
            return
        # The mask is its own inverse.
        heads = store_keys(event.keys, self._mask)
        match event.kind:
            case "cleared":
                self._clear(event.tier)
            case "removed":
                self._unset(heads, event.tier)
            case "stored":
                self._set_all(heads, event.tier)

    def _set_all(self, heads: Iterable[bytes], tier: str) -> None:
        for head in heads:
            block = self._blocks.get(head)
            if block is not None:
                self._set(head, block, tier)
            else:
                self._unknown[head] = self._unknown.pop(head, 0) | _BIT[tier]
        while len(self._unknown) > _UNKNOWN:
            self._unknown.popitem(last=False)

    # ---- changes

    def _set(self, head: bytes, block: _Block, tier: str) -> None:
        if not block.tiers & _BIT[tier]:
            self._blocks[head] = block._replace(tiers=block.tiers | _BIT[tier])
            self._tell_tiers(head, block, _BIT[tier])

    def _tell_tiers(self, head: bytes, block: _Block, tiers: int) -> None:
        for tier in _TIERS:
            if tiers & _BIT[tier]:
                self._tell_stored(head, block, tier)

    def _tell_stored(self, head: bytes, block: _Block, tier: str) -> None:
        if not self._overflowed:
            # Nobody has the last one yet: it may grow.
            self._append(self._changes, head, block, tier)
        self._weigh(1)

    def _append(self, events: list[BlockEvent], head: bytes, block: _Block, tier: str) -> None:
        last, medium = events[-1] if events else None, MEDIA[tier]
        if isinstance(last, BlockStored) and last.medium == medium and last.block_hashes[-1] == block.parent:
            last.block_hashes.append(head)
            last.token_ids.extend(block.tokens)
            if last.extra_keys is not None:
                last.extra_keys.append(None)
            return
        stored = BlockStored(
            [head],
            block.parent,
            list(block.tokens),
            self._size,
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=None if block.salt is None else [[block.salt]],
            kv_cache_spec_kind=None if self._window is None else "sliding_window",
            kv_cache_spec_sliding_window=self._window,
        )
        events.append(stored)

    def _unset(self, heads: Iterable[bytes], tier: str) -> None:
        gone: list[bytes] = []
        for head in heads:
            block = self._blocks.get(head)
            if block is not None and block.tiers & _BIT[tier]:
                gone.append(head)
                if block.tiers == _BIT[tier]:
                    del self._blocks[head]
                else:
                    self._blocks[head] = _Block(block.parent, block.tokens, block.tiers & ~_BIT[tier])
            elif block is None and head in self._unknown:
                self._unknown[head] &= ~_BIT[tier]
                if not self._unknown[head]:
                    del self._unknown[head]
        if gone:
            if not self._overflowed:
                self._changes.append(BlockRemoved(gone, MEDIA[tier]))
            self._weigh(len(gone))

    def _clear(self, tier: str) -> None:
        bit = _BIT[tier]
        self._unset([head for head, block in self._blocks.items() if block.tiers & bit], tier)
        self._unset([head for head, tiers in self._unknown.items() if tiers & bit], tier)

    def _weigh(self, blocks: int) -> None:
        self._weight += blocks
        if self._weight > self._bound and not self._overflowed:
            self._overflowed = True
            self._overflows += 1
            self._changes.clear()

    # ---- what is told

    def take(self) -> list[BlockEvent]:
        """Changes since the last call, some at a time; empty if there are none.

        All there is, behind a `BlocksCleared`, where there were more changes than may wait.
        """
        while self._follow() and not self._overflowed:
            pass
        with self._lock:
            if not self._overflowed:
                taken, self._changes = self._changes[:_EVENTS_AT_ONCE], self._changes[_EVENTS_AT_ONCE:]
                self._weight = sum(map(_weight_of, self._changes))
                return taken
            self._overflowed = False
            self._changes.clear()
            self._weight = 0
            held = self._blocks.copy()
        return self._told(held)

    def snapshot(self) -> list[BlockEvent]:
        """All there is, behind a `BlocksCleared`; what `take` has still to say leads there, too."""
        with self._lock:
            held = self._blocks.copy()
        return self._told(held)

    def _told(self, held: Mapping[bytes, _Block]) -> list[BlockEvent]:
        """Made without the lock: of many blocks it takes long, and the engine waits for nobody."""
        events: list[BlockEvent] = [BlocksCleared()]
        heads = _parents_first(held)
        for tier in _TIERS:
            for head in heads:
                block = held[head]
                if block.tiers & _BIT[tier]:
                    self._append(events, head, block, tier)
        return events

    def counts(self) -> Counts:
        """For metrics."""
        with self._lock:
            return Counts(len(self._blocks), self._overflows, self._missed)

    def close(self) -> None:
        """Follow the log no more."""
        self._stop_listening()

    def _awaken(self) -> None:
        # `wake` is set by whoever publishes, later.
        self.wake()


def _nothing() -> None:
    """Nobody listens."""


def _weight_of(event: BlockEvent) -> int:
    return 1 if isinstance(event, BlocksCleared) else len(event.block_hashes)


def _parents_first(blocks: Mapping[bytes, _Block]) -> list[bytes]:
    """All blocks, chain after chain; those that follow a block of their own chain right behind it."""
    children: dict[bytes | None, list[bytes]] = {}
    for head, block in blocks.items():
        children.setdefault(block.parent if block.parent in blocks else None, []).append(head)
    waiting, ordered = children.get(None, [])[::-1], []
    while waiting:
        head = waiting.pop()
        ordered.append(head)
        waiting += children.get(head, ())
    return ordered
