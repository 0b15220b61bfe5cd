import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import until

from kvtier.disaggregated import process as module
from kvtier.disaggregated.process import PrefillProcess, PrefillSupervisor
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


def test_what_cannot_start_is_not_tried_again(tmp_path: Path) -> None:
    started: list[PrefillProcess] = []

    def start() -> PrefillProcess:
        started.append(PrefillProcess(tmp_path / "socket", {"engine": {"block_size": -1}}))
        return started[-1]

    supervisor = PrefillSupervisor(start)
    with pytest.raises(TierUnavailable, match=r"engine\.block_size = -1"):
        supervisor.wait_ready()
    supervisor.close()
    supervisor.close()
    assert len(started) == 1
    assert not supervisor.process.alive


class Stub(PrefillProcess):
    """A process that is up at once, and lives until it is killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "print('{}', flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )


def test_one_that_dies_is_started_again_ever_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESTART_SECONDS", (0.01, 0.02, 3600.0))
    restarts: list[int] = []
    supervisor = PrefillSupervisor(Stub)
    supervisor.restarted = lambda: restarts.append(supervisor.process.pid)
    supervisor.wait_ready()
    seen = [supervisor.process.pid]
    try:
        for _ in range(2):
            os.kill(seen[-1], signal.SIGKILL)
            until(lambda: len(restarts) == len(seen))
            seen.append(supervisor.process.pid)
            assert supervisor.process.alive
        assert seen[1:] == restarts
        os.kill(seen[-1], signal.SIGKILL)
        until(lambda: not supervisor.process.alive)
    finally:
        # Within an hour's pause, too.
        supervisor.close()
    assert len(restarts) == 2
    assert not supervisor.process.alive
