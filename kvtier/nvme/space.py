"""Space: where room for new records comes from, and where that of dropped ones goes.

In this order: pages never used so far, records that nobody needs, what dead writers left behind.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from kvtier.errors import TierError, TierFull
from kvtier.nvme.counting import Counts
from kvtier.nvme.directory import Directory
from kvtier.nvme.extents import PAGE, Extent
from kvtier.nvme.holds import Holds
from kvtier.nvme.index import Index
from kvtier.nvme.ledger import Ledger, Record, State
from kvtier.nvme.recency import Recency, Victim
from kvtier.nvme.segments import Segments, disk_free

__all__ = ["Change", "Space"]

_log = logging.getLogger(__name__)

_BATCH = 32
_STEP_PAGES = (16 << 20) // PAGE
_AHEAD_PAGES = 2 * _STEP_PAGES


class Change:
    """A write transaction that drops or replaces records. Made by `Space.changing`."""

    __slots__ = ("_holds", "_lock", "_recency", "_writer", "doomed", "ledger", "removed", "rows")

    def __init__(self, ledger: Ledger, holds: Holds, lock: threading.Lock, recency: Recency, writer: bytes) -> None:
        self.ledger = ledger
        self.doomed: list[int] = []
        self.removed: list[int] = []
        self.rows: list[int] = []
        self._holds = holds
        self._lock = lock
        self._recency = recency
        self._writer = writer

    def drop(self, key: bytes, record: Record, *, spare_leased: bool) -> bool:
        """Drop a record. A leased one is spared, or becomes invisible now and free with its last lease."""
        with self._lock:
            free = self._holds.doom(record)
            if free:
                self.doomed.append(record.page)
            elif not spare_leased:
                self._holds.mark_removed(record.page, removed=True)
                self.removed.append(record.page)
        if not free and spare_leased:
            return False
        self.ledger.drop(key, record, None if free else self._writer)
        if self._recency.matches(record.row, key):
            self._recency.forget([record.row])
        self.rows.append(record.row)
        return True


class Space:
    """Room for records, over all processes on the directory. Thread-safe.

    Args:
        directory, index, recency, segments: the opened parts.
        holds: what this process holds.
        min_free_bytes: what the file system must keep free when the segments grow.
        counts: where to count.

    Attributes:
        lock: covers `holds`.
    """

    def __init__(
        self,
        directory: Directory,
        index: Index,
        recency: Recency,
        segments: Segments,
        holds: Holds,
        min_free_bytes: int,
        counts: Counts,
    ) -> None:
        self._directory = directory
        self._index = index
        self._recency = recency
        self._segments = segments
        self._holds = holds
        self._min_free_bytes = min_free_bytes
        self._counts = counts
        self._writer = directory.writer
        self.lock = threading.Lock()
        self._victims: deque[Victim] = deque()
        self._owed: list[int] = []
        self._wake = threading.Condition()
        self._closing = False
        self._wanted = True
        self._preparing = False
        self._blocked_by = ""
        self._preparer = threading.Thread(target=self._prepare_ahead, name=f"kvtier-{counts.name}-prepare", daemon=True)

    # ---- changes

    @contextmanager
    def changing(self) -> Iterator[Change]:
        """A transaction that may drop records; undone as a whole by an exception."""
        change: Change | None = None
        try:
            with self._index.write() as ledger:
                change = Change(ledger, self._holds, self.lock, self._recency, self._writer)
                yield change
                state = ledger.state
        except BaseException:
            with self.lock:
                for page in change.removed if change else ():
                    self._holds.mark_removed(page, removed=False)
            raise
        else:
            self._recency.retire(change.rows)
            self._counts.sums(state)
        finally:
            if change is not None:
                with self.lock:
                    self._holds.spare(change.doomed)

    def free(self, pages: Sequence[int]) -> None:
        """End holds of this writer, named by their first pages; what the index refuses now is freed later."""
        if pages:
            with self.lock:
                self._owed += pages
            self.pay()

    def pay(self) -> None:
        """Free what is owed."""
        with self.lock:
            owed, self._owed = self._owed, []
        if not owed:
            return
        try:
            with self._index.write() as ledger:
                ledger.free_holds(owed, self._writer)
                state = ledger.state
        except TierFull as error:
            self._counts.failed("free", error)
            with self.lock:
                self._owed += owed
        else:
            self._counts.sums(state)

    # ---- making room

    def make(self, pages: int, protected: Callable[[Ledger], Collection[bytes]], *, more: bool = False) -> str:
        """See that `pages` pages are free.

        Args:
            pages: how many.
            protected: keys that must not be evicted for this; asked only if something is to be evicted.
            more: free more in any case, because what is free now is too scattered.

        Returns:
            "", or why there is no such room.
        """
        self.pay()
        kept: Collection[bytes] | None = None
        while True:
            with self._index.read() as ledger:
                state = ledger.state
            if state.free >= pages and not more:
                self._ask_ahead(state)
                return ""
            missing = pages - state.free
            if not (self._await_preparer() or self._grow(state, pages if more else missing)):
                if kept is None:
                    with self._index.read() as ledger:
                        kept = protected(ledger)
                if not (self._evict(missing, kept) or self.reclaim()):
                    return self._blocked_by or "no_space"
            more = False

    def _evict(self, pages: int, kept: Collection[bytes]) -> int:
        """Evict at least one batch, if anything may go; returns how many records went."""
        evicted = self._evict_planned(pages, kept)
        while not evicted and self._plan(kept):
            evicted = self._evict_planned(pages, kept)
        if evicted:
            self._counts.evicted("capacity", evicted)
        return evicted

    def _plan(self, kept: Collection[bytes]) -> bool:
        """Choose the next victims; False if there are none."""
        self.reclaim()
        with self._index.read(self.lock) as ledger:
            rows = self._holds.leased_rows()
            rows += [record.row for key in kept if (record := ledger.get(key)) is not None]
            blocks = ledger.blocks
        self._victims = deque(self._recency.victims(max(_BATCH, blocks // 64), rows))
        return bool(self._victims)

    def _evict_planned(self, pages: int, kept: Collection[bytes]) -> int:
        victims = self._victims
        if not victims:
            return 0
        with self.changing() as change:
            ledger = change.ledger
            least = min(_BATCH, max(1, ledger.blocks // 8))
            goal, evicted = ledger.state.free + max(pages, 1), 0
            while victims and (ledger.state.free < goal or evicted < least):
                try:
                    victim = victims.popleft()
                except IndexError:  # another thread took the last one
                    break
                record = ledger.get(victim.key)
                if not self._recency.matches(victim.row, victim.key):
                    continue  # reused since it was planned
                if record is None or record.row != victim.row:
                    self._recency.forget([victim.row])
                    change.rows.append(victim.row)
                elif victim.key not in kept and self._recency.unused_since(victim):
                    evicted += change.drop(victim.key, record, spare_leased=True)
        return evicted

    def forget_plan(self) -> None:
        """Choose victims anew: removed records have left descendants that nobody can reach."""
        self._victims = deque()

    def reclaim(self) -> bool:
        """Free what dead writers held; whether there was something."""
        with self._index.read() as ledger:
            writers = {hold.writer for hold in ledger.holds()} - {self._writer}
        if not writers:
            return False
        try:
            with self._directory.exclusive():
                return self.reclaim_from(self._directory.dead(writers))
        except OSError as error:
            self._counts.failed("reclaim", error)
            return False

    def reclaim_from(self, dead: Collection[bytes]) -> bool:
        """Free what these writers held; whether there was something."""
        if not dead:
            return False
        with self._index.write() as ledger:
            holds = [hold for hold in ledger.holds() if hold.writer in dead]
            for hold in holds:
                ledger.free_holds([hold.extents[0].page], hold.writer)
            state = ledger.state
        self._counts.sums(state)
        if holds:
            _log.info("%s: reclaimed %d holds of dead writers", self._directory.path, len(holds))
        return bool(holds)

    # ---- growing

    def _next_step(self, state: State, pages: int) -> Extent | None:
        """The next unprepared pages, set aside by the file system; None if there are none to be had."""
        step = Extent(state.prepared, min(state.total - state.prepared, max(pages, 1)))
        if not step.pages:
            self._blocked_by = ""
            return None
        try:
            if disk_free(self._directory.path) - step.pages * PAGE < self._min_free_bytes:
                self._blocked_by = "free_space_floor"
                return None
            self._segments.allocate(step)
        except OSError as error:
            self._counts.failed("grow", error)
            self._blocked_by = "no_space_on_device"
            return None
        self._blocked_by = ""
        return step

    def _grow(self, state: State, pages: int) -> bool:
        """Bring unprepared pages into use as they are; whether the sums may have changed."""
        step = self._next_step(state, pages)
        if step is None:
            return False
        with self._index.write() as ledger:
            ledger.prepare(step.page, step.pages, None)
        return True

    def _ask_ahead(self, state: State) -> None:
        if state.free < _AHEAD_PAGES and state.prepared < state.total:
            with self._wake:
                self._wanted = True
                self._wake.notify_all()

    def _await_preparer(self) -> bool:
        """Wait for the pages that the preparer has in hand; whether there were some."""
        with self._wake:
            busy = self._preparing
            self._wake.wait_for(lambda: not self._preparing)
        return busy

    def start(self) -> None:
        """Begin to prepare pages ahead of their use."""
        self._preparer.start()

    def _prepare_ahead(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._wanted or self._closing)
                if self._closing:
                    return
                self._wanted, self._preparing = False, True
            try:
                again = self._prepare_step()
            except (TierError, OSError) as error:
                again = False
                self._counts.failed("prepare", error)
            finally:
                with self._wake:
                    self._preparing = False
                    self._wake.notify_all()
            with self._wake:
                self._wanted |= again

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
            mine = ledger.prepare(step.page, step.pages, self._writer)
        if not mine:
            return True
        try:
            self._segments.zero(step)
        except OSError as error:
            # They are usable as they are; whoever writes to them learns more.
            self._counts.failed("prepare", error)
        self.free([step.page])
        return True

    # ---- opening and closing

    def resize(self, total: int) -> None:
        """Set the capacity; what lies beyond a smaller one is dropped. Nobody else may have the directory open."""
        with self._index.read() as ledger:
            state = ledger.state
            beyond = [
                (key, record)
                for key, record in ledger.records()
                if any(extent.end > total for extent in record.extents)
            ]
        records = iter(beyond)
        while batch := list(islice(records, 512)):
            with self.changing() as change:
                for key, record in batch:
                    change.drop(key, record, spare_leased=False)
        with self._index.write() as ledger:
            ledger.free.cut(total)
            state = ledger.state._replace(total=total, prepared=min(ledger.state.prepared, total))
            ledger.state = state
        if beyond:
            self._counts.evicted("resize", len(beyond))
        self._segments.cut(total)
        self._counts.sums(state)

    def grow_total(self, total: int) -> None:
        """Raise the capacity, while others may have the directory open."""
        with self._index.write() as ledger:
            ledger.state = ledger.state._replace(total=max(total, ledger.state.total))
            state = ledger.state
        self._counts.sums(state)

    def close(self) -> None:
        """End the preparer and free what is owed."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._preparer.is_alive():
            self._preparer.join()
        self.pay()
