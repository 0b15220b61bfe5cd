"""BlockPool: references to device blocks, their names, and the order in which they are given out.

    free, no name --allocate--> referenced --publish--> referenced, named
         ^                          |                        |
         +---------release----------+                     release
         |                                                   v
         +----------allocate, forget----------------- free, named --match--> referenced, named

The free list starts with the blocks that have no name; the named ones follow, least recently freed first.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvtier.errors import CapacityError, KVTierError, LeaseError
from kvtier.gpu.free_list import FreeList
from kvtier.gpu.table import BlockTable
from kvtier.gpu.windows import blocks_behind, most_blocks
from kvtier.hooks import NO_BLOCK

__all__ = ["Amount", "BlockPool", "PoolListener"]


class Amount(NamedTuple):
    """So many device blocks; `windowed`: in the windowed layers' own pool, where they have one."""

    blocks: int
    windowed: int = 0


NOTHING = Amount(0)


class PoolListener(Protocol):
    """Hears which names the pool's blocks have. Called in the engine's thread: it must return at once."""

    def named(
        self, keys: Sequence[bytes], parent: bytes | None, tokens: Sequence[int], salt: str | None = None
    ) -> None:
        """Consecutive blocks of one chain have names now. By the engine, which knows the tokens: the pool does not.

        Args:
            keys: chain keys.
            parent: of the first one, None for the beginning of a chain.
            tokens: of all of them.
            salt: that their chain begins with.
        """
        ...

    def unnamed(self, keys: Sequence[bytes]) -> None:
        """Blocks of these chain keys are not to be found any more."""
        ...


class BlockPool:
    """Books of a device's blocks. Knows no bytes. For use from one thread.

    With a `window`, nobody ever reads further back than that, so that a sequence goes on from the blocks of its last
    window alone: whatever stands before them in a block table is `NO_BLOCK`. After the sliding-window manager of vLLM.

    Invariants:
        1. A block is in the free list if and only if nobody references it.
        2. A name belongs to one block, and a block has at most one name.
        3. Named blocks come after all others in the free list.

    Attributes:
        listener: told which names there are, if somebody wants to know.

    Args:
        num_blocks: blocks of the device, at least 1; their ids are 0..num_blocks-1.
        block_size: tokens per block, at least 1.
        window: how many tokens up to its own one a token attends to, in all layers; None: to all.

    Raises:
        CapacityError: one of them is less than 1.
    """

    def __init__(self, num_blocks: int, block_size: int, window: int | None = None) -> None:
        if min(num_blocks, block_size) < 1:
            raise CapacityError(
                f"device pool of {num_blocks} blocks of {block_size} tokens: expected at least 1 of each; "
                f"give it more memory"
            )
        if window is not None and window < 1:
            raise CapacityError(f"a sliding window of {window} tokens: expected at least 1, or None")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window = window
        self.listener: PoolListener | None = None
        self._references = [0] * num_blocks
        self._free = FreeList(num_blocks)
        self._names: list[bytes | None] = [None] * num_blocks
        self._exact = bytearray(num_blocks)
        self._published: dict[bytes, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that `allocate` can give out: those that nobody references, named or not."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks that somebody references."""
        return self.num_blocks - len(self._free)

    @property
    def unused(self) -> int:
        """Blocks that nobody holds, of all layer groups together."""
        return len(self._free)

    @property
    def cached_blocks(self) -> int:
        """Blocks with a name, referenced or not."""
        return len(self._published)

    def references(self, block_id: int) -> int:
        """How many hold this block."""
        return self._references[self._checked(block_id)]

    def is_published(self, block_id: int) -> bool:
        """Whether the block has a name."""
        return self._names[self._checked(block_id)] is not None

    def is_exact(self, block_id: int) -> bool:
        """Whether the block has a name and was published as exact."""
        return bool(self._exact[self._checked(block_id)])

    def is_writable(self, block_id: int) -> bool:
        """Whether its content may change: it has one holder and no name."""
        return self._references[self._checked(block_id)] == 1 and self._names[block_id] is None

    # ---- references

    def allocate(self, count: int) -> list[int]:
        """Take blocks, each with one reference. Their content is undefined.

        Named blocks are taken last, the least recently freed first, and lose their names.

        Raises:
            CapacityError: there are not that many free blocks. Nothing was taken.
        """
        if not 0 <= count <= self.free_blocks:
            raise self._too_few(count, self.free_blocks)
        return self._take(count)

    def _too_few(self, count: int, free: int) -> CapacityError:
        return CapacityError(
            f"{count} blocks: {free} of {self.num_blocks} are free; release some or make the pool larger"
        )

    def _take(self, count: int) -> list[int]:
        taken = [self._free.pop_first() for _ in range(count)]
        for block_id in taken:
            self._references[block_id] = 1
        self._unname_all(taken)
        return taken

    def retain(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each; for blocks that somebody references, others are to be had by `match`.

        Raises:
            LeaseError: nobody references one of them. Nothing was changed.
        """
        self._require(dict.fromkeys(block_ids, 1), "retain")
        for block_id in block_ids:
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each. Given a block table in order, its tail will be evicted before its head.

        Raises:
            LeaseError: a block has fewer references than were to be dropped. Nothing was changed.
        """
        self._require(Counter(block_ids), "release")
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free_block(block_id)

    def _free_block(self, block_id: int) -> None:
        if self._names[block_id] is None:
            self._free.push_first(block_id)
        else:
            self._free.push_last(block_id)

    # ---- names

    def publish(self, block_id: int, key: bytes, exact: bool) -> bool:  # noqa: FBT001
        """Name a full block by its chain key, so that `match` finds it. Its content must not change from now on.

        If another block has that name already, it keeps it, unless that one is not exact and this one is.
        Publishing a block again under its own name changes nothing.

        Args:
            block_id: a block that the caller references.
            key: chain key.
            exact: the block, and all KV that it was computed from, are lossless.

        Returns:
            Whether no block had this name before.

        Raises:
            LeaseError: nobody references the block, or it has another name. Nothing was changed.
        """
        self._require({block_id: 1}, "publish")
        name = self._names[block_id]
        if name is not None and name != key:
            raise LeaseError(
                f"block {block_id} is published as {name.hex()}, not as {key.hex()}; a block's content has one name"
            )
        holder = self._published.get(key)
        if holder is not None:
            if holder == block_id or not self._is_better(block_id, holder, exact):
                return False
            self._unname(holder)
            if self._references[holder] == 0:
                self._free.remove(holder)
                self._free.push_first(holder)
        self._published[key] = block_id
        self._names[block_id] = key
        self._exact[block_id] = exact
        return holder is None

    def _is_better(self, block_id: int, holder: int, exact: bool) -> bool:  # noqa: FBT001
        """Whether a block takes the name of the one that has it."""
        return exact and not self._exact[holder]

    def match(self, keys: Sequence[bytes], *, exact: bool = True) -> list[int]:
        """The longest leading run of published blocks, each with one more reference, which is the caller's.

        With a window only its last ones have to be there; `NO_BLOCK` stands for the others.

        Args:
            keys: chain keys, in order.
            exact: take exact blocks only.
        """
        count = self.leading(keys, exact=exact)
        behind = self.behind(count * self.block_size + 1)
        return [NO_BLOCK] * behind + self._hold(keys[behind:count])

    def _hold(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of these names, each with one more reference."""
        found = [self._published[key] for key in keys]
        for block_id in found:
            if self._references[block_id] == 0:
                self._free.remove(block_id)
            self._references[block_id] += 1
        return found

    def leading(self, keys: Sequence[bytes], *, exact: bool = True) -> int:
        """How many blocks `match` would find; takes no reference."""
        if self.window is None:
            return self._run(keys, exact)
        return self._whole_window(keys, lambda key: self._is_there(key, exact))

    def _run(self, keys: Sequence[bytes], exact: bool) -> int:  # noqa: FBT001
        return next((at for at, key in enumerate(keys) if not self._is_there(key, exact)), len(keys))

    def _whole_window(self, keys: Sequence[bytes], is_there: Callable[[bytes], bool]) -> int:
        # From the end, where most is gained: the first place before which nothing is missing that would be read.
        stop, at = len(keys), len(keys)
        while at > self.behind(stop * self.block_size + 1):
            at -= 1
            if not is_there(keys[at]):
                stop = at
        return stop

    def _is_there(self, key: bytes, exact: bool) -> bool:  # noqa: FBT001
        block_id = self._published.get(key)
        return block_id is not None and (not exact or bool(self._exact[block_id]))

    # ---- windows

    def behind(self, num_tokens: int) -> int:
        """Leading blocks that the last one of so many tokens, and all after it, do not attend to."""
        return blocks_behind(num_tokens, self.block_size, self.window)

    def most_blocks(self, num_tokens: int, new: int) -> int:
        """Blocks that a sequence of so many tokens holds at most, while up to `new` of them at a time are written."""
        return most_blocks(num_tokens, new, self.block_size, self.window)

    # ---- amounts

    def table(self, blocks: Sequence[int] = ()) -> BlockTable:
        """A sequence's block table; the caller's references to `blocks`, its first ones, become the table's."""
        return BlockTable(self, blocks)

    def wanted(self, table: BlockTable, num_tokens: int, new: int) -> Amount:
        """What a sequence still needs to get from its table to `num_tokens`; up to `new` of them are written at a time.

        With a window never all at a time, and in as short chunks as need be: an empty pool always has as much.
        """
        missing = table.missing(num_tokens, table.capacity_tokens)
        return Amount(min(missing, self.most_blocks(num_tokens, new), self.num_blocks - len(table.held)))

    def fits(self, wanted: Amount, headroom: int = 0, freed: Amount = NOTHING) -> bool:
        """Whether so much is free once `freed` is, with `headroom` blocks to spare."""
        return wanted.blocks + headroom <= len(self._free) + freed.blocks

    def freed_by(self, tables: Iterable[BlockTable]) -> Amount:
        """What comes free with these tables: blocks that they share among themselves with the last of them."""
        held = Counter(block for table in tables for block in table.held)
        return Amount(sum(self.references(block) == holders for block, holders in held.items()))

    def shortest(self, amount: Amount) -> int:
        """Of an amount, how many it has of what fewest are free of."""
        return amount.blocks

    def forget(self) -> int:
        """Drop the names of all blocks that nobody references; returns how many had one."""
        forgotten = [block_id for block_id in self._published.values() if self._references[block_id] == 0]
        self._unname_all(forgotten)
        return len(forgotten)

    def _unname_all(self, block_ids: Sequence[int]) -> None:
        names = [name for block_id in block_ids if (name := self._names[block_id]) is not None]
        if names:
            for block_id in block_ids:
                self._unname(block_id)
            if self.listener is not None:
                self.listener.unnamed(names)

    def _unname(self, block_id: int) -> None:
        name = self._names[block_id]
        if name is not None:
            del self._published[name]
            self._names[block_id] = None
            self._exact[block_id] = False

    # ---- checks

    def check(self) -> None:
        """Verify the invariants, in time linear in the pool.

        Raises:
            KVTierError: one is broken.
        """
        free = list(self._free)
        unreferenced = [block_id for block_id in range(self.num_blocks) if not self._references[block_id]]
        if sorted(free) != unreferenced or len(free) != len(self._free):
            raise KVTierError(f"free list {free} of size {len(self._free)}: unreferenced blocks are {unreferenced}")
        named = [self._names[block_id] is not None for block_id in free]
        if named != sorted(named):
            raise KVTierError(f"free list {free}: a named block comes before one without a name")
        names = {name: block_id for block_id, name in enumerate(self._names) if name is not None}
        if names != self._published or any(self._exact[at] for at, name in enumerate(self._names) if name is None):
            raise KVTierError(f"index {self._published}: blocks carry the names {names}")

    def _checked(self, block_id: int) -> int:
        if not 0 <= block_id < self.num_blocks:
            raise LeaseError(f"block {block_id}: expected 0..{self.num_blocks - 1}; ids come from this pool only")
        return block_id

    def _require(self, counts: Mapping[int, int], verb: str) -> None:
        for block_id, count in counts.items():
            if self._references[self._checked(block_id)] < count:
                raise LeaseError(
                    f"{verb} of block {block_id}, {count} times: it has {self._references[block_id]} references; "
                    f"only blocks that the caller holds may be given"
                )
