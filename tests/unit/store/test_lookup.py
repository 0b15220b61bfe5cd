"""Galloping look-up against a linear scan."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvtier.store.lookup import leading_run
from kvtier.tiers import Status, Ticket


class _Index:
    name = "index"

    def __init__(self, present: set[bytes]) -> None:
        self.present = present
        self.probes = 0

    def contains(self, keys: Sequence[bytes], deadline: float | None = None) -> Ticket:
        self.probes += len(keys)
        return Ticket().finish([Status.OK if key in self.present else Status.MISS for key in keys])


@given(st.integers(0, 300), st.integers(0, 300))
def test_equals_a_linear_scan(length: int, held: int) -> None:
    keys = [at.to_bytes(16, "little") for at in range(length)]
    index = _Index(set(keys[:held]))
    assert leading_run(index, keys) == min(length, held)


def test_needs_logarithmically_many_probes() -> None:
    keys = [at.to_bytes(16, "little") for at in range(8192)]
    for held in (0, 1, 4095, 5000, 8191, 8192):
        index = _Index(set(keys[:held]))
        assert leading_run(index, keys) == held
        assert index.probes <= 27
