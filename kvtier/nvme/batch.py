"""A batch: one ticket's records on their way between callers' memory and the device, split among workers."""

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np

from kvtier.errors import FormatMismatch
from kvtier.nvme.holds import NvmeHandle
from kvtier.nvme.io import BlockIO, Transfer
from kvtier.tiers import Handle, Status, expired

__all__ = ["Batch", "check_buffer", "transfers"]

_log = logging.getLogger(__name__)


class Batch:
    """Runs `move` over windows of items in the workers, then `done` once, in the worker that ends last.

    Args:
        blocks: the workers.
        items: what moves.
        deadline: absolute; windows that did not begin by then are TIMEOUT.
        move: moves the items of these indices and returns their statuses.
        done: gets the status of every item.
        failed: status of items that met an error nobody foresaw.
    """

    def __init__(
        self,
        blocks: BlockIO,
        items: Sequence[Transfer],
        deadline: float | None,
        move: Callable[[list[int]], list[Status]],
        done: Callable[[list[Status]], None],
        failed: Status,
    ) -> None:
        self._blocks = blocks
        self._items = items
        self._deadline = deadline
        self._move = move
        self._done = done
        self._failed = failed
        self._statuses = [Status.TIMEOUT] * len(items)
        self._lock = threading.Lock()
        self._left = 0

    def start(self) -> None:
        """Hand the shares out."""
        shares = self._blocks.shares(self._items)
        self._left = len(shares)
        if not shares:
            self._done([])
        for share in shares:
            try:
                self._blocks.submit(self._work, share)
            except RuntimeError:  # the tier was closed since the batch was made
                self._end(share, failed=True)

    def _work(self, share: list[int]) -> None:
        failed = False
        try:
            self._move_share(share)
        except Exception:  # noqa: BLE001  a thread's top level
            _log.exception("a batch of %d blocks failed", len(share))
            failed = True
        self._end(share, failed=failed)

    def _end(self, share: list[int], *, failed: bool) -> None:
        if failed:
            for at in share:
                self._statuses[at] = self._failed
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._done(self._statuses)

    def _move_share(self, share: list[int]) -> None:
        for window in self._blocks.windows(self._items, share):
            if expired(self._deadline):
                return
            for at, status in zip(window, self._move(window), strict=True):
                self._statuses[at] = status


def transfers(handles: Sequence[NvmeHandle], buffers: Sequence[memoryview]) -> list[Transfer]:
    """What moves between these handles' extents and these buffers."""
    return [
        Transfer(handle.extents, handle.nbytes, np.frombuffer(buffer, np.uint8))
        for handle, buffer in zip(handles, buffers, strict=True)
    ]


def check_buffer(handle: Handle, data: memoryview, *, writable: bool) -> None:
    """Raise `FormatMismatch` for a buffer that cannot hold the handle's bytes."""
    if data.nbytes < handle.nbytes or not data.c_contiguous or (writable and data.readonly):
        kind = "writable, contiguous" if writable else "contiguous"
        raise FormatMismatch(
            f"buffer of {data.nbytes} bytes (contiguous={data.c_contiguous}, readonly={data.readonly}): "
            f"this block needs a {kind} one of at least {handle.nbytes} bytes"
        )
