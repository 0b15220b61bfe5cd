"""HintSuite: what hints do to the order in which a tier evicts."""

from kvtier.hints import Hint
from kvtier.testing.blocks import chain_refs, run_length
from kvtier.testing.tier_case import TierCase

__all__ = ["HintSuite"]


class HintSuite(TierCase):
    """Part of `TierSuite`. A tier that honours no hint must still take them."""

    def test_what_will_not_be_used_again_leaves_first(self) -> None:
        half = self.capacity_blocks // 2
        old, dead, later = (chain_refs(half, seed=seed) for seed in range(3))
        with self._tier() as tier:
            self._put(tier, old)
            self._put_with(tier, dead, "raw", Hint(reuse="none"))
            self._assert_loads(tier, dead)
            self._put(tier, chain_refs(half // 2, seed=9))
            if self.honours_reuse:
                assert run_length(tier, dead) <= half - half // 2
                assert run_length(tier, old) >= half - self.eviction_slack
            tier.hint([ref.key for ref in old], [Hint(reuse="none")] * half)
            self._put(tier, later)
            if self.honours_reuse:
                assert run_length(tier, old) + run_length(tier, dead) <= half - half // 2
                assert run_length(tier, later) == half

    def test_a_weighty_block_ages_slowly(self) -> None:
        half = self.capacity_blocks // 2
        weighty, ordinary = chain_refs(half, seed=1), chain_refs(half, seed=2)
        with self._tier() as tier:
            self._put_with(tier, weighty, "raw", Hint(priority=1e9))
            self._put(tier, ordinary)
            self._put(tier, chain_refs(half // 2, seed=3))
            if self.honours_priority:
                assert run_length(tier, weighty) == half
                assert run_length(tier, ordinary) <= half - half // 2

    def test_hints_for_absent_keys_are_ignored(self) -> None:
        refs = chain_refs(2)
        with self._tier() as tier:
            self._put(tier, refs[:1])
            tier.hint([ref.key for ref in refs], [Hint(reuse="likely", session="s")] * 2)
            tier.hint([], [])
            assert run_length(tier, refs) == 1
