"""EvictionSuite: a tier keeps to its capacity, and what leaves first."""

import random
from collections.abc import Sequence

from kvtier.testing.blocks import chain_refs, content, load, run_length
from kvtier.testing.tier_case import WAIT, TierCase
from kvtier.tiers import BlockRef, Full, Handle, Status, Tier

__all__ = ["EvictionSuite"]


class EvictionSuite(TierCase):
    """Part of `TierSuite`."""

    def test_lease_protects_from_eviction(self) -> None:
        half = self.capacity_blocks // 2
        kept = chain_refs(half, seed=1)
        with self._tier() as tier:
            self._put(tier, kept)
            leased = tier.acquire([ref.key for ref in kept], "reader").wait(WAIT).handles
            for seed in range(2, 6):
                self._put(tier, chain_refs(half, seed=seed))
            assert self._read(tier, leased) == [content(ref, self.block_bytes) for ref in kept]
            assert run_length(tier, kept) == half
            tier.release(leased)
            for seed in range(6, 9):
                self._put(tier, chain_refs(half, seed=seed))
            assert run_length(tier, kept) == 0
            self._assert_idle(tier)

    def test_hard_capacity_and_reuse_at_full_occupancy(self) -> None:
        count = self.capacity_blocks
        with self._tier() as tier:
            for seed in range(4):
                refs = chain_refs(count, seed=seed)
                assert all(isinstance(result, Handle) for result in self._put(tier, refs))
                stats = tier.stats()
                assert stats["blocks"] <= count
                assert stats["bytes"] <= stats["capacity_bytes"] <= count * self.block_bytes
                self._assert_loads(tier, refs)
            leased = tier.acquire([ref.key for ref in refs], "reader").wait(WAIT).handles
            refused = self._reserve(tier, chain_refs(3, seed=9))
            assert all(isinstance(result, Full) for result in refused)
            assert isinstance(refused[2], Full)
            assert refused[2].reason == "parent_refused"
            tier.release(leased)
            self._assert_idle(tier)

    def test_oversized_block_is_full_takes_descendants_and_evicts_nothing(self) -> None:
        refs = chain_refs(3)
        others = chain_refs(self.capacity_blocks - 1, seed=5)
        huge = self.capacity_blocks * self.block_bytes + 1
        with self._tier() as tier:
            self._put(tier, others)
            small = self.block_bytes
            first, *rest = tier.reserve(refs, [small, huge, small], ["raw"] * 3, "writer")
            assert isinstance(first, Handle)
            assert all(isinstance(result, Full) for result in rest)
            tier.abort([first])
            assert run_length(tier, others) == len(others)
            self._assert_idle(tier)

    def test_oldest_chain_leaves_first_from_its_tail(self) -> None:
        half = self.capacity_blocks // 2
        old, new = chain_refs(half, seed=1), chain_refs(half, seed=2)
        quarter = half // 2
        with self._tier() as tier:
            self._put(tier, old)
            self._put(tier, new)
            self._put(tier, chain_refs(quarter, seed=3))
            left = run_length(tier, old)
            assert half - quarter - self.eviction_slack <= left <= half - quarter
            self._assert_tail_is_gone(tier, old, left)
            assert run_length(tier, new) == half
            self._assert_loads(tier, old[:left])

    def _assert_tail_is_gone(self, tier: Tier, refs: Sequence[BlockRef], left: int) -> None:
        tail = tier.contains([ref.key for ref in refs[left:]]).wait(WAIT).statuses
        assert Status.OK not in tail

    def test_acquire_renews_recency_and_contains_does_not(self) -> None:
        half = self.capacity_blocks // 2
        used, asked = chain_refs(half, seed=1), chain_refs(half, seed=2)
        with self._tier() as tier:
            self._put(tier, used)
            self._put(tier, asked)
            self._assert_loads(tier, used)
            for _ in range(20):
                assert run_length(tier, asked) == half
            self._put(tier, chain_refs(half, seed=3))
            assert run_length(tier, asked) == 0
            assert run_length(tier, used) >= half - self.eviction_slack

    def test_no_child_outlives_its_parent(self) -> None:
        dice = random.Random(8)  # noqa: S311
        chains = [chain_refs(self.capacity_blocks // 2, seed=seed) for seed in range(6)]
        with self._tier() as tier:
            for _ in range(60):
                refs = dice.choice(chains)
                stop = dice.randint(1, len(refs))
                if dice.random() < 0.5:
                    self._put(tier, refs[:stop])
                else:
                    start = dice.randrange(stop)
                    load(tier, [ref.key for ref in refs[start:stop]])
                for chain in chains:
                    left = run_length(tier, chain)
                    if self.eager_closure:
                        self._assert_tail_is_gone(tier, chain, left)
            for chain in chains:
                self._assert_loads(tier, chain[: run_length(tier, chain)])
