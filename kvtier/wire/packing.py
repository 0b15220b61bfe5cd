"""Columns of a head: keys and token ids packed, names as runs."""

from collections.abc import Iterable, Sequence
from itertools import chain, groupby, repeat
from typing import TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from kvtier.keys import STORE_KEY_BYTES
from kvtier.wire.frames import WireError

__all__ = [
    "LONGEST_KEY",
    "PackedKeys",
    "Runs",
    "pack_keys",
    "pack_runs",
    "pack_tokens",
    "unpack_keys",
    "unpack_runs",
    "unpack_tokens",
]

LONGEST_KEY = 32

_TOKEN = np.dtype("<u4")
_MAX_TOKEN = 2**32 - 1

Runs: TypeAlias = list[tuple[str, int]]
"""Equal names that follow one another, with how many there are."""


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """The first 16 bytes of each key, end to end: no more of them counts.

    Raises:
        WireError: a key is shorter, or too long to be one.
    """
    widths = set(map(len, keys))
    if widths == {STORE_KEY_BYTES}:  # nearly always, and three times faster
        return b"".join(keys)
    if widths and not STORE_KEY_BYTES <= min(widths) <= max(widths) <= LONGEST_KEY:
        raise WireError(f"keys of {sorted(widths)} bytes: expected {STORE_KEY_BYTES} to {LONGEST_KEY}")
    return b"".join([key[:STORE_KEY_BYTES] for key in keys])


def unpack_keys(packed: bytes, width: int) -> list[bytes]:
    """Keys of `width` bytes that lie end to end.

    Raises:
        WireError: no keys have this width, or these bytes are not whole keys.
    """
    _check_packed(packed, width)
    keys: list[bytes] = np.frombuffer(packed, f"V{width}").tolist() if packed else []
    return keys


class PackedKeys(Sequence[bytes]):
    """What `unpack_keys` makes, each key made when it is looked at: a look-up that gallops looks at few."""

    __slots__ = ("_packed", "width")

    def __init__(self, packed: bytes, width: int) -> None:
        _check_packed(packed, width)
        self._packed = packed
        self.width = width

    def __len__(self) -> int:
        return len(self._packed) // self.width

    @overload
    def __getitem__(self, at: int) -> bytes: ...

    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...

    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, slice):
            return unpack_keys(self._packed, self.width)[at]
        place = range(len(self))[at] * self.width
        return self._packed[place : place + self.width]


def _check_packed(packed: bytes, width: int) -> None:
    if not STORE_KEY_BYTES <= width <= LONGEST_KEY or len(packed) % width:
        expected = f"expected whole keys of {STORE_KEY_BYTES} to {LONGEST_KEY} bytes"
        raise WireError(f"{len(packed)} bytes of keys, each of {width}: {expected}")


def pack_runs(names: Sequence[str]) -> Runs:
    """`["host", "host", "nvme"]` as `[("host", 2), ("nvme", 1)]`."""
    count = len(names)
    if count and names.count(names[0]) == count:  # nearly always, and ten times faster
        return [(names[0], count)]
    return [(name, len(list(group))) for name, group in groupby(names)]


def unpack_runs(runs: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """What `pack_runs` packed."""
    return tuple(chain.from_iterable(repeat(name, count) for name, count in runs))


def pack_tokens(tokens: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Token ids as uint32le.

    Raises:
        WireError: one is none.
    """
    wide = np.asarray(tokens, dtype=np.int64)
    if wide.size and not (0 <= int(wide.min()) and int(wide.max()) <= _MAX_TOKEN):
        raise WireError(f"token ids {int(wide.min())}..{int(wide.max())}: expected 0..{_MAX_TOKEN}")
    return wide.astype(_TOKEN).tobytes()


def unpack_tokens(packed: bytes) -> NDArray[np.uint32]:
    """What `pack_tokens` packed, uint32 [tokens].

    Raises:
        WireError: these bytes are not whole token ids.
    """
    if len(packed) % _TOKEN.itemsize:
        raise WireError(f"{len(packed)} bytes of token ids: expected {_TOKEN.itemsize} bytes each")
    return np.frombuffer(packed, _TOKEN)
