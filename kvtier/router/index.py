"""PrefixIndex: which blocks one engine has, and in which tier, as its events say."""

import enum
import threading
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from kvtier.events.frames import BlockEvent, BlockRemoved, BlocksCleared, BlockStored
from kvtier.router.hashing import pack_extra, token_keys

__all__ = ["IndexCounts", "Level", "PrefixIndex"]

_Name: TypeAlias = tuple[Any, int | None]  # an engine's hash and its group


class Level(enum.IntEnum):
    """How far from the device a block is."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2
    REMOTE = 3


class IndexCounts(NamedTuple):
    """blocks: by `Level`. orphans: blocks whose parent or tokens nobody told. forgotten: those beyond the bound."""

    blocks: tuple[int, ...]
    orphans: int
    forgotten: int


class _Known:
    """A block that the engine has somewhere: the router's key, a bit for each level."""

    __slots__ = ("key", "levels")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.levels = 0


class PrefixIndex:
    """Implements `kvtier.events.subscriber.Follower`. Thread-safe.

    Args:
        bound: blocks that are remembered; beyond it the oldest are forgotten.

    Attributes:
        block_size: tokens per block of this engine, 0 until it told one.
    """

    def __init__(self, bound: int) -> None:
        self.block_size = 0
        self._bound = bound
        self._lock = threading.Lock()
        self._known: dict[_Name, _Known] = {}
        # Several names may stand for one key, such as those of a hybrid model's groups.
        self._held: tuple[dict[bytes, int], ...] = tuple({} for _ in Level)
        self._orphans = self._forgotten = 0
        self._window = 0  # tokens that one attends to, in all layers; 0: all

    # ---- what is told

    def apply(self, events: Sequence[BlockEvent]) -> None:
        """See `Follower.apply`."""
        for event in events:
            with self._lock:
                match event:
                    case BlockStored():
                        self._store(event)
                    case BlockRemoved():
                        level = _level(event.medium, event.locality)
                        for one in event.block_hashes:
                            self._remove((one, event.group_idx), level)
                    case BlocksCleared():
                        self._clear()

    def reset(self) -> None:
        """See `Follower.reset`."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._known.clear()
        for held in self._held:
            held.clear()

    def _store(self, event: BlockStored) -> None:
        level = _level(event.medium, event.locality)
        for name, key in self._keys(event):
            known = self._known.get(name)
            if known is not None and key is not None and known.key != key:
                # The engine gave the name to another block; what it meant before is gone.
                self._forget(name)
                known = None
            if known is None and key is not None:
                known = self._known[name] = _Known(key)
            if known is None:
                self._orphans += 1
            elif not known.levels >> level & 1:
                known.levels |= 1 << level
                held = self._held[level]
                held[known.key] = held.get(known.key, 0) + 1
        while len(self._known) > self._bound:
            self._forgotten += 1
            self._forget(next(iter(self._known)))

    def _keys(self, event: BlockStored) -> Iterator[tuple[_Name, bytes | None]]:
        """Names and keys; no keys where they cannot be known."""
        names = [(one, event.group_idx) for one in event.block_hashes]
        keys: Sequence[bytes | None] = [None] * len(names)
        parent: bytes | None = b""
        if event.parent_block_hash is not None:
            above = self._known.get((event.parent_block_hash, event.group_idx))
            parent = None if above is None else above.key
        if event.token_ids and parent is not None:
            try:
                keys = token_keys(event.token_ids, event.block_size, parent, _extras(event))
            except (ValueError, OverflowError):
                pass  # no token ids: orphans
            else:
                self.block_size = event.block_size
                # Of a hybrid model some layers need all blocks.
                windowed = event.kv_cache_spec_kind == "sliding_window" and not (self._known and not self._window)
                self._window = (event.kv_cache_spec_sliding_window or 0) if windowed else 0
        return zip(names, keys, strict=True)

    def _remove(self, name: _Name, level: Level) -> None:
        known = self._known.get(name)
        if known is None or not known.levels >> level & 1:
            return
        known.levels &= ~(1 << level)
        self._let_go(known.key, level)
        if not known.levels:
            del self._known[name]

    def _forget(self, name: _Name) -> None:
        for level in Level:
            self._remove(name, level)

    def _let_go(self, key: bytes, level: Level) -> None:
        held = self._held[level]
        left = held[key] - 1
        if left:
            held[key] = left
        else:
            del held[key]

    # ---- what is asked

    def match(self, keys: Sequence[bytes], expected: Container[bytes] = ()) -> list[int]:
        """How many of the leading blocks are there, by `Level`, each counted where it is nearest.

        Args:
            keys: of a prompt's blocks.
            expected: blocks that will be on the device soon, whatever the events say.
        """
        found = [0] * len(Level)
        with self._lock:
            # Blocks behind a window are needed by nobody: as good as on the device.
            behind, stop = self._windowed(keys, expected) if self._window else (0, len(keys))
            device = self._held[Level.DEVICE]
            # Most of what is found at all is found on the device: that way is short.
            run = next((at for at in range(behind, stop) if keys[at] not in device), stop)
            found[Level.DEVICE] = run
            for key in keys[run:stop]:
                level = self._nearest(key, expected)
                if level is None:
                    break
                found[level] += 1
        return found

    def _nearest(self, key: bytes, expected: Container[bytes]) -> Level | None:
        if key in expected:
            return Level.DEVICE
        return next((level for level, held in zip(Level, self._held, strict=True) if key in held), None)

    def _windowed(self, keys: Sequence[bytes], expected: Container[bytes]) -> tuple[int, int]:
        """The most blocks after which an engine with a sliding window can go on, and how many of them it needs not.

        As its own look-up does: from the end, where most is gained, for a last window without a hole.
        """
        stop = at = len(keys)
        while at > self._behind(stop):
            at -= 1
            if self._nearest(keys[at], expected) is None:
                stop = at
        return self._behind(stop), stop

    def _behind(self, blocks: int) -> int:
        """Leading blocks that the first token after so many, and all that follow, do not attend to."""
        return max(blocks * self.block_size + 1 - self._window, 0) // max(self.block_size, 1)

    def counts(self) -> IndexCounts:
        """For metrics."""
        with self._lock:
            return IndexCounts(tuple(len(held) for held in self._held), self._orphans, self._forgotten)


def _level(medium: str | None, locality: str | None) -> Level:
    if locality == "REMOTE":
        return Level.REMOTE
    if medium in (None, "GPU"):
        return Level.DEVICE
    return Level.HOST if medium == "CPU" else Level.STORAGE


def _extras(event: BlockStored) -> list[bytes] | None:
    """What belongs to each block beside its tokens; older publishers tell of an adapter in a field of its own only."""
    if event.extra_keys is not None:
        return [pack_extra(extra if isinstance(extra, list) else None) for extra in event.extra_keys]
    if event.lora_name is not None:
        return [pack_extra([event.lora_name])] * len(event.block_hashes)
    return None
