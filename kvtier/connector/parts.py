"""A block's parts: their keys in the store, and one job's reports from the workers of all shards.

part p = group * shards + shard          keys of blocks b0, b1, ...: [b0 p0, b0 p1, ..., b1 p0, b1 p1, ...]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import NamedTuple

from kvtier.hooks import Save, TransferResults
from kvtier.keys import Namespace, namespace_index, store_keys
from kvtier.layout import Span
from kvtier.tiers import BlockRef

__all__ = ["Ended", "Parts", "Reports"]


class Parts:
    """Names the parts of a chain's blocks, block by block.

    Args:
        namespace: of all of them.
        groups, shards, windowed_groups: see `ConnectorOptions`.
    """

    def __init__(self, namespace: Namespace, groups: int = 1, shards: int = 1, windowed_groups: int = 0) -> None:
        self.ns = namespace_index(namespace.digest)
        self._windowed = (groups - windowed_groups) * shards
        self._masks = [namespace.mask(group, shard) for group in range(groups) for shard in range(shards)]

    def __len__(self) -> int:
        """Parts of one block."""
        return len(self._masks)

    def placed(self, block_ids: Sequence[int], windowed_ids: Sequence[int]) -> list[int]:
        """Device blocks of all parts of some blocks, block by block; `windowed_ids`: see `StepSpan`."""
        if not windowed_ids:
            return [block_id for block_id in block_ids for _ in self._masks]
        own, windowed = self._windowed, len(self) - self._windowed
        pairs = zip(block_ids, windowed_ids, strict=True)
        return [place for block, slot in pairs for place in (*repeat(block, own), *repeat(slot, windowed))]

    def saves(self, block_ids: Sequence[int], windowed_ids: Sequence[int], spans: Sequence[Span]) -> tuple[Save, ...]:
        """Copies of all parts of some blocks into `spans`, of which there may be fewer."""
        places = self.placed(block_ids, windowed_ids)
        return tuple(
            Save(place, span, at % len(self)) for at, (place, span) in enumerate(zip(places, spans, strict=False))
        )

    def keys(self, chain_keys: Sequence[bytes]) -> list[bytes]:
        """Store keys of all parts of these blocks."""
        columns = [store_keys(chain_keys, mask) for mask in self._masks]
        return columns[0] if len(columns) == 1 else list(chain.from_iterable(zip(*columns, strict=True)))

    def refs(self, chain_keys: Sequence[bytes], start: int, stop: int, *, exact: bool) -> list[BlockRef]:
        """All parts of blocks [start, stop) of a chain. A part's parent is the same part of the block before."""
        keys = self.keys(chain_keys[max(start - 1, 0) : stop])
        parents: list[bytes | None] = [*repeat(None, len(self)), *keys] if start == 0 else [*keys]
        own = keys if start == 0 else keys[len(self) :]
        return [
            BlockRef(key, self.ns, start + at // len(self), parent, exact)
            for at, (key, parent) in enumerate(zip(own, parents, strict=False))
        ]


class Ended(NamedTuple):
    """A job that all shards are through with. good: leading blocks whose parts are all good; None: all of them."""

    job: int
    good: int | None
    seconds: float


@dataclass(slots=True)
class _Report:
    shards: set[int] = field(default_factory=set)
    good: int | None = None
    seconds: float = 0.0


class Reports:
    """Joins what the workers of all shards say of each job.

    Args:
        shards: how many workers report each job.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._open: dict[int, _Report] = {}

    def add(self, results: TransferResults) -> Iterator[Ended]:
        """Account for one worker's results; the jobs that ended with them."""
        for job, good in (dict.fromkeys(results.finished) | results.failed).items():
            report = self._open.setdefault(job, _Report())
            report.shards.add(results.shard)
            report.seconds = max(report.seconds, results.seconds.get(job, 0.0))
            if good is not None:
                report.good = good if report.good is None else min(report.good, good)
            if len(report.shards) >= self._shards:
                del self._open[job]
                yield Ended(job, report.good, report.seconds)
