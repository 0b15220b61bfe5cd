"""NvmeTier: blocks in segment files, named by an index, shared by all processes on a directory.

put     reserve (pages from the writer's arena) -> write (bytes) -> commit (index: held -> record, one transaction)
get     acquire (index look-ups) -> read (bytes, checksum)

An index entry is made after its bytes are written, and nowhere else: whatever process dies at whatever instant,
what the index names is complete, and what is held by nobody alive is reclaimed.

What survives                   death of processes      power loss, or death of the kernel
durable=False (default)         every commit            what lay there at the last clean close; if it was not closed,
                                                        the directory starts empty, since its index may be damaged
durable=True                    every commit            every commit: bytes are synchronised before the index names
                                                        them, and the index before `commit` returns; commits that
                                                        arrive meanwhile share the next synchronisation
`flush` makes everything committed so far safe on the disk, but only a clean close says so in the directory.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path

from kvtier.events import EventLog
from kvtier.hints import Hint
from kvtier.keys import STORE_KEY_BYTES
from kvtier.metrics import Metrics
from kvtier.nvme.batch import Deadlines
from kvtier.nvme.checking import check_directory
from kvtier.nvme.counting import Counts
from kvtier.nvme.extents import PAGE
from kvtier.nvme.io import BlockIO
from kvtier.nvme.ledger import Record
from kvtier.nvme.opening import NvmeOptions, close_directory, open_directory, sync_directory
from kvtier.nvme.reading import Reader
from kvtier.nvme.repairing import repair_directory
from kvtier.nvme.space import DROPS
from kvtier.nvme.writing import Writer
from kvtier.tiers import (
    BlockRef,
    Completions,
    Done,
    Handle,
    Owner,
    Reservation,
    Status,
    Ticket,
    TierCaps,
    namespaces_in,
)

__all__ = ["NvmeTier"]


class NvmeTier:
    """Implements `kvtier.tiers.Tier` on a directory that outlives the process and that others may share.

    Look-ups run in the caller's thread; bytes move and are verified in the tier's own. Several processes may open
    one directory: they share its capacity and its blocks, while leases bind this process only. A block that another
    process evicted between look-up and read fails its checksum and is a miss.

    Closure is lazy: a block below a removed one stays in the index, unreachable for `acquire`, and is evicted first.

    Args:
        path: the directory, made if absent. One tier per directory and process.
        capacity_bytes: hard limit for all processes together, in whole 4 KiB pages, at least 1 MiB. A smaller one
            than before drops what lies beyond it. The index comes on top, about 160 bytes per block.
        options: see `NvmeOptions`.
        metrics: where to count.
        name: the tier's name in metrics, events and errors.
        events: told what this process stores here and removes from now on, in the order in which it happens; what lay
            here before, and what other processes do, is not.

    Raises:
        CapacityError, ConfigError, TierUnavailable: see `open_directory`.
    """

    caps = TierCaps(variable_size=True, durable=True, shared=True, align=PAGE, metered=True, listing=True)

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        options: NvmeOptions | None = None,
        *,
        metrics: Metrics | None = None,
        name: str = "nvme",
        events: EventLog | None = None,
    ) -> None:
        options = options or NvmeOptions()
        self.name = name
        self._counts = Counts(metrics or Metrics(), name)
        self._opened = open_directory(Path(path), capacity_bytes, options, self._counts)
        self._opened.space.events = events
        self._opened.space.start()
        self._index = self._opened.index
        self._recency = self._opened.recency
        self._segments = self._opened.segments
        self._space = self._opened.space
        self._holds = self._opened.holds
        self._blocks = BlockIO(self._segments, options.io_threads, f"kvtier-{name}")
        self._completions = Completions()
        self._deadlines = Deadlines(f"kvtier-{name}")
        parts = (self._opened, self._blocks, self._deadlines, self._completions, self._counts)
        self._reader = Reader(*parts)
        self._writer = Writer(*parts, durable=options.durable)

    # ---- readers

    def contains(self, keys: Sequence[bytes], deadline: float | None = None, *, exact: bool = False) -> Ticket:
        """See `Tier.contains`."""
        return self._reader.contains(keys, deadline, exact=exact)

    def acquire(
        self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None, *, exact: bool = False
    ) -> Ticket:
        """See `Tier.acquire`. Verifies that the blocks are indexed; `read` verifies their bytes."""
        return self._reader.acquire(keys, owner, deadline, exact=exact)

    def read(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """See `Tier.read`."""
        return self._reader.read(items, deadline)

    def release(self, handles: Sequence[Handle]) -> None:
        """See `Tier.release`. After `close`, which ended all leases, nothing happens."""
        self._reader.release(handles)

    def hint(self, keys: Sequence[bytes], hints: Sequence[Hint]) -> None:
        """See `Tier.hint`. A block that has a live descendant beyond `keys` is not put before others.

        A ttl is prolonged or lifted, and never shortened: descendants may need their ancestors for as long.
        """
        self._reader.hint(keys, hints)

    # ---- writers

    def reserve(
        self,
        refs: Sequence[BlockRef],
        sizes: Sequence[int],
        fmts: Sequence[str],
        owner: Owner,
        hints: Sequence[Hint] | None = None,
    ) -> list[Reservation]:
        """See `Tier.reserve`. Of the hints `reuse = none`, `ttl` and priorities above 1 count here.

        A priority's age counts in what the directory stored and used meanwhile, not in seconds. It holds for 18 hours
        at most, and for what the block builds on as well; one that is lower waits until it has lapsed.

        Raises:
            FormatMismatch: a size, format or key that no record can have.
        """
        return self._writer.reserve(refs, sizes, fmts, owner, hints)

    def write(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """See `Tier.write`. The buffers must stay as they are until the ticket is done."""
        return self._writer.write(items, deadline)

    def commit(self, handles: Sequence[Handle]) -> None:
        """See `Tier.commit`. What the index cannot take is dropped and counted."""
        self._writer.commit(handles)

    def abort(self, handles: Sequence[Handle]) -> None:
        """See `Tier.abort`."""
        self._writer.abort(handles)

    def release_owner(self, owner: Owner) -> None:
        """See `Tier.release_owner`."""
        with self._space.lock:
            leases, reservations = self._holds.of_owner(owner)
            freed = self._holds.end_leases(leases)
        self._space.free(freed)
        self._writer.abort(reservations)

    # ---- removal

    def remove(self, keys: Sequence[bytes]) -> Ticket:
        """See `Tier.remove`. Descendants become unreachable for `acquire` now, and are the next to be evicted."""
        self._holds.require_open()
        statuses: list[Status] = []
        for start in range(0, len(keys), DROPS):
            with self._space.changing() as change:
                for key in keys[start : start + DROPS]:
                    record = change.ledger.get(key)
                    if record is not None:
                        change.drop(key, record, spare_leased=False)
                    statuses.append(Status.MISS if record is None else Status.OK)
        self._space.forget_plan()
        return self._completions.finish(Ticket(), statuses)

    def clear(self, ns: int | Collection[int] | None = None) -> Ticket:
        """See `Tier.clear`. Reservations stay."""
        self._holds.require_open()
        self._space.clear(namespaces_in(ns))
        return self._completions.finish(Ticket(), [Status.OK])

    def holding(self, namespaces: Collection[int]) -> set[int]:
        """Of which of these namespaces there are blocks; reads the whole index where one had some once."""
        self._holds.require_open()
        with self._index.read() as ledger:
            absent = ledger.numbers(namespaces)
        found: set[int] = set()
        if absent:
            for page in self._records():
                there = absent.keys() & {record.ns for _, record in page}
                found.update(absent.pop(number) for number in there)
                if not absent:
                    break
        return found

    def listed(self, ns: int) -> Iterator[list[bytes]]:
        """See `ListingTier.listed`. Reads the whole index where the namespace had a block once."""
        self._holds.require_open()
        with self._index.read() as ledger:
            numbers = ledger.numbers((ns,))
        if numbers:
            for page in self._records():
                yield [key for key, record in page if record.ns in numbers]

    def _records(self) -> Iterator[list[tuple[bytes, Record]]]:
        """All records by key, some at a time: no transaction lasts for long."""
        start = bytes(STORE_KEY_BYTES)
        while start:
            with self._index.read() as ledger:
                page = list(islice(ledger.records(start), DROPS))
            yield page
            start = page[-1][0] + b"\0" if len(page) == DROPS else b""

    # ---- the whole

    def poll(self) -> list[Done]:
        """See `Tier.poll`."""
        return self._completions.poll()

    def stats(self) -> dict[str, int]:
        """Of all processes: blocks; bytes occupied (whole pages; reservations, and removed records that are leased,
        included), capacity_bytes, free_bytes of the capacity, segments, index_bytes. Of this one: leases, reservations.
        """
        self._holds.require_open()
        with self._index.read() as ledger:
            state, blocks = ledger.state, ledger.blocks
        with self._space.lock:
            occupied = self._space.occupied_bytes(state)
            leases, reservations = len(self._holds.leases), len(self._holds.reservations)
        return {
            "blocks": blocks,
            "bytes": occupied,
            "capacity_bytes": state.total * PAGE,
            "free_bytes": state.total * PAGE - occupied,
            "segments": self._segments.count(),
            "index_bytes": self._index.nbytes(),
            "leases": leases,
            "reservations": reservations,
        }

    def ahead(self, bytes_per_day: int) -> float:
        """See `MeteredTier.ahead`. Kept in the index, in the transactions that commit blocks.

        A process that dies loses what it had not committed; a directory that starts empty forgets the rest too. What
        processes without a budget write counts as well, once one had a budget.
        """
        return self._writer.ahead(bytes_per_day)

    def check(self, *, verify: bool = False) -> dict[str, int]:
        """Count pages and what is wrong with them; see `kvtier.nvme.checking`. `verify`: read every block too."""
        self._holds.require_open()
        opened = self._opened
        return check_directory(opened.directory, opened.index, opened.recency, self._blocks, verify=verify)

    def repair(self) -> dict[str, int]:
        """Drop what is damaged, take back what is leaked: see `repair_directory`. Takes as long as reading all of it.

        The tier is used meanwhile.
        """
        return repair_directory(self._opened, self._blocks)

    def flush(self) -> None:
        """See `Tier.flush`: everything committed survives a power loss. What the disk refuses is counted."""
        self._holds.require_open()
        sync_directory(self._opened, self._counts)

    def close(self) -> None:
        """See `Tier.close`. Ends all holds; the last process leaves the directory marked clean.

        In a child of `fork` it does nothing but forget: everything is the parent's.
        """
        with self._space.lock:
            if self._holds.closed:
                return
            self._holds.closed = True
        if self._index.forked:
            return
        self._blocks.close()
        self._deadlines.close()
        close_directory(self._opened, self._counts)
