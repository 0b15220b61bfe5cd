"""Group commit: commits that wait for one another become one.

A durable commit waits for the disk. Those that arrive meanwhile wait behind it, and are then made together: one
synchronisation and one transaction for all of them.
"""

import threading
from collections.abc import Callable, Sequence

from kvtier.nvme.holds import NvmeHandle

__all__ = ["GroupCommit"]


class _Waiting:
    __slots__ = ("done", "error", "handles")

    def __init__(self, handles: Sequence[NvmeHandle]) -> None:
        self.handles = handles
        self.done = False
        self.error: BaseException | None = None


class GroupCommit:
    """Thread-safe.

    Args:
        commit: commits handles of one or several callers.
    """

    def __init__(self, commit: Callable[[Sequence[NvmeHandle]], None]) -> None:
        self._commit = commit
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._queue: list[_Waiting] = []

    def __call__(self, handles: Sequence[NvmeHandle]) -> None:
        """Commit, together with whoever waits; raises what `commit` raised."""
        mine = _Waiting(handles)
        with self._lock:
            self._queue.append(mine)
        with self._turn:
            if not mine.done:
                self._lead()
        if mine.error is not None:
            raise mine.error

    def _lead(self) -> None:
        with self._lock:
            group, self._queue = self._queue, []
        error: BaseException | None = None
        try:
            self._commit([handle for waiting in group for handle in waiting.handles])
        except BaseException as raised:  # noqa: BLE001  every caller of the group gets it
            error = raised
        for waiting in group:
            waiting.error = error
            waiting.done = True
