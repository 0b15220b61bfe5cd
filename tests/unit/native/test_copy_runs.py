"""Many copies in one call: compiled and not, by one thread and by several."""

import numpy as np
import pytest

from kvtier.native import copying


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("sizes", [[], [1], [0, 3, 4096, 17], [1 << 20] * 9 + [5], [9 << 20, 1, 2]])
def test_every_run_arrives_and_nothing_else_changes(monkeypatch, compiled, sizes):
    if compiled and not copying.available():
        pytest.skip("no compiled copies here")
    if not compiled:
        monkeypatch.setattr(copying, "_compiled", None)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    gap = 64
    lengths = np.array(sizes, np.int64)
    starts = np.cumsum(lengths + gap) - lengths
    source = np.random.default_rng(0).integers(0, 256, int(lengths.sum()) + gap, np.uint8)
    target = np.full(int((lengths + gap).sum()) + gap, 7, np.uint8)
    expected = target.copy()
    sources = np.cumsum(lengths) - lengths
    for start, length, at in zip(starts, lengths, sources, strict=True):
        expected[start : start + length] = source[at : at + length]
    copying.copy_runs(target.ctypes.data + starts, source.ctypes.data + sources, lengths)
    assert (target == expected).all()
