"""Checking a directory: does every page belong to exactly one thing, and do the bytes match their checksums."""

from collections.abc import Sequence
from itertools import pairwise

from kvtier.nvme.extents import PAGE, Extent, pages_for
from kvtier.nvme.index import Index
from kvtier.nvme.io import BlockIO, Transfer
from kvtier.nvme.ledger import Record
from kvtier.nvme.opening import Opened
from kvtier.nvme.segments import aligned_buffer
from kvtier.tiers import BlockRef, block_checksum

__all__ = ["check_directory"]


def check_directory(opened: Opened, blocks: BlockIO, *, verify: bool) -> dict[str, int]:
    """Count what the index holds, and what is wrong with it.

    Args:
        opened: the directory.
        blocks: reads the bytes, in the caller's thread.
        verify: read every block and compare its checksum.

    Returns:
        blocks; total, used, free, reserved, preparing, unprepared pages; dead_holds, held by no living writer;
        and, all zero in a sound directory: leaked_pages, owned by nothing; overlaps, pages owned twice (or beyond
        the end); wrong_sums, kept sums that are not those of the entries; lost_rows, records that recency does not
        know. With `verify`: verified and corrupt blocks.
    """
    with opened.index.read() as ledger:
        state = ledger.state
        records = [(key, record, ledger.ref(key, record), ledger.fmt(record)) for key, record in ledger.records()]
        holds = ledger.holds()
        free = ledger.free.runs()
        rows = [(record.row, key) for key, record, _, _ in records]
        lost_rows = sum(not opened.recency.matches(row, key) for row, key in rows)
    used = [extent for _, record, _, _ in records for extent in record.extents]
    held = [extent for hold in holds for extent in hold.extents]
    sums = {
        "total_pages": state.total,
        "used_pages": _pages(used),
        "free_pages": _pages(free),
        "reserved_pages": sum(hold.pages for hold in holds if not hold.preparing),
        "preparing_pages": sum(hold.pages for hold in holds if hold.preparing),
        "unprepared_pages": state.total - state.prepared,
    }
    kept = (state.used, state.free, state.reserved, state.preparing)
    with opened.directory.exclusive():
        dead = opened.directory.dead(hold.writer for hold in holds)
    report = {
        "blocks": len(records),
        **sums,
        "dead_holds": sum(hold.writer in dead for hold in holds),
        "leaked_pages": 2 * state.total - sum(sums.values()),
        "overlaps": _overlaps([*used, *held, *free], state.prepared),
        "wrong_sums": sum(found != said for found, said in zip(list(sums.values())[1:5], kept, strict=True)),
        "lost_rows": lost_rows,
    }
    if verify:
        report |= {"verified": len(records), "corrupt": _corrupt(opened.index, blocks, records)}
    return report


def _pages(extents: Sequence[Extent]) -> int:
    return sum(extent.pages for extent in extents)


def _overlaps(extents: Sequence[Extent], prepared: int) -> int:
    ordered = sorted(extents)
    twice = sum(max(0, one.end - two.page) for one, two in pairwise(ordered))
    return twice + max(0, ordered[-1].end - prepared if ordered else 0)


def _corrupt(index: Index, blocks: BlockIO, records: Sequence[tuple[bytes, Record, BlockRef, str]]) -> int:
    corrupt = 0
    for key, record, ref, fmt in records:
        buffer = aligned_buffer(pages_for(record.nbytes) * PAGE)
        error = blocks.read([Transfer(record.extents, record.nbytes, buffer)])[0]
        if error is None and block_checksum(ref, fmt, buffer[: record.nbytes].data) == record.checksum:
            continue
        with index.read() as ledger:
            # Another process may have dropped the record and reused its pages meanwhile.
            corrupt += ledger.get(key) == record
    return corrupt
