"""Growing: pages never used so far come into use, zero-filled ahead of their first use where there is time."""

import threading
from collections.abc import Callable

from kvtier.errors import TierError
from kvtier.nvme.counting import Counts
from kvtier.nvme.directory import Directory
from kvtier.nvme.extents import PAGE, Extent
from kvtier.nvme.index import Index
from kvtier.nvme.ledger import State
from kvtier.nvme.segments import Segments, disk_free

__all__ = ["Grower"]

_STEP_PAGES = (16 << 20) // PAGE
_AHEAD_PAGES = 2 * _STEP_PAGES
_TIDY_SECONDS = 1.0


class Grower:
    """Brings unprepared pages into use, some of them ahead of time in a thread of its own. Thread-safe.

    Args:
        directory, index, segments: the opened parts.
        min_free_bytes: what the file system must keep free.
        counts: where to count.
        tidy: called about once a second, in the thread.

    Attributes:
        blocked_by: why the last growth was refused; "" if it was not, or all pages are in use.
    """

    def __init__(
        self,
        directory: Directory,
        index: Index,
        segments: Segments,
        min_free_bytes: int,
        counts: Counts,
        tidy: Callable[[], None],
    ) -> None:
        self.blocked_by = ""
        self._directory = directory
        self._index = index
        self._segments = segments
        self._min_free_bytes = min_free_bytes
        self._counts = counts
        self._tidy = tidy
        self._wake = threading.Condition()
        self._closing = False
        self._wanted = True
        self._preparing = False
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{counts.name}-prepare", daemon=True)

    def start(self) -> None:
        """Begin to prepare pages ahead of their use."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    # ---- on demand

    def grow(self, state: State, pages: int) -> bool:
        """Bring unprepared pages into use as they are; whether the sums may have changed."""
        step = self._next_step(state, pages)
        if step is None:
            return False
        with self._index.write() as ledger:
            ledger.prepare(step.page, step.pages, None)
        return True

    def ask_ahead(self, state: State) -> None:
        """Some pages were taken: prepare others if few are left."""
        if state.free < _AHEAD_PAGES and state.prepared < state.total:
            with self._wake:
                self._wanted = True
                self._wake.notify_all()

    def await_ahead(self) -> bool:
        """Wait for the pages that are being prepared; whether there were some."""
        with self._wake:
            busy = self._preparing
            self._wake.wait_for(lambda: not self._preparing)
        return busy

    def _next_step(self, state: State, pages: int) -> Extent | None:
        """The next unprepared pages, set aside by the file system; None if there are none to be had."""
        step = Extent(state.prepared, min(state.total - state.prepared, max(pages, 1)))
        if not step.pages:
            self.blocked_by = ""
            return None
        try:
            if disk_free(self._directory.path) - step.pages * PAGE < self._min_free_bytes:
                self.blocked_by = "free_space_floor"
                return None
            self._segments.allocate(step)
        except OSError as error:
            self._counts.failed("grow", error)
            self.blocked_by = "no_space_on_device"
            return None
        self.blocked_by = ""
        return step

    # ---- ahead

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._wanted or self._closing, _TIDY_SECONDS)
                if self._closing:
                    return
                step, self._wanted = self._wanted, False
                self._preparing = step
            again = False
            try:
                if step:
                    again = self._prepare_step()
                else:
                    self._tidy()
            except (TierError, OSError) as error:
                self._counts.failed("prepare", error)
            finally:
                with self._wake:
                    self._preparing = False
                    self._wanted |= again
                    self._wake.notify_all()

    def _prepare_step(self) -> bool:
        """Zero-fill the next pages; whether there is more to do."""
        with self._index.read() as ledger:
            state = ledger.state
        if state.free >= _AHEAD_PAGES:
            return False
        step = self._next_step(state, _STEP_PAGES)
        if step is None:
            return False
        with self._index.write() as ledger:
            if not ledger.prepare(step.page, step.pages, self._directory.writer):
                return True
        try:
            self._segments.zero(step)
        except OSError as error:
            # They are usable as they are; whoever writes to them learns more.
            self._counts.failed("prepare", error)
        with self._index.write() as ledger:
            ledger.free_held([step], self._directory.writer)
        return True
