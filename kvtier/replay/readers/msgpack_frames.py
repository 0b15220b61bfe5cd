"""Where one msgpack value ends and the next begins: decoders of single values refuse a file of several."""

from collections.abc import Iterator

__all__ = ["frames"]

# First byte -> bytes that the value takes, first byte included.
_FIXED = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
_FIXED |= {0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18}
# First byte -> (bytes of the length that follows it, further bytes of the head).
_SIZED = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_SIZED |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
# First byte -> (bytes of the count that follows it, values per count).
_NESTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def frames(data: bytes) -> Iterator[bytes]:
    """The values that lie one after the other in `data`.

    Raises:
        ValueError: the last one is cut off.
    """
    at = 0
    while at < len(data):
        end = _end(data, at)
        if end > len(data):
            raise ValueError(f"the value at byte {at} is cut off")
        yield data[at:end]
        at = end


def _end(data: bytes, at: int) -> int:
    pending = 1
    while pending:
        if at >= len(data):
            return at + 1
        step, children = _step(data, at)
        at += step
        pending += children - 1
    return at


def _step(data: bytes, at: int) -> tuple[int, int]:
    """Bytes of the value's own head and data, and how many values it holds."""
    first = data[at]
    if 0x80 <= first < 0xA0:
        return 1, (first & 15) * (1 if first >= 0x90 else 2)
    if 0xA0 <= first < 0xC0:
        return 1 + (first & 31), 0
    if first in _SIZED:
        width, more = _SIZED[first]
        return 1 + width + more + int.from_bytes(data[at + 1 : at + 1 + width], "big"), 0
    if first in _NESTED:
        width, per = _NESTED[first]
        return 1 + width, per * int.from_bytes(data[at + 1 : at + 1 + width], "big")
    return _FIXED.get(first, 1), 0
