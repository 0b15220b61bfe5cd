"""Sizes in bytes: "8GiB" (powers of 1024), "8GB" (powers of 1000), plain whole numbers are bytes."""

import re
from fractions import Fraction

__all__ = ["format_size", "parse_size"]

_BINARY = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {"": 1, "B": 1, **_BINARY, **_DECIMAL}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_EXAMPLE = 'a size such as "8GiB", "500MB" or a whole number of bytes'


def parse_size(value: object) -> int:
    """Bytes of a size written by a person.

    Raises:
        ValueError: no size, an unknown unit, or not a whole number of bytes.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"expected {_EXAMPLE}, not a negative one")
        return value
    match = _PATTERN.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"expected {_EXAMPLE}")
    number, unit = match.groups()
    if unit not in _UNITS:
        raise ValueError(f"unknown unit {unit!r}{_suggestion(unit)}, expected one of B, {', '.join(_units_by_size())}")
    size = Fraction(number) * _UNITS[unit]
    if size.denominator != 1:
        raise ValueError(f"{float(size)} bytes, expected a whole number of bytes")
    return int(size)


def format_size(size: int) -> str:
    """The shortest exact text that `parse_size` reads back: 1073741824 -> "1GiB"."""
    unit, scale = next(((unit, scale) for unit, scale in _BINARY.items() if size and size % scale == 0), ("B", 1))
    return f"{size // scale}{unit}"


def _units_by_size() -> list[str]:
    return [*reversed(_BINARY), *_DECIMAL]


def _suggestion(unit: str) -> str:
    # "8G" and "8gib" are guesses between two meanings that differ by 7 %, or by 8 (bits): the user decides.
    close = [known for known in _units_by_size() if known[0].lower() == unit[0].lower()]
    return f" (did you mean {' or '.join(close)}?)" if close else ""
