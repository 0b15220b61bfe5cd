"""PrefillProcess: a prefill engine in a process of its own, which lives no longer than the one that started it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.errors import KVTierError, TierUnavailable

__all__ = ["PrefillProcess"]

_END_SECONDS = 15.0


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
