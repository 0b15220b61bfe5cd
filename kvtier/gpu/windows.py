"""Sliding windows in blocks: what of a sequence is still read, and how much of it is held at a time.

window  tokens up to its own one that a token attends to, in all layers of the pool; None: all of them
"""

__all__ = ["blocks_behind", "most_blocks"]


def blocks_behind(num_tokens: int, block_size: int, window: int | None) -> int:
    """Leading blocks that the last one of so many tokens, and all after it, do not attend to."""
    return 0 if window is None else max(0, num_tokens - window) // block_size


def most_blocks(num_tokens: int, new: int, block_size: int, window: int | None) -> int:
    """Blocks that a sequence of so many tokens holds at most, while up to `new` of them at a time are written."""
    blocks = -(-num_tokens // block_size)
    # The window of the first new token, and a block more, since neither begins nor ends with one.
    return blocks if window is None else min(blocks, -(-(window + new) // block_size) + 1)
