"""Victims: which recency rows go next, at a cost that does not depend on how many rows there are.

A hand goes round the array, a window of rows at a time. Up to one window of rows the choice is exact: oldest first,
and deepest first among equals. In a larger array, a block is old if it is older than nearly all of a sample of a
few thousand rows; where the hand finds too few of those, it leaps to where the sample has them.

A priority makes a block count as younger than its stamp says, here and in the sample.

Before all others go blocks with an ancestor that is gone: nobody can reach them. They are found where the hand passes.
"""

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.nvme.priorities import Aging

__all__ = ["NO_ROW", "OLDEST", "ROW", "Victim", "choose"]

ROW = np.dtype(
    [
        ("stamp", "<u8"),
        ("key", "<u8"),
        ("parent", "<u4"),
        ("parent_row", "<u4"),
        ("expires", "<u4"),
        ("depth", "<u2"),
        ("ttl", "<u2"),
    ]
)
NO_ROW = 2**32 - 1
OLDEST = 1
"""The stamp of what will not be used again; 0 is no record's."""

_WINDOW = 16384
_SAMPLE = 4096
_SAMPLED_SHARE = 32
_LEAPS = 8
_STALE_AT_ONCE = 4096
_NEVER = np.iinfo(np.uint64).max


class Victim(NamedTuple):
    """A row that may go.

    `stamp` tells whether it was used since. `top`: the row of the ancestor, or itself, whose parent seems to be gone.
    """

    row: int
    head: bytes
    stamp: int
    top: int | None


class _Found(NamedTuple):
    """Candidates of one window: rows, ages (0: orphans), depths, stamps, those that priorities make of them, and tops
    (-1: none).
    """

    rows: NDArray[np.int64]
    ages: NDArray[np.uint64]
    depths: NDArray[np.uint16]
    stamps: NDArray[np.uint64]
    slowed: NDArray[np.uint64]
    tops: NDArray[np.int64]

    def only(self, fit: NDArray[np.bool_]) -> "_Found":
        """Those that fit."""
        rows, ages, depths, stamps, slowed, tops = self
        return _Found(rows[fit], ages[fit], depths[fit], stamps[fit], slowed[fit], tops[fit])


def choose(
    rows: NDArray[np.void],
    count: int,
    spared: NDArray[np.int64],
    before: int,
    shift: int,
    hand: int,
    aging: Aging | None = None,
) -> tuple[list[Victim], int]:
    """About `count` victims, rows that look stale before them and beyond the count; and where the hand is now.

    Args:
        rows: [n] of `ROW`.
        count: how many.
        spared: rows that may not go.
        before: nor what was used at this instant or later.
        shift: low bits of a stamp that do not count as age.
        hand: where to begin.
        aging: which rows age slowly, if any.
    """
    if len(rows) <= _WINDOW:
        starts, bound = [0], int(_NEVER) - 1
    else:
        starts, bound = _route(rows, before, shift, hand, aging)
    found: list[_Found] = []
    total = 0
    for start in starts:
        window = _look(rows, start, spared, before, shift, aging)
        fit = (window.slowed <= bound) | (window.ages <= OLDEST)
        found.append(window.only(fit))
        total += int(np.count_nonzero(found[-1].stamps))
        if total >= count and len(rows) > _WINDOW:
            break
    every = _joined(found)
    stale = np.flatnonzero(every.stamps == 0)[:_STALE_AT_ONCE]
    alive = np.flatnonzero(every.stamps)
    order = np.lexsort((-every.depths[alive].astype(np.int32), every.ages[alive]))
    chosen = np.concatenate([stale, alive[order][:count]])
    victims = [
        Victim(row, head.tobytes(), stamp, None if top < 0 else top)
        for row, head, stamp, top in zip(
            every.rows[chosen].tolist(),
            rows["key"][every.rows[chosen]],
            every.stamps[chosen].tolist(),
            every.tops[chosen].tolist(),
            strict=True,
        )
    ]
    return victims, 0 if len(rows) <= _WINDOW else (starts[0] + _WINDOW) % len(rows)


def _joined(found: list[_Found]) -> _Found:
    return _Found(
        np.concatenate([one.rows for one in found]),
        np.concatenate([one.ages for one in found]),
        np.concatenate([one.depths for one in found]),
        np.concatenate([one.stamps for one in found]),
        np.concatenate([one.slowed for one in found]),
        np.concatenate([one.tops for one in found]),
    )


def _route(rows: NDArray[np.void], before: int, shift: int, hand: int, aging: Aging | None) -> tuple[list[int], int]:
    """Where to look, and up to which stamp a block is old."""
    stride = len(rows) // _SAMPLE
    at = np.arange(hand % stride, len(rows), stride)
    stamps = rows["stamp"][at]
    usable = (stamps > 0) & (stamps < before)
    at, stamps = at[usable], stamps[usable]
    stamps = stamps if aging is None else aging.slowed(stamps, at, shift)
    hand = hand % len(rows) // _WINDOW * _WINDOW
    if not len(at):
        return [hand], before
    rank = len(at) // _SAMPLED_SHARE
    bound = int(np.partition(stamps, rank)[rank])
    oldest = at[np.argsort(stamps, kind="stable")[: rank + 1]] // _WINDOW * _WINDOW
    leaps = [start for start in dict.fromkeys(oldest.tolist()) if start != hand]
    return [hand, *leaps[:_LEAPS]], bound


def _look(
    rows: NDArray[np.void], start: int, spared: NDArray[np.int64], before: int, shift: int, aging: Aging | None
) -> _Found:
    """All rows of the window from `start` on that may go."""
    window = rows[start : start + _WINDOW]
    stamps = window["stamp"].copy()
    slowed = stamps if aging is None else aging.slowed(stamps, slice(start, start + len(window)), shift)
    ages = slowed >> np.uint64(shift)
    # No row is the oldest but by a hint; stamps of the first instants, in a large array, have no age either.
    ages = np.maximum(ages, OLDEST)
    ages[stamps == OLDEST] = OLDEST
    expires = window["expires"]
    if expires.any():
        ages[(expires > 0) & (expires < int(time.time()))] = OLDEST
    tops = _tops(rows, window, start, stamps)
    ages[tops >= 0] = 0
    keep = (ages > 0) & (stamps >> np.uint64(shift) >= np.uint64(before >> shift)) & (stamps > OLDEST)
    inside = spared[(spared >= start) & (spared < start + len(window))] - start
    keep[inside] = True
    at = np.flatnonzero(~keep)
    return _Found(at + start, ages[at], window["depth"][at], stamps[at], slowed[at], tops[at])


def _tops(
    rows: NDArray[np.void], window: NDArray[np.void], start: int, stamps: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """For rows below a gap in their chain, in so far as the window shows it, the row right below the gap; else -1."""
    child = (window["parent"] != 0) & (stamps != 0)
    parent_rows = window["parent_row"].astype(np.int64)
    known = child & (parent_rows < len(rows))
    above = np.where(known, parent_rows, 0)
    sound = known & (rows["key"][above].astype(np.uint32) == window["parent"]) & (rows["stamp"][above] != 0)
    tops = np.where(child & ~sound, np.arange(start, start + len(window)), -1)
    if (tops < 0).all():
        return tops
    # Their descendants too: with every round a row looks twice as far up, for as long as that is in the window.
    local = np.where(sound & (above >= start) & (above < start + len(window)), above - start, -1)
    for _ in range(_WINDOW.bit_length()):
        linked = np.flatnonzero((local >= 0) & (tops < 0))
        tops[linked] = tops[local[linked]]
        local[linked] = local[local[linked]]
    return tops
