"""Checking a directory: does every page belong to exactly one thing, and do the bytes match their checksums.

Everything that the index says is read in one transaction, so that the sums hold while others write. Bytes are read
outside of it, some records at a time: what another process drops meanwhile is no damage.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.keys import STORE_KEY_BYTES
from kvtier.nvme.directory import Directory
from kvtier.nvme.extents import PAGE, Extent, pages_for
from kvtier.nvme.index import Index
from kvtier.nvme.io import BlockIO, transfers
from kvtier.nvme.ledger import Ledger, Record, State
from kvtier.nvme.recency import HEAD_BYTES, Recency
from kvtier.nvme.segments import aligned_buffer
from kvtier.tiers import checksum_head

__all__ = ["FAULTS", "Survey", "check_directory", "damaged_blocks", "free_runs", "overlapping", "survey"]

FAULTS = ("damaged_entries", "leaked_pages", "overlaps", "wrong_sums", "lost_rows", "corrupt")
"""Counts of `check_directory` that are zero in a sound directory."""

_READ_PAGES = 1024
_LISTED = 512


class Survey(NamedTuple):
    """All that one transaction says.

    blocks, orphaned: records, and those of them whose parent has none. state: the kept sums.
    used, held, preparing, free: [n, 2] first page and pages. rows, heads: [blocks] recency rows and halves of keys.
    writers: of each hold.
    """

    blocks: int
    orphaned: int
    state: State
    used: NDArray[np.uint32]
    held: NDArray[np.uint32]
    preparing: NDArray[np.uint32]
    free: NDArray[np.uint32]
    rows: NDArray[np.uint32]
    heads: NDArray[np.uint64]
    writers: list[bytes]

    @property
    def sums(self) -> State:
        """The sums that follow from the entries."""
        used, reserved, preparing = (_pages(part) for part in (self.used, self.held, self.preparing))
        return State(self.state.total, self.state.prepared, used, reserved, preparing)


def survey(ledger: Ledger) -> Survey:
    """Read the whole index."""
    used, rows, heads = array("I"), array("I"), array("Q")
    orphaned = 0
    for key, record in ledger.records():
        for extent in record.extents:
            used.extend(extent)
        rows.append(record.row)
        heads.append(int.from_bytes(key[:HEAD_BYTES], "little"))
        orphaned += record.parent is not None and not ledger.present([record.parent])[0]
    holds = ledger.holds()
    return Survey(
        len(rows),
        orphaned,
        ledger.state,
        np.frombuffer(used, np.uint32).reshape(-1, 2),
        _table([hold.extent for hold in holds if not hold.preparing]),
        _table([hold.extent for hold in holds if hold.preparing]),
        _table(ledger.free.runs()),
        np.frombuffer(rows, np.uint32),
        np.frombuffer(heads, np.uint64),
        [hold.writer for hold in holds],
    )


def check_directory(
    directory: Directory, index: Index, recency: Recency, blocks: BlockIO, *, verify: bool
) -> dict[str, int]:
    """Count what the index holds, and what is wrong with it.

    Args:
        directory: whose writers are asked for.
        index: what is checked.
        recency: what is checked beside it.
        blocks: reads the bytes, in the caller's thread.
        verify: read every block and compare its checksum.

    Returns:
        blocks; orphaned, those whose parent is gone (they go first); total, used, free, reserved, preparing,
        unprepared pages; dead_holds, of no living writer: reclaimed when the directory is opened next, or space is
        short. And, all zero in a sound directory: damaged_entries, records that were altered; leaked_pages, owned by
        nothing; overlaps, pages owned twice (or beyond the end); wrong_sums, kept sums that are not those of the
        entries; lost_rows, records that recency does not know. With `verify`: verified and corrupt blocks.

    Raises:
        DamagedIndex: other entries were altered.
    """
    with index.read() as ledger:
        ledger.require_sealed()
        seen = survey(ledger)
        damaged = len(ledger.broken)
        lost_rows = len(recency.strangers(seen.rows, seen.heads))
    with directory.exclusive():
        dead = directory.dead(seen.writers)
    state, sums = seen.state, seen.sums
    counts = {
        "used_pages": sums.used,
        "free_pages": _pages(seen.free),
        "reserved_pages": sums.reserved,
        "preparing_pages": sums.preparing,
        "unprepared_pages": state.total - state.prepared,
    }
    report = {
        "blocks": seen.blocks,
        "orphaned": seen.orphaned,
        "total_pages": state.total,
        **counts,
        "dead_holds": sum(writer in dead for writer in seen.writers),
        "damaged_entries": damaged,
        "leaked_pages": state.total - sum(counts.values()),
        "overlaps": _overlaps([seen.used, seen.held, seen.preparing, seen.free], state.prepared),
        "wrong_sums": sum(found != said for found, said in zip(sums, state, strict=True)),
        "lost_rows": lost_rows,
    }
    if verify:
        corrupt = sum(1 for _ in damaged_blocks(index, blocks))
        report |= {"verified": seen.blocks - corrupt, "corrupt": corrupt}
    return report


def damaged_blocks(index: Index, blocks: BlockIO) -> Iterator[tuple[bytes, Record]]:
    """Read every block; yields the records of those that cannot be read or fail their checksum."""
    start = bytes(STORE_KEY_BYTES)
    while start:
        with index.read() as ledger:
            listed = list(islice(ledger.records(start), _LISTED))
        for window in _windows(listed):
            yield from _damaged(index, blocks, window)
        start = listed[-1][0] + b"\0" if len(listed) == _LISTED else b""


def _windows(listed: Sequence[tuple[bytes, Record]]) -> Iterator[list[tuple[bytes, Record]]]:
    window: list[tuple[bytes, Record]] = []
    pages = 0
    for item in listed:
        count = pages_for(item[1].nbytes)
        if window and pages + count > _READ_PAGES:
            yield window
            window, pages = [], 0
        window.append(item)
        pages += count
    if window:
        yield window


def _damaged(index: Index, blocks: BlockIO, window: Sequence[tuple[bytes, Record]]) -> Iterator[tuple[bytes, Record]]:
    buffer = aligned_buffer(sum(pages_for(record.nbytes) for _, record in window) * PAGE).data
    ends = list(accumulate(pages_for(record.nbytes) * PAGE for _, record in window))
    places = [buffer[start:end] for start, end in pairwise([0, *ends])]
    moving = transfers([record.extents for _, record in window], [record.nbytes for _, record in window], places)
    with index.read() as ledger:
        heads = [checksum_head(ledger.ref(key, record), ledger.fmt(record)) for key, record in window]
    found = blocks.read(moving, heads)
    with index.read() as ledger:
        for (key, record), checksum in zip(window, found, strict=True):
            # What another process dropped meanwhile may have its pages reused.
            if checksum != record.checksum and ledger.get(key) == record:
                yield key, record


def free_runs(tables: Sequence[NDArray[np.uint32]], prepared: int) -> list[Extent]:
    """What of the first `prepared` pages belongs to none of these extents, [n, 2] first page and pages each."""
    every = np.concatenate(tables).astype(np.int64)
    every = every[np.argsort(every[:, 0])]
    ends = np.append(0, np.maximum.accumulate(every.sum(axis=1)))
    gaps = np.append(np.minimum(every[:, 0], prepared), prepared) - ends
    found = np.flatnonzero(gaps > 0)
    return list(map(Extent, ends[found].tolist(), gaps[found].tolist()))


def overlapping(ledger: Ledger, seen: Survey) -> list[tuple[bytes, Record]]:
    """Records that share pages with another record, with a hold or with what lies behind the end.

    Args:
        ledger: as it was surveyed.
        seen: what it says.
    """
    shared = _shared(np.concatenate([seen.used, seen.held, seen.preparing]).astype(np.int64), seen.state.prepared)
    found: list[tuple[bytes, Record]] = []
    end = 0
    for key, record in ledger.records() if shared[: len(seen.used)].any() else ():
        start, end = end, end + len(record.extents)
        if shared[start:end].any():
            found.append((key, record))
    return found


def _shared(extents: NDArray[np.int64], prepared: int) -> NDArray[np.bool_]:
    """Which of these extents, [n, 2], have pages that another one has too, or that lie behind the first `prepared`."""
    order = np.argsort(extents[:, 0])
    starts, ends = extents[order, 0], extents[order].sum(axis=1)
    found: NDArray[np.bool_] = ends > prepared
    found[1:] |= starts[1:] < np.maximum.accumulate(ends)[:-1]
    found[:-1] |= ends[:-1] > starts[1:]
    shared = np.empty(len(found), np.bool_)
    shared[order] = found
    return shared


def _table(extents: Sequence[Extent]) -> NDArray[np.uint32]:
    return np.array(extents, np.uint32).reshape(-1, 2)


def _pages(table: NDArray[np.uint32]) -> int:
    return int(table[:, 1].sum(dtype=np.int64))


def _overlaps(tables: Sequence[NDArray[np.uint32]], prepared: int) -> int:
    every = np.concatenate(tables).astype(np.int64)
    if not len(every):
        return 0
    every = every[np.argsort(every[:, 0])]
    ends = np.maximum.accumulate(every.sum(axis=1))
    twice = np.maximum(0, np.minimum(ends[:-1], every[1:].sum(axis=1)) - every[1:, 0]).sum()
    return int(twice + max(0, int(ends[-1]) - prepared))
