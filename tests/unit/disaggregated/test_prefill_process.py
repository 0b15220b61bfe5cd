import os
import signal
from pathlib import Path

import pytest

from kvtier.disaggregated.process import PrefillProcess
from kvtier.errors import TierUnavailable


def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    process = PrefillProcess(tmp_path / "socket", {"engine": {"block_size": -1}})
    with pytest.raises(TierUnavailable, match=r"could not be started: engine\.block_size = -1"):
        process.wait_ready()
    process.close()
    assert not process.alive


def test_a_process_that_dies_before_it_is_up_is_noticed(tmp_path: Path) -> None:
    process = PrefillProcess(tmp_path / "socket", {})
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(TierUnavailable, match="exit code -9"):
        process.wait_ready()
    process.close()
    process.close()
