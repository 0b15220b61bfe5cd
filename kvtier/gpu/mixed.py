"""MixedBlockPool and MixedBlockTable: books of blocks of which some layers keep the window only.

A block has one id, one name and one count of references; that is where the layers without a window keep their part of
it. The windowed layers have a pool of their own, of fewer places, *slots*: a block's windowed part is in a slot as long
as the block is inside somebody's window, and after that until the slot is needed.

    block ids      [b0] [b1] [b2] [b3] [b4] [b5]        of all layers
    windowed ids   [--] [--] [--] [s7] [s2] [s9]        of the windowed ones; -- `NO_BLOCK`, behind the window

    no block --allocate--> read --unread--> idle, kept for who finds the block --allocate--> of another block
       ^                     |                  |
       +----- no name -------+                  +---- the block lost its name ----> no block

So a sequence that shares a block shares both parts of it, and a prefix is found as far as both groups have what they
need of it. Longest prefix of both after the hybrid coordinator of vLLM, which names the groups' blocks one by one.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from kvtier.errors import CapacityError, KVTierError, LeaseError
from kvtier.gpu.free_list import FreeList
from kvtier.gpu.pool import NOTHING, Amount, BlockPool
from kvtier.gpu.table import BlockCopy, BlockTable
from kvtier.gpu.windows import most_blocks
from kvtier.hooks import NO_BLOCK

__all__ = ["MixedBlockPool", "MixedBlockTable"]


class MixedBlockPool(BlockPool):
    """Books of a device on which some layers have a sliding window and some have none.

    Invariants, beside those of `BlockPool`:
        4. A slot is idle if and only if nobody reads it.
        5. A slot that nobody reads is that of a named block, or of none; the latter come first among the idle ones.

    Args:
        num_blocks: blocks, as the layers without a window keep them.
        num_slots: blocks that the windowed layers have room for: at least one sequence's.
        block_size: tokens per block.
        window: how many tokens up to its own one a token attends to in the windowed layers.

    Raises:
        CapacityError: one of them is less than 1, or there are fewer slots than one sequence may take.
    """

    def __init__(self, num_blocks: int, num_slots: int, block_size: int, window: int) -> None:
        super().__init__(num_blocks, block_size, window)
        least = most_blocks(num_blocks * block_size, 1, block_size, window)
        if num_slots < least:
            raise CapacityError(
                f"{num_slots} blocks for the layers with a window of {window} tokens: expected at least {least}, which "
                f"one sequence takes; give the pool more memory"
            )
        self.num_slots = num_slots
        self._slots = [NO_BLOCK] * num_blocks  # by block
        self._owners = [NO_BLOCK] * num_slots  # the block of each slot
        self._readers = [0] * num_blocks  # tables that have the block inside their window
        self._idle = FreeList(num_slots)

    @property
    def free_blocks(self) -> int:
        """Blocks that `allocate` can give out, each with a slot."""
        return min(len(self._free), len(self._idle))

    @property
    def used_slots(self) -> int:
        """Slots that somebody reads."""
        return self.num_slots - len(self._idle)

    @property
    def unused(self) -> int:
        """See `BlockPool.unused`."""
        return len(self._free) + len(self._idle)

    def slot(self, block_id: int) -> int:
        """Where a block's windowed part is; `NO_BLOCK`: nowhere any more."""
        return self._slots[self._checked(block_id)]

    def slots(self, block_ids: Sequence[int]) -> list[int]:
        """`slot` of many blocks of this pool."""
        return [self._slots[block_id] for block_id in block_ids]

    # ---- references

    def allocate(self, count: int) -> list[int]:
        """See `BlockPool.allocate`: with a slot each, which the caller reads."""
        taken = super().allocate(count)
        for block_id in taken:
            slot = self._idle.pop_first()
            owner = self._owners[slot]
            if owner != NO_BLOCK:
                self._slots[owner] = NO_BLOCK
            self._slots[block_id], self._owners[slot], self._readers[block_id] = slot, block_id, 1
        return taken

    def allocate_behind(self, count: int) -> list[int]:
        """Take blocks without slots, for what is behind the window already.

        Raises:
            CapacityError: there are not that many free blocks. Nothing was taken.
        """
        if count > len(self._free):
            raise self._too_few(count, len(self._free))
        return self._take(count)

    def read(self, block_ids: Sequence[int]) -> None:
        """These blocks are inside one more window.

        Raises:
            LeaseError: the windowed part of one of them is gone. Nothing was changed.
        """
        gone = [block_id for block_id in block_ids if self._slots[self._checked(block_id)] == NO_BLOCK]
        if gone:
            raise LeaseError(f"windowed parts of blocks {gone}: they are gone; take what `match` finds")
        for block_id in block_ids:
            if self._readers[block_id] == 0:
                self._idle.remove(self._slots[block_id])
            self._readers[block_id] += 1

    def unread(self, block_ids: Sequence[int]) -> None:
        """These blocks are inside one window less; in order: the last one's slot is given to another block first.

        Raises:
            LeaseError: one of them is inside none. Nothing was changed.
        """
        for block_id, count in Counter(block_ids).items():
            if self._readers[self._checked(block_id)] < count:
                raise LeaseError(
                    f"block {block_id} left behind {count} times: it is inside {self._readers[block_id]} windows; only "
                    f"what the caller reads may be given"
                )
        for block_id in reversed(block_ids):
            self._readers[block_id] -= 1
            if self._readers[block_id] == 0:
                self._rest(block_id)

    def _rest(self, block_id: int) -> None:
        if self._names[block_id] is None:
            self._empty(block_id)
        else:
            self._idle.push_last(self._slots[block_id])

    def _empty(self, block_id: int) -> None:
        """The slot is of no block any more."""
        slot, self._slots[block_id] = self._slots[block_id], NO_BLOCK
        self._owners[slot] = NO_BLOCK
        self._idle.push_first(slot)

    # ---- names

    def _is_better(self, block_id: int, holder: int, exact: bool) -> bool:  # noqa: FBT001
        # Both parts are worth more than one, or what was computed again would never be found.
        whole = self._slots[holder] == NO_BLOCK and self._slots[block_id] != NO_BLOCK
        return super()._is_better(block_id, holder, exact) or (whole and exact >= self._exact[holder])

    def _unname(self, block_id: int) -> None:
        super()._unname(block_id)
        if self._slots[block_id] != NO_BLOCK and self._readers[block_id] == 0:
            self._idle.remove(self._slots[block_id])
            self._empty(block_id)

    def match(self, keys: Sequence[bytes], *, exact: bool = True) -> list[int]:
        """The longest leading run of published blocks after which both groups can go on, see `BlockPool.match`.

        All of its blocks are there, and of the last ones the windowed part, which the caller reads: for `table`.
        """
        count = self.leading(keys, exact=exact)
        found = self._hold(keys[:count])
        self.read(found[self.behind(count * self.block_size + 1) :])
        return found

    def leading(self, keys: Sequence[bytes], *, exact: bool = True) -> int:
        """How many blocks `match` would find; takes no reference."""
        run = keys[: self._run(keys, exact)]
        return self._whole_window(run, lambda key: self._slots[self._published[key]] != NO_BLOCK)

    # ---- amounts

    def table(self, blocks: Sequence[int] = ()) -> "MixedBlockTable":
        """See `BlockPool.table`; of `blocks` the caller reads the last window, as `match` has it."""
        return MixedBlockTable(self, blocks)

    def most_blocks(self, num_tokens: int, new: int) -> int:
        """See `BlockPool.most_blocks`: all of them."""
        return most_blocks(num_tokens, new, self.block_size, None)

    def wanted(self, table: BlockTable, num_tokens: int, new: int) -> Amount:
        """See `BlockPool.wanted`."""
        blocks = super().wanted(table, num_tokens, new).blocks
        read = sum(slot != NO_BLOCK for slot in table.windowed_ids)
        most = most_blocks(num_tokens, new, self.block_size, self.window)
        return Amount(blocks, min(blocks, most, self.num_slots - read))

    def fits(self, wanted: Amount, headroom: int = 0, freed: Amount = NOTHING) -> bool:
        """See `BlockPool.fits`. Of the slots the same share is to spare: who goes on gives as many back as it takes."""
        share = -(-headroom * self.num_slots // self.num_blocks)
        slots = wanted.windowed + share <= len(self._idle) + freed.windowed
        return slots and super().fits(wanted, headroom, freed)

    def freed_by(self, tables: Iterable[BlockTable]) -> Amount:
        """See `BlockPool.freed_by`."""
        tables = list(tables)
        read = Counter(
            owner for table in tables for slot in table.windowed_ids if (owner := self._owner(slot)) != NO_BLOCK
        )
        slots = sum(self._readers[block] == readers for block, readers in read.items())
        return Amount(super().freed_by(tables).blocks, slots)

    def shortest(self, amount: Amount) -> int:
        """See `BlockPool.shortest`."""
        return amount.windowed if len(self._idle) < len(self._free) else amount.blocks

    def _owner(self, slot: int) -> int:
        return NO_BLOCK if slot == NO_BLOCK else self._owners[slot]

    # ---- checks

    def check(self) -> None:
        """See `BlockPool.check`."""
        super().check()
        slots = {slot: block for block, slot in enumerate(self._slots) if slot != NO_BLOCK}
        if slots != {slot: block for slot, block in enumerate(self._owners) if block != NO_BLOCK}:
            raise KVTierError(f"slots {self._slots} of blocks: slots say they are of {self._owners}")
        idle = list(self._idle)
        unread = [slot for slot, block in enumerate(self._owners) if block == NO_BLOCK or not self._readers[block]]
        if sorted(idle) != unread or len(idle) != len(self._idle):
            raise KVTierError(f"idle slots {idle} of size {len(self._idle)}: those that nobody reads are {unread}")
        owners = [self._owners[slot] for slot in idle]
        if any(block != NO_BLOCK and self._names[block] is None for block in owners):
            raise KVTierError(f"idle slots of blocks {owners}: one of them has no name, and will not be found")
        kept = [block != NO_BLOCK for block in owners]
        if kept != sorted(kept):
            raise KVTierError(f"idle slots of blocks {owners}: one that is of a block comes before one that is of none")
        for block, readers in enumerate(self._readers):
            if readers > self._references[block] or (readers and self._slots[block] == NO_BLOCK):
                raise KVTierError(
                    f"block {block} in slot {self._slots[block]}: {readers} read it, {self._references[block]} hold it"
                )


class MixedBlockTable(BlockTable):
    """The blocks of one sequence; reads the windowed parts of those that are not behind its window.

    Args:
        pool: where the blocks come from.
        blocks: as `MixedBlockPool.match` found them.
    """

    __slots__ = ("_behind", "_mixed")

    def __init__(self, pool: MixedBlockPool, blocks: Sequence[int] = ()) -> None:
        super().__init__(pool, blocks)
        self._mixed = pool
        self._behind = pool.behind(len(blocks) * pool.block_size + 1)  # leading blocks that it does not read

    @property
    def windowed_ids(self) -> Sequence[int]:
        """See `BlockTable.windowed_ids`."""
        behind = min(self._behind, len(self._ids))
        return [NO_BLOCK] * behind + self._mixed.slots(self._ids[behind:])

    @property
    def whole(self) -> bool:
        """See `BlockTable.whole`."""
        return not self._behind

    def serves(self, num_tokens: int) -> bool:
        """See `BlockTable.serves`."""
        return self._behind <= self._mixed.behind(num_tokens)

    def extend(self, num_tokens: int, start: int) -> list[BlockCopy]:
        """See `BlockTable.extend`. What is appended behind the window has no windowed part."""
        first = start // self._mixed.block_size
        before = self._mixed.slot(self._ids[first]) if first < len(self._ids) else NO_BLOCK
        behind = min(self._behind, self._blocks_of(num_tokens)) - len(self._ids)
        if behind > 0:
            self._append_behind(behind, num_tokens, start)
        copies = super().extend(num_tokens, start)
        return [copy._replace(windowed_src=before, windowed_dst=self._mixed.slot(copy.dst)) for copy in copies]

    def _append_behind(self, count: int, num_tokens: int, start: int) -> None:
        # Asked first, so that nothing is changed where the rest does not fit.
        self._shared(num_tokens, start)
        rest = self.missing(num_tokens, start) - count
        if not self._mixed.fits(Amount(rest + count, rest)):
            raise CapacityError(
                f"{rest + count} blocks, {rest} of them inside the window: {self._mixed.num_blocks} blocks, of which "
                f"{self._mixed.used_blocks} are in use, and {self._mixed.num_slots} windowed ones, of which "
                f"{self._mixed.used_slots} are; release some or make the pool larger"
            )
        self._ids += self._mixed.allocate_behind(count)

    def _replace(self, replaced: Sequence[int]) -> None:
        self._mixed.unread(replaced)
        super()._replace(replaced)

    def fork(self) -> "MixedBlockTable":
        """See `BlockTable.fork`."""
        self._mixed.retain(self._ids)
        self._mixed.read(self._ids[self._behind :])
        forked = MixedBlockTable(self._mixed, self._ids)
        forked._behind = self._behind
        return forked

    def truncate(self, num_tokens: int) -> None:
        """See `BlockTable.truncate`."""
        keep = self._blocks_of(max(num_tokens, 0))
        self._mixed.unread(self._ids[max(keep, self._behind) :])
        self._behind = min(self._behind, keep)
        super().truncate(num_tokens)

    def leave_behind(self, num_tokens: int) -> None:
        """Read no more what the last one of so many tokens, and all after it, do not attend to; hold it further on."""
        behind = self._mixed.behind(num_tokens)
        if behind > self._behind:
            left, self._behind = self._ids[self._behind : behind], behind
            self._mixed.unread(left)
