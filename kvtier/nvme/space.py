"""Space: where room for new records comes from, and where that of dropped ones goes.

In this order: this writer's arena, free pages, pages never used so far, records that nobody needs, what dead
writers left behind.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from kvtier.errors import TierFull
from kvtier.events import EventLog
from kvtier.keys import STORE_KEY_BYTES
from kvtier.nvme.arena import Arena
from kvtier.nvme.counting import Counts
from kvtier.nvme.directory import Directory
from kvtier.nvme.extents import PAGE, Extent
from kvtier.nvme.growing import Grower
from kvtier.nvme.holds import Holds
from kvtier.nvme.index import Index
from kvtier.nvme.ledger import Ledger, Record, State
from kvtier.nvme.recency import Recency
from kvtier.nvme.segments import Segments
from kvtier.nvme.victims import Victim
from kvtier.tiers import BlockRef

__all__ = ["DROPS", "Change", "Placed", "Space"]

_log = logging.getLogger(__name__)

DROPS = 512
"""Records that one transaction drops at most."""

_BATCH = 32
_PLANNED = 1024
_PLANS = 8
_ARENA_PAGES = (64 << 20) // PAGE
_ARENA_SHARE = 64
_SCANNED = 8192
_POLL_SECONDS = 0.01
_PREPARED_BY_OTHERS = 100  # polls: zero-filling a step takes tens of milliseconds


class Placed(NamedTuple):
    """Extents of the leading records that found room, and why the others did not."""

    extents: list[tuple[Extent, ...]]
    reason: str


class Change:
    """A write transaction that drops or replaces records. Made by `Space.changing`.

    Attributes:
        ledger: the transaction's.
        freed: pages of what was dropped, so far nobody's.
        doomed, removed: first pages of dropped records, not leased and leased.
        broken: records that were met with broken seals and dropped; see `Ledger.drop_broken`.
        rows: recency rows that are no record's any more.
        stored: what became a record.
        taken: free pages that become this writer's.
    """

    __slots__ = ("_gone", "_holds", "_keys", "_lock", "_recency", "_writer", "broken", "doomed", "freed", "ledger",
                 "removed", "rows", "stored", "taken")  # fmt: skip

    def __init__(
        self, ledger: Ledger, holds: Holds, lock: threading.Lock, recency: Recency, writer: bytes, *, told: bool
    ) -> None:
        self.ledger = ledger
        self.broken: list[tuple[int | None, bytes]] = []
        self.doomed: list[int] = []
        self.freed: list[Extent] = []
        self.removed: list[int] = []
        self.rows: list[int] = []
        self.stored: list[BlockRef] = []
        self.taken: list[Extent] = []
        self._keys: list[bytes] = []
        self._gone: list[tuple[int, bytes]] | None = [] if told else None
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
        self.ledger.drop(key, record)
        if free:
            self.freed += record.extents
        else:
            self.ledger.hold(record.extents, self._writer)
        self.rows.append(record.row)
        self._keys.append(key)
        if self._gone is not None:
            self._gone.append((self.ledger.ref(key, record).ns, key))
        return True

    def tell(self, events: EventLog, tier: str, reason: str) -> None:
        """After the commit: say what it changed."""
        # What was replaced by a better version was never away.
        fresh = {ref.key for ref in self.stored}
        events.removed(tier, [(ns, key) for ns, key in self.broken if ns is not None and key not in fresh], "damaged")
        events.removed(tier, [(ns, key) for ns, key in self._gone or () if key not in fresh], reason)
        events.stored(tier, self.stored)

    def finish(self, *, keep: bool) -> None:
        """Before the commit: what was freed is free, or kept for this writer."""
        self.broken = self.ledger.drop_broken()
        self._recency.forget(self.rows[: len(self._keys)], self._keys)
        if keep:
            self.ledger.hold(self.freed, self._writer)
        else:
            self.ledger.release(self.freed)

    def give_up(self, row: int) -> None:
        """A row turned out to be no record's. After all `drop`s."""
        self.rows.append(row)


class Space:
    """Room for records, over all processes on the directory. Thread-safe.

    Args:
        directory, index, recency, segments: the opened parts.
        holds: what this process holds.
        min_free_bytes: what the file system must keep free when the segments grow.
        counts: where to count.

    Attributes:
        lock: covers `holds`.
        events: told what this process changes, in the order of the commits, once somebody is to be.
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
        self._holds = holds
        self._counts = counts
        self._writer = directory.writer
        self._grower = Grower(directory, index, segments, min_free_bytes, counts, self._tidy)
        self.lock = threading.Lock()
        self.events: EventLog | None = None
        self._telling = threading.Lock()
        self._arena = Arena()
        self._arena_pages = _ARENA_PAGES
        self._carved = self._carved_before = 0
        self._victims: deque[Victim] = deque()

    # ---- changes

    @contextmanager
    def changing(self, *, keep: bool = False, reason: str = "removed") -> Iterator[Change]:
        """A transaction that may drop records; undone as a whole by an exception.

        Args:
            keep: pages of dropped records go to this writer's arena.
            reason: why they are dropped, for who follows the events.
        """
        events = self.events
        if events is None:
            with self._transaction(keep=keep, told=False) as change:
                yield change
            return
        # Writing transactions wait for each other anyway.
        with self._telling:
            with self._transaction(keep=keep, told=True) as change:
                yield change
            change.tell(events, self._counts.name, reason)

    @contextmanager
    def _transaction(self, *, keep: bool, told: bool) -> Iterator[Change]:
        change: Change | None = None
        try:
            with self._index.write() as ledger:
                change = Change(ledger, self._holds, self.lock, self._recency, self._writer, told=told)
                yield change
                change.finish(keep=keep)
                state = ledger.state
        except BaseException:
            with self.lock:
                for page in change.removed if change else ():
                    self._holds.mark_removed(page, removed=False)
            raise
        else:
            if keep:
                self._put_in_arena(change.freed)
            if change.taken:
                self._put_in_arena(change.taken)
                self._grower.ask_ahead(state)
            self._recency.retire(change.rows)
            self._report(state)
            self._counts.altered(len(change.broken))
        finally:
            if change is not None:
                with self.lock:
                    self._holds.spare(change.doomed)

    def _put_in_arena(self, extents: Sequence[Extent]) -> None:
        with self.lock:
            self._arena.add(extents)

    def _report(self, state: State) -> None:
        self._counts.sums(state, self._arena.idle)

    def free(self, extents: Sequence[Extent]) -> None:
        """These pages, held by this writer, are needed no more."""
        if extents:
            self._put_in_arena(extents)
            if self._arena.idle > 2 * self._arena_pages:
                self.give_back(self._arena_pages)

    def give_back(self, rest: int = 0) -> None:
        """Make all but about `rest` pages of the arena everybody's."""
        with self.lock:
            drained = self._arena.drain(rest)
        if not drained:
            return
        try:
            with self._index.write() as ledger:
                ledger.free_held(drained, self._writer)
                state = ledger.state
        except TierFull as error:
            self._counts.failed("free", error)
            self._put_in_arena(drained)
        else:
            self._report(state)

    def disown(self) -> None:
        """The index says that the arena is not this writer's any more: what is, is freed when the tier closes."""
        with self.lock:
            self._arena.drain()

    def _tidy(self) -> None:
        """Do not keep from others what this writer, or a process that died, does not need."""
        self._index.forget_dead_readers()
        with self.lock:
            busy = self._carved != self._carved_before
            self._carved_before = self._carved
        if not busy:
            self.give_back()

    # ---- making room

    def place(self, sizes: Sequence[int], parents: Collection[bytes]) -> Placed:
        """Find room for as many of the leading sizes (in pages) as there is, evicting others for it.

        Args:
            sizes: pages of each record.
            parents: keys of the blocks that they build upon; these and their ancestors are not evicted for it.
        """
        with self.lock:
            placed = self._arena.carve_run(sizes)
            self._carved += 1
        if placed:
            return Placed(placed, "")
        try:
            return Placed(placed, self._place(sizes, parents, placed))
        except TierFull as error:
            self._counts.failed("reserve", error)
            return Placed(placed, "index_full")

    def _place(self, sizes: Sequence[int], parents: Collection[bytes], placed: list[tuple[Extent, ...]]) -> str:
        """Append to `placed`; returns why the rest found no room."""
        since = 0
        self._take_free(sum(sizes))
        while True:
            with self.lock:
                rest = sizes[len(placed) :]
                placed += self._arena.carve_run(rest) or self._arena.carve(rest)
                idle = self._arena.idle
            missing = sum(sizes[len(placed) :])
            if not missing:
                return ""
            # What is idle but was not carved is too scattered.
            missing -= idle if idle < missing else 0
            if self._take_free(missing) or self._make_free(missing):
                continue
            since = since or self._protect(parents)
            if not self._evict(missing, since):
                return self._grower.blocked_by or "no_space"

    def _take_free(self, pages: int) -> bool:
        """Bring free pages into the arena: as many as asked, or all there are; and some more if one run has them."""
        with self._index.read() as ledger:
            state = ledger.state
        if not state.free:
            return False
        with self._index.write() as ledger:
            taken = self._take(ledger, pages)
            state = ledger.state
            if not taken and state.free:
                # To try again would be to try for ever.
                self._index.damaged = True
                raise TierFull(
                    f"{state.free} pages are free, but nobody knows which: `kvtier inspect --repair` finds them, "
                    "and so does opening the directory again once it is closed"
                )
        self._put_in_arena(taken)
        self._report(state)
        self._grower.ask_ahead(state)
        return bool(taken)

    def _take(self, ledger: Ledger, pages: int) -> list[Extent]:
        self._arena_pages = min(_ARENA_PAGES, ledger.total // _ARENA_SHARE)
        return ledger.take(pages, max(pages, self._arena_pages), self._writer)

    def stock_up(self, change: Change, pages: int) -> None:
        """Take free pages where the arena has fewer than were just used, and may have so many.

        The next `place` needs no transaction of its own then.
        """
        if self._arena.idle < pages <= self._arena_pages and change.ledger.state.free:
            change.taken = self._take(change.ledger, pages)

    def _make_free(self, pages: int) -> bool:
        """Bring pages into use that never were; whether there may be free ones now."""
        if self._grower.await_ahead():
            return True
        with self._index.read() as ledger:
            state = ledger.state
        return state.free > 0 or self._grower.grow(state, pages) or self._await_others(state)

    def _await_others(self, state: State) -> bool:
        """Wait a moment for pages that another process is zero-filling; whether there are free ones now."""
        patience = _PREPARED_BY_OTHERS
        while state.preparing and not state.free and patience:
            patience -= 1
            time.sleep(_POLL_SECONDS)
            with self._index.read() as ledger:
                state = ledger.state
        return state.free > 0

    def _protect(self, parents: Collection[bytes]) -> int:
        """Renew these and their ancestors; returns the instant from which on nothing used may be evicted."""
        with self._index.read() as ledger:
            rows = [record.row for key in parents if (record := ledger.get(key)) is not None]
        since = self._recency.tick()
        for row in rows:
            self._recency.touch(row)
        return since

    def _evict(self, pages: int, since: int) -> bool:
        """Reclaim what dead writers held, or evict at least one batch; False if neither can be."""
        evicted = self._evict_planned(pages, since)
        for _ in range(_PLANS):
            if evicted:
                break
            if self.reclaim():
                return True
            if not self._plan(since):
                return False
            evicted = self._evict_planned(pages, since)
        self._counts.evicted("capacity", evicted)
        return evicted > 0

    def _plan(self, since: int) -> bool:
        """Choose the next victims; False if there are none."""
        with self._index.read(self.lock) as ledger:
            rows = self._holds.leased_rows()
            blocks = ledger.blocks
        victims = self._recency.victims(max(_BATCH, min(_PLANNED, blocks // 64)), rows, since)
        kin = self._reunited({victim.top for victim in victims if victim.top is not None})
        self._victims = deque(victim for victim in victims if victim.top not in kin)
        return bool(victims)

    def _reunited(self, tops: Collection[int]) -> set[int]:
        """Rows that look like orphans, but whose parents were stored anew; they are linked to them."""
        reunited: set[int] = set()
        with self._index.read() as ledger:
            for row in tops:
                found = ledger.at_row(self._recency.head(row), row)
                parent = ledger.get(found[1].parent) if found is not None and found[1].parent is not None else None
                if parent is not None:
                    self._recency.relink(row, parent.row)
                    reunited.add(row)
        return reunited

    def _evict_planned(self, pages: int, since: int) -> int:
        victims = self._victims
        if not victims:
            return 0
        evicted = 0
        stale: list[int] = []
        with self.changing(keep=True, reason="capacity") as change:
            least = min(_BATCH, max(1, change.ledger.blocks // 8))
            freed = 0
            while victims and (freed < pages or evicted < least):
                try:
                    victim = victims.popleft()
                except IndexError:  # another thread took the last one
                    break
                found = change.ledger.at_row(victim.head, victim.row)
                if found is None:
                    stale += self._stale_rows(victim)
                elif self._may_go(victim, since) and change.drop(*found, spare_leased=True):
                    evicted += 1
                    freed += sum(extent.pages for extent in found[1].extents)
            for row in stale:
                change.give_up(row)
        return evicted

    def _stale_rows(self, victim: Victim) -> list[int]:
        """The victim's row, unless another process has given it to a new record since it was planned."""
        if not self._recency.matches(victim.row, victim.head):
            return []
        self._recency.forget([victim.row], [victim.head])
        return [victim.row]

    def _may_go(self, victim: Victim, since: int) -> bool:
        return victim.stamp < since and self._recency.unused_since(victim)

    def forget_plan(self) -> None:
        """Choose victims anew: removed records have left descendants that nobody can reach."""
        self._victims = deque()

    def reclaim(self) -> bool:
        """Free what dead writers held; whether there was something."""
        with self._index.read() as ledger:
            writers = ledger.writers() - {self._writer}
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
                ledger.free_held([hold.extent], hold.writer)
            state = ledger.state
        self._report(state)
        if holds:
            _log.info("%s: reclaimed %d holds of dead writers", self._directory.path, len(holds))
        return bool(holds)

    # ---- opening and closing

    def occupied_bytes(self, state: State) -> int:
        """Bytes of records, and of pages held for some; this writer's arena does not count. Under `lock`."""
        return (state.occupied - self._arena.idle) * PAGE

    def start(self) -> None:
        """Begin to prepare pages ahead of their use."""
        self._grower.start()

    def resize(self, total: int) -> None:
        """Set the capacity; what lies beyond a smaller one is dropped. Nobody else may have the directory open."""
        dropped = self.drop_between(total, 2**32)
        with self._index.write() as ledger:
            ledger.free.cut(total)
            state = ledger.state._replace(total=total, prepared=min(ledger.state.prepared, total))
            ledger.state = state
        if dropped:
            self._counts.evicted("resize", dropped)
        self._report(state)

    def drop_broken(self, keys: Collection[bytes] | None = None) -> int:
        """Drop those of these records, or of all, whose seals are broken; returns how many."""
        with self.changing(reason="damaged") as change:
            for _ in change.ledger.records() if keys is None else change.ledger.find(list(keys)):
                pass
        return len(change.broken)

    def drop_between(self, start: int, stop: int) -> int:
        """Drop the records that have pages in [start, stop), some at a time; returns how many."""
        dropped, key = 0, bytes(STORE_KEY_BYTES)
        while key:
            with self._index.read() as ledger:
                seen = list(islice(ledger.records(key), _SCANNED))
            hit = [item for item in seen if any(part.page < stop and part.end > start for part in item[1].extents)]
            for at in range(0, len(hit), DROPS):
                with self.changing(reason="capacity") as change:
                    for name, record in hit[at : at + DROPS]:
                        if change.ledger.get(name) == record:
                            dropped += change.drop(name, record, spare_leased=False)
            key = seen[-1][0] + b"\0" if len(seen) == _SCANNED else b""
        return dropped

    def clear(self, spaces: Collection[int] | None = None) -> int:
        """Drop the records of these namespaces, or all, some at a time; returns how many."""
        dropped, start = 0, bytes(STORE_KEY_BYTES)
        while start:
            with self.changing(reason="cleared") as change:
                page = list(islice(change.ledger.records(start), DROPS))
                for key, record in page:
                    if spaces is None or change.ledger.ref(key, record).ns in spaces:
                        dropped += change.drop(key, record, spare_leased=False)
            start = page[-1][0] + b"\0" if len(page) == DROPS else b""
        self.forget_plan()
        return dropped

    def grow_total(self, total: int) -> None:
        """Raise the capacity, while others may have the directory open."""
        with self._index.write() as ledger:
            ledger.state = ledger.state._replace(total=max(total, ledger.state.total))
            state = ledger.state
        self._report(state)

    def close(self) -> None:
        """End the thread that prepares pages."""
        self._grower.close()
