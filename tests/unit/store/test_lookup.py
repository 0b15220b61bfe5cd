"""Galloping look-up against a linear scan."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvtier.store.lookup import leading_run


class _Index:
    def __init__(self, held: int) -> None:
        self.held = held
        self.probes = 0

    def __call__(self, blocks: Sequence[int]) -> list[bool]:
        self.probes += len(blocks)
        return [block < self.held for block in blocks]


@given(st.integers(0, 300), st.integers(0, 300))
def test_equals_a_linear_scan(length: int, held: int) -> None:
    assert leading_run(length, _Index(held)) == min(length, held)


def test_needs_logarithmically_many_probes() -> None:
    for held in (0, 1, 4095, 5000, 8191, 8192):
        index = _Index(held)
        assert leading_run(8192, index) == held
        assert index.probes <= 27


@given(st.integers(0, 9000), st.integers(0, 9000))
def test_a_wide_one_asks_few_times_and_never_for_many(length: int, held: int) -> None:
    batches = []
    index = _Index(held)

    def counted(blocks: Sequence[int]) -> list[bool]:
        batches.append(len(blocks))
        return index(blocks)

    assert leading_run(length, counted, wide=True, few=16) == min(length, held)
    assert len(batches) <= (1 if length <= 16 else 2 if length <= 128 else 3)
    assert max(batches, default=0) <= 64
