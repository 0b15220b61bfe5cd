"""Short runs of `soak.py` in every mode: 20,000 operations in all."""

from pathlib import Path

import pytest
from soak import soak

MODES = {
    "sound": (5000, {}),
    "faulty": (5000, {"faulty": True}),
    "faulty and leaving": (4000, {"faulty": True, "rule": "leave"}),
    "faulty and at the second touch": (3000, {"faulty": True, "rule": "second_touch"}),
    "hanging": (1500, {"hanging": True, "faulty": True}),
}


@pytest.mark.parametrize("mode", MODES)
def test_random_verbs_from_several_threads_leave_nothing_behind(mode: str) -> None:
    operations, options = MODES[mode]
    outcome = soak(operations, seed=7, **options)
    assert outcome.wrong == ()
    assert outcome.blocks_verified > operations // 10


def test_the_same_over_a_real_nvme_tier(tmp_path: Path) -> None:
    outcome = soak(1500, nvme=tmp_path / "nvme", seed=8)
    assert outcome.wrong == ()
    assert outcome.blocks_verified > 300
