"""The records of a replay: a trace's block numbers as the store sees them, and bytes that tell whose they are."""

import hashlib
from collections.abc import Sequence

import numpy as np

from kvtier.keys import STORE_KEY_BYTES, Namespace, namespace_index
from kvtier.testing.blocks import content
from kvtier.tiers import BlockRef

__all__ = ["KEY_RECORD_BYTES", "Records", "fill_with_key"]

KEY_RECORD_BYTES = STORE_KEY_BYTES
"""Length of a record whose bytes are only its own key: what a byte-less replay stores."""


class Records:
    """Names and contents of a trace's blocks.

    Args:
        nbytes: length of every record; None: `KEY_RECORD_BYTES`, the key itself.
    """

    def __init__(self, nbytes: int | None = None) -> None:
        self.nbytes = KEY_RECORD_BYTES if nbytes is None else nbytes
        self.ns = namespace_index(Namespace("kvtier.replay", str(self.nbytes).encode()).digest)
        self._byteless = nbytes is None
        self._refs: dict[int, BlockRef] = {}

    def refs(self, blocks: Sequence[int]) -> list[BlockRef]:
        """Records of a prompt's blocks."""
        known = self._refs
        found: list[BlockRef] = []
        for depth, block in enumerate(blocks):
            ref = known.get(block)
            if ref is None:
                key = hashlib.sha256(b"kvtier.replay.%d" % block).digest()[:STORE_KEY_BYTES]
                ref = known[block] = BlockRef(key, self.ns, depth, found[-1].key if found else None, exact=True)
            found.append(ref)
        return found

    def known(self, blocks: Sequence[int]) -> list[BlockRef]:
        """Records of blocks that `refs` named before, parents first."""
        return sorted((self._refs[block] for block in blocks), key=lambda ref: ref.depth)

    def data(self, ref: BlockRef) -> memoryview:
        """A record's bytes."""
        return memoryview(ref.key) if self._byteless else content(ref, self.nbytes)


def fill_with_key(ref: BlockRef, out: memoryview) -> None:
    """Put the bytes of a byte-less replay's record into a buffer."""
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(ref.key, np.uint8))
