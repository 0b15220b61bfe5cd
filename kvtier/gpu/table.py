"""BlockTable: the device blocks of one sequence, with copy-on-write."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvtier.errors import LeaseError
from kvtier.hooks import NO_BLOCK

if TYPE_CHECKING:
    from kvtier.gpu.pool import BlockPool

__all__ = ["BlockCopy", "BlockTable"]


class BlockCopy(NamedTuple):
    """Copy the content of device block `src` to `dst`, before anything else is written in this step.

    Where windowed layers have a pool of their own, their part of it from `windowed_src` to `windowed_dst`.
    """

    src: int
    dst: int
    windowed_src: int = NO_BLOCK
    windowed_dst: int = NO_BLOCK


class BlockTable:
    """The blocks of one sequence, in order; holds one reference to each.

    tokens   [0 ............ start) [start ............ num_tokens)
              kept                   to be written
    blocks   [--] [b1] [b2] ... [b start // size] ... [b last]
              may be shared      one holder and no name after `extend`

    Leading blocks may be gone (`NO_BLOCK`): nothing attends to them any more.

    Args:
        pool: where the blocks come from.
        blocks: the sequence's first blocks; the caller's references to them become the table's.
    """

    __slots__ = ("_ids", "_pool", "gone")

    def __init__(self, pool: "BlockPool", blocks: Sequence[int] = ()) -> None:
        self._pool = pool
        self._ids = list(blocks)
        self.gone = self._ids.count(NO_BLOCK)  # leading blocks that are not there

    @property
    def ids(self) -> Sequence[int]:
        """Block ids in token order: a live view, to be copied by whoever keeps it."""
        return self._ids

    @property
    def held(self) -> Sequence[int]:
        """Ids of the blocks that are there."""
        return self._ids[self.gone :] if self.gone else self._ids

    @property
    def windowed_ids(self) -> Sequence[int]:
        """The same table in the windowed layers' own pool, with `NO_BLOCK` behind the window; empty: they have none."""
        return ()

    @property
    def whole(self) -> bool:
        """Whether nothing is behind the window, so that any token of it may come next."""
        return not self.gone

    def serves(self, num_tokens: int) -> bool:
        """Whether nothing is behind the window that the last one of so many tokens attends to."""
        return self.gone <= self._pool.behind(num_tokens)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into the blocks, or did as long as they were there."""
        return len(self._ids) * self._pool.block_size

    def missing(self, num_tokens: int, start: int) -> int:
        """How many blocks `extend(num_tokens, start)` would have to allocate, copy-on-write included."""
        return len(self._shared(num_tokens, start)) + self._beyond(num_tokens)

    def extend(self, num_tokens: int, start: int) -> list[BlockCopy]:
        """Make room for tokens [start, num_tokens) to be written; whatever the table held beyond `start` is void.

        Appends the blocks that are missing, and replaces each block in the written range that is shared or
        published by a private one. Only the block that `start` lies inside of has content to keep.

        Returns:
            The copies to run before the tokens are written.

        Raises:
            CapacityError: the pool has not enough free blocks. Nothing was changed.
            LeaseError: `start` lies beyond `num_tokens` or beyond the table. Nothing was changed.
        """
        shared = self._shared(num_tokens, start)
        fresh = self._pool.allocate(len(shared) + self._beyond(num_tokens))
        replaced = [self._ids[at] for at in shared]
        for at, block_id in zip(shared, fresh, strict=False):
            self._ids[at] = block_id
        self._ids += fresh[len(shared) :]
        self._replace(replaced)
        first, inside = divmod(start, self._pool.block_size)
        if inside and shared and shared[0] == first:
            return [BlockCopy(replaced[0], fresh[0])]
        return []

    def _replace(self, replaced: Sequence[int]) -> None:
        self._pool.release(replaced)

    def fork(self) -> "BlockTable":
        """Another sequence with the same content so far; all blocks are shared."""
        self._pool.retain(self.held)
        return BlockTable(self._pool, self._ids)

    def truncate(self, num_tokens: int) -> None:
        """Drop the blocks that hold none of the first `num_tokens` tokens."""
        keep = self._blocks_of(max(num_tokens, 0))
        dropped = self._ids[max(keep, self.gone) :]
        del self._ids[keep:]
        self.gone = min(self.gone, keep)
        self._pool.release(dropped)

    def leave_behind(self, num_tokens: int) -> None:
        """Drop the blocks that the last one of so many tokens, and all after it, do not attend to.

        Where the table ends before them, it goes on without blocks up to there.
        """
        gone = self._pool.behind(num_tokens)
        if gone <= self.gone:
            return
        dropped = self._ids[self.gone : gone]
        self._ids[:gone] = [NO_BLOCK] * gone
        self.gone = gone
        self._pool.release(dropped)

    def release(self) -> None:
        """Drop all blocks. Idempotent."""
        self.truncate(0)

    # ---- arithmetic

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)

    def _beyond(self, num_tokens: int) -> int:
        return max(0, self._blocks_of(num_tokens) - len(self._ids))

    def _shared(self, num_tokens: int, start: int) -> list[int]:
        """Positions of the blocks that hold tokens of [start, num_tokens) and may not be written."""
        if not 0 <= start <= min(num_tokens, self.capacity_tokens):
            raise LeaseError(
                f"tokens [{start}, {num_tokens}) to be written, the table holds {self.capacity_tokens}: expected a "
                f"start in 0..{min(num_tokens, self.capacity_tokens)}"
            )
        stop = min(self._blocks_of(num_tokens), len(self._ids))
        written = range(start // self._pool.block_size, stop) if start < num_tokens else ()
        return [at for at in written if not self._pool.is_writable(self._ids[at])]
