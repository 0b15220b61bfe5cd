"""The router's own names of blocks: a chain of hashes over tokens, or over text where nobody makes tokens of it.

Engines name blocks in ways of their own (some with a seed that nobody else knows), so their names are only compared
with each other; what a prompt is compared with is hashed here, from the tokens that the events carry.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

__all__ = ["TEXT_BLOCK", "pack_extra", "text_keys", "token_keys"]

TEXT_BLOCK = 64
"""Bytes of text that count as a block of 16 tokens."""

_TEXT_SEED = b"text"
_MAX_TOKEN = 2**32 - 1


def token_keys(
    tokens: Sequence[int], size: int, parent: bytes = b"", extras: Mapping[int, bytes] | Sequence[bytes] | None = None
) -> list[bytes]:
    """16 bytes for each full block, which stand for all tokens up to its end.

    Args:
        tokens: token ids, each 0 to 2**32 - 1.
        size: tokens per block.
        parent: key of the block before the first.
        extras: `pack_extra` of what belongs to a block beside its tokens, by its place.

    Raises:
        ValueError: a token id is out of bounds.
    """
    wide = np.asarray(tokens, dtype=np.int64)
    if wide.size and not (0 <= int(wide.min()) and int(wide.max()) <= _MAX_TOKEN):
        raise ValueError(f"token ids {int(wide.min())}..{int(wide.max())}: expected 0..{_MAX_TOKEN}")
    data, width = wide.astype("<u4").tobytes(), 4 * size
    blocks = (data[start : start + width] for start in range(0, len(data) - width + 1, width))
    if not extras:
        return _chain(parent, blocks)
    by_place = extras if isinstance(extras, Mapping) else dict(enumerate(extras))
    return _chain(parent, (block + by_place.get(at, b"") for at, block in enumerate(blocks)))


def text_keys(text: str, seed: str = "") -> list[bytes]:
    """Likewise for text, by `TEXT_BLOCK` bytes; never equal to a key of tokens.

    Args:
        text: of the prompt.
        seed: what separates equal texts, such as an adapter's name.
    """
    data = text.encode("utf-8", "surrogatepass")
    blocks = (data[start : start + TEXT_BLOCK] for start in range(0, len(data) - TEXT_BLOCK + 1, TEXT_BLOCK))
    return _chain(_TEXT_SEED + seed.encode("utf-8", "surrogatepass"), blocks)


def pack_extra(extra: Any) -> bytes:
    """What belongs to a block beside its tokens (an adapter, an image, a salt), as bytes; b"" for nothing."""
    return msgspec.msgpack.encode(list(extra)) if extra else b""


def _chain(parent: bytes, blocks: Iterable[bytes]) -> list[bytes]:
    keys: list[bytes] = []
    digest = xxhash.xxh3_128_digest
    for block in blocks:
        parent = digest(parent + block)
        keys.append(parent)
    return keys
