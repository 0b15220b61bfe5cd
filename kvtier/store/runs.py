"""Runs: a tier that keeps several blocks per object (`TierCaps.run`) takes whole, aligned ones and finds nothing less.

Run k of a chain, or of one part of it, is its blocks [k * run, (k + 1) * run). It is named by its last block: who knows
that key knows all of it, and it is complete as soon as that block is in host:

    depth     0  1  2  3 | 4  5  6  7 | 8  9          run = 4
    named by           3 |          7 |               8 and 9 stay above

Where `run` is 1 every block is a run, and all of this changes nothing.
"""

from collections.abc import Sequence
from typing import TypeVar

from kvtier.store.gateway import GatewayTier
from kvtier.tiers import BlockRef

__all__ = [
    "columns",
    "interleaved",
    "members",
    "run_ends",
    "whole_runs",
]

_T = TypeVar("_T")


def run_ends(blocks: int, depth: int, run: int) -> range:
    """Positions of the last blocks of runs among so many blocks of a chain, of which the first is at `depth`."""
    return range(run - 1 - depth % run, blocks, run)


def whole_runs(items: Sequence[_T], kept: Sequence[bool], run: int) -> list[_T]:
    """Of `items`, whole runs one after the other, those runs of which all is `kept`."""
    whole = (range(at, at + run) for at in range(0, len(items), run))
    return [items[at] for places in whole if all(map(kept.__getitem__, places)) for at in places]


def members(host: GatewayTier, last: BlockRef, run: int) -> list[BlockRef]:
    """The run that ends with this block, parents first; shorter where host does not hold all of it any more."""
    refs = [last]
    while len(refs) < run:
        parent = refs[-1].parent
        ref = None if parent is None else host.refs([parent])[0]
        if ref is None:
            break
        refs.append(ref)
    refs.reverse()
    return refs


def columns(keys: Sequence[bytes], first: int, parts: int, depth: int, run: int) -> list[list[bytes]]:
    """What can be found of a chain's rest `keys[first:]` in runs: one chain per part, each up to its last run's end.

    The part of `keys[first]` comes first. `depth` is that of the block of `keys[0]`.
    """
    found = []
    for at in range(first, first + parts):
        chain = keys[at::parts]
        ends = run_ends(len(chain), depth + at // parts, run)
        found.append(list(chain[: ends[-1] + 1]) if ends else [])
    return found


def interleaved(found: Sequence[Sequence[_T]]) -> tuple[list[_T], list[_T]]:
    """From what was found of each of `columns`, the leading run block-major, and what is left over."""
    parts = len(found)
    total = min(at + len(column) * parts for at, column in enumerate(found))
    leading = [found[at % parts][at // parts] for at in range(total)]
    return leading, [item for at, column in enumerate(found) for item in column[len(range(at, total, parts)) :]]
