"""PrefillProcess: a prefill engine in a process of its own, which lives no longer than the one that started it."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtier.errors import KVTierError, TierUnavailable

__all__ = ["PrefillProcess", "PrefillSupervisor"]

_log = logging.getLogger(__name__)

_END_SECONDS = 15.0
# Before a process that died is started again: the second and later numbers for those that died soon.
_RESTART_SECONDS = (0.5, 2.0, 8.0, 30.0)
_SOON_SECONDS = 60.0


class PrefillProcess:
    """`python -m kvtier.disaggregated`, with its settings on standard input, which stays open as long as we live.

    Args:
        socket: where it will listen.
        settings: sections of the configuration, as nested mappings.
        threads: of its tensor operations; None: as many as this process's environment says.
    """

    def __init__(self, socket: Path, settings: Mapping[str, Any], threads: int | None = None) -> None:
        environment = dict(os.environ)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        # A fresh interpreter, not a fork: threads and CUDA do not survive one. In a session of its own: what a terminal
        # sends to interrupt us must not end it before what it computes is let go.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvtier.disaggregated"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        order = json.dumps({"socket": str(socket), "settings": settings}, default=str)
        self._tell(order.encode() + b"\n")

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Return once it listens.

        Raises:
            TierUnavailable: it ended before that; the message is what it had to say.
        """
        if self._process.stdout is None:
            raise KVTierError("the prefill process has no output: expected a pipe")
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it ended with exit code {self._process.wait()}"}
        if "error" in answer:
            raise TierUnavailable(f"the prefill process could not be started: {answer['error']}")

    def wait(self) -> int:
        """Return its exit code, once it has one."""
        return self._process.wait()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def close(self) -> None:
        """Let it end: its engine, then its tiers, are closed. Killed where it takes too long. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: bytes) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(line)
            self._process.stdin.flush()


class PrefillSupervisor:
    """A `PrefillProcess` that is started again when it dies: at once, but less and less often if that does not help.

    Attributes:
        restarted: called, in a thread of the supervisor's own, for each one that was started again and is up.

    Args:
        start: starts a process.
    """

    def __init__(self, start: Callable[[], PrefillProcess]) -> None:
        self.restarted: Callable[[], None] = lambda: None
        self._start = start
        self._process = start()
        self._starting = True
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="kvtier-prefill", daemon=True)

    @property
    def process(self) -> PrefillProcess:
        """The latest one."""
        return self._process

    def wait_ready(self) -> None:
        """Return once the first process listens; from then on it is watched.

        Raises:
            TierUnavailable: see `PrefillProcess.wait_ready`.
        """
        self._process.wait_ready()
        self._starting = False
        self._thread.start()

    def close(self) -> None:
        """End the process, and start no other one. Idempotent."""
        self._closing.set()
        with self._lock:
            # One that is not up yet has nothing to let go, and would have to be waited for.
            if self._starting:
                self._process.kill()
        if self._starting and self._thread.is_alive():
            self._thread.join()
        self._process.close()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        deaths = 0
        while True:
            began = time.monotonic()
            code = self._process.wait()
            if self._closing.is_set():
                return
            deaths = deaths + 1 if time.monotonic() - began < _SOON_SECONDS else 1
            pause = _RESTART_SECONDS[min(deaths, len(_RESTART_SECONDS)) - 1]
            _log.warning("the prefill process ended with exit code %d; it is started again in %s s", code, pause)
            if self._closing.wait(pause) or not self._start_again():
                return

    def _start_again(self) -> bool:
        """False: it is not wanted any more."""
        with self._lock:
            if self._closing.is_set():
                return False
            self._process.close()
            self._process, self._starting = self._start(), True
        try:
            self._process.wait_ready()
        except KVTierError as error:
            _log.warning("%s", error)
            return True
        finally:
            self._starting = False
        self.restarted()
        return True
