"""Repairing a directory: drop what is damaged, take back what is leaked, put the sums right.

Safe while others have the directory open: each step is one transaction, in which nobody else changes anything, and
pages that living writers hold stay theirs.
"""

from itertools import islice

from kvtier.nvme.checking import Survey, damaged_blocks, overlapping, survey
from kvtier.nvme.io import BlockIO
from kvtier.nvme.ledger import Ledger, Record
from kvtier.nvme.opening import Opened
from kvtier.nvme.rebuilding import rebuild_free
from kvtier.nvme.space import DROPS

__all__ = ["repair_directory"]


def repair_directory(opened: Opened, blocks: BlockIO) -> dict[str, int]:
    """Bring an opened directory in order.

    Args:
        opened: the directory; what dead writers held was reclaimed when it was opened.
        blocks: reads the bytes, in the caller's thread.

    Returns:
        dropped_damaged, blocks whose records were altered; dropped_corrupt, blocks that failed their checksum or could
        not be read; dropped_overlapping, blocks that shared pages; reclaimed_pages, that nothing owned; restored_rows,
        blocks that recency did not know.
    """
    opened.space.reclaim()
    altered = opened.space.drop_broken()
    damaged = damaged_blocks(opened.index, blocks)
    corrupt = 0
    while batch := list(islice(damaged, DROPS)):
        corrupt += _drop(opened, batch)
    overlapping = _drop_overlapping(opened)
    with opened.index.write() as ledger:
        rows = _restore_rows(opened, ledger, survey(ledger))
        pages = rebuild_free(ledger, survey(ledger))
    return {
        "dropped_damaged": altered,
        "dropped_corrupt": corrupt,
        "dropped_overlapping": overlapping,
        "reclaimed_pages": pages,
        "restored_rows": rows,
    }


def _drop(opened: Opened, batch: list[tuple[bytes, Record]]) -> int:
    """Drop records that are still as they were found. Their pages may be another's too: they become nobody's."""
    dropped = 0
    with opened.space.changing() as change:
        for key, record in batch:
            if change.ledger.get(key) == record:
                dropped += change.drop(key, record, spare_leased=False)
        change.freed.clear()
    return dropped


def _drop_overlapping(opened: Opened) -> int:
    with opened.index.read() as ledger:
        bad = overlapping(ledger, survey(ledger))
    return sum(_drop(opened, bad[at : at + DROPS]) for at in range(0, len(bad), DROPS))


def _restore_rows(opened: Opened, ledger: Ledger, seen: Survey) -> int:
    lost = set(seen.rows[opened.recency.strangers(seen.rows, seen.heads)].tolist())
    if not lost:
        return 0
    found = [(key, record) for key, record in ledger.records() if record.row in lost]
    found = [(key, record) for key, record in found if not opened.recency.matches(record.row, key)]
    rows = opened.recency.take(ledger, len(found))
    for (key, record), row in zip(found, rows, strict=True):
        ledger.move(key, record._replace(row=row))
    refs = [ledger.ref(key, record) for key, record in found]
    opened.recency.fill(ledger, rows, refs, [None] * len(rows))
    return len(found)
