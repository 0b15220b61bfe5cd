"""TierCase: how a suite makes, fills and reads the tier under test."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvtier.hints import Hint
from kvtier.metrics import Metrics
from kvtier.testing.blocks import content, load, put
from kvtier.tiers import BlockRef, Handle, Reservation, Status, Tier

__all__ = ["WAIT", "TierCase"]

WAIT = 30.0
"""Seconds after which a ticket that is not done has failed the test."""


class TierCase:
    """Subclass it in a module that pytest collects, and say how to make and how to damage the tier.

    Attributes:
        block_bytes, capacity_blocks: blocks of this size, of which the tier under test must hold exactly so many.
        eviction_slack: blocks that the tier may evict beyond what it needs (it evicts in batches).
        eager_closure: descendants of a dropped block are gone at once, not only unreachable.
        honours_reuse, honours_priority: which hints change who leaves first.
        bounded: the tier keeps to its capacity itself; False: its other side does (see `OpenTierSuite`).
    """

    block_bytes = 16384
    capacity_blocks = 16
    eviction_slack = 0
    eager_closure = True
    honours_reuse = True
    honours_priority = True
    bounded = True

    def make_tier(self, capacity_bytes: int, metrics: Metrics) -> Tier:
        """A new, empty tier that takes nothing beyond `capacity_bytes` and counts in `metrics`."""
        raise NotImplementedError

    def corrupt(self, tier: Tier, key: bytes) -> None:
        """Flip a bit of the stored bytes of a ready record behind the tier's back."""
        raise NotImplementedError

    @contextmanager
    def _tier(self, metrics: Metrics | None = None) -> Iterator[Tier]:
        tier = self.make_tier(self.capacity_blocks * self.block_bytes, metrics or Metrics())
        try:
            yield tier
        finally:
            tier.close()

    def _put(self, tier: Tier, refs: Sequence[BlockRef]) -> list[Reservation]:
        return put(tier, refs, self.block_bytes)

    def _put_with(self, tier: Tier, refs: Sequence[BlockRef], fmt: str, hint: Hint | None = None) -> list[Reservation]:
        """Put in another format or with a hint."""
        sizes, hints = [self.block_bytes] * len(refs), None if hint is None else [hint] * len(refs)
        results = tier.reserve(refs, sizes, [fmt] * len(refs), "writer", hints)
        handles = [result for result in results if isinstance(result, Handle)]
        self._write(tier, handles)
        tier.commit(handles)
        return results

    def _reserve(self, tier: Tier, refs: Sequence[BlockRef], owner: str = "writer") -> list[Reservation]:
        return tier.reserve(refs, [self.block_bytes] * len(refs), ["raw"] * len(refs), owner)

    def _reserved(self, tier: Tier, refs: Sequence[BlockRef]) -> list[Handle]:
        results = self._reserve(tier, refs)
        handles = [result for result in results if isinstance(result, Handle)]
        assert len(handles) == len(refs), results
        return handles

    def _write(self, tier: Tier, handles: Sequence[Handle]) -> None:
        items = [(handle, content(handle.ref, self.block_bytes)) for handle in handles]
        assert tier.write(items).wait(WAIT).statuses == (Status.OK,) * len(items)

    def _assert_loads(self, tier: Tier, refs: Sequence[BlockRef]) -> None:
        for ref, (status, data) in zip(refs, load(tier, [ref.key for ref in refs]), strict=True):
            assert status is Status.OK
            assert data == content(ref, self.block_bytes)

    def _assert_idle(self, tier: Tier) -> None:
        stats = tier.stats()
        assert (stats["leases"], stats["reservations"]) == (0, 0)
        if self.bounded:
            assert stats["bytes"] <= stats["capacity_bytes"] <= self.capacity_blocks * self.block_bytes

    def _read(self, tier: Tier, handles: Sequence[Handle]) -> list[memoryview]:
        buffers = [memoryview(bytearray(handle.nbytes)) for handle in handles]
        done = tier.read(list(zip(handles, buffers, strict=True))).wait(WAIT)
        assert done.statuses == (Status.OK,) * len(handles)
        return buffers
