"""Rebuilding an index from what is whole in it, for the one process that has the directory open.

It is read without LMDB, entry by entry: those whose seals are whole count, wherever they stand, but no records that lie
on the same pages. Which pages are free follows from the records, and what dead writers held is free as well.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from kvtier.nvme.checking import Survey, free_runs, overlapping, survey
from kvtier.nvme.directory import Directory
from kvtier.nvme.extents import PAGE
from kvtier.nvme.index import Index
from kvtier.nvme.ledger import DATABASES, Ledger, Record, State, record_in
from kvtier.nvme.pages import entries_of, whole_entries

__all__ = ["Rebuilt", "discard_unfinished", "rebuild_free", "rebuild_index", "replace_index"]

_BATCH = 4096
_LEAST_BYTES_PER_ENTRY = 64
_FRESH = "fresh"
_Made = TypeVar("_Made")


class Rebuilt(NamedTuple):
    """What became of the records: how many were kept, and how many left out."""

    kept: int
    lost: int


def replace_index(path: Path, make: Callable[[Path], _Made]) -> _Made:
    """Put another index in the place of a directory's; nobody may have it open, and it stays if anything fails.

    Args:
        path: the directory.
        make: makes the other one in the directory that it is given, and synchronises it.

    Returns:
        What `make` did.

    Raises:
        OSError: the disk has no room for it.
    """
    there, fresh = path / "index", path / "index" / _FRESH
    discard_unfinished(path)
    try:
        fresh.mkdir()
        made = make(fresh)
        # First: who looks at the old file keeps its lock, whose count of transactions would mislead LMDB.
        (there / "lock.mdb").unlink(missing_ok=True)
        (fresh / "data.mdb").replace(there / "data.mdb")
        _sync(there)
        return made
    finally:
        discard_unfinished(path)


def discard_unfinished(path: Path) -> None:
    """Remove what somebody left who was killed while replacing a directory's index."""
    shutil.rmtree(path / "index" / _FRESH, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rebuild_index(directory: Directory) -> Rebuilt:
    """Make the index anew from its whole entries.

    Raises:
        DamagedIndex: nothing can be made of it.
        OSError, TierFull: the disk has no room for it.
    """
    data_file = directory.path / "index" / "data.mdb"
    told = entries_of(data_file, DATABASES[0])
    files = sum(file.stat().st_size for file in directory.path.glob("seg-*.kv"))
    kept = replace_index(directory.path, lambda path: _rebuild(data_file, path, files // PAGE))
    return Rebuilt(kept, max(0, (told or kept) - kept))


def _rebuild(data_file: Path, path: Path, pages: int) -> int:
    """Make it in `path`; returns how many records it has. `pages`: as many as there are, if it does not say."""
    # Segments may have been lost, too.
    index = Index(path, max(pages, data_file.stat().st_size // _LEAST_BYTES_PER_ENTRY), durable=False)
    try:
        with index.write() as ledger:
            ledger.state = State(pages, pages)
        rest, referred = _copy_records(data_file, index)
        with index.write() as ledger:
            unnamed = referred - ledger.adopt(rest)
            if unnamed:
                _drop(ledger, [item for item in ledger.records() if not unnamed.isdisjoint(item[1].names)])
            seen = survey(ledger)
            ledger.prepared = max(ledger.prepared, int(seen.used.sum(axis=1, dtype=np.int64).max(initial=0)))
            ledger.total = max(ledger.total, ledger.prepared)
            seen = seen._replace(state=ledger.state)
            shared = overlapping(ledger, seen)
            if shared:
                # Of those on one page all but one are of another time, and no seal tells which.
                _drop(ledger, shared)
                seen = survey(ledger)
            rebuild_free(ledger, seen)
        index.flush()
        return seen.blocks
    finally:
        index.close()


def _copy_records(data_file: Path, index: Index) -> tuple[dict[bytes, bytes], set[tuple[bytes, int]]]:
    """Copy all records; returns the other entries, and the names that records refer to."""
    rest: dict[bytes, bytes] = {}
    referred: set[tuple[bytes, int]] = set()
    entries = whole_entries(data_file)
    while batch := list(islice(entries, _BATCH)):
        with index.write() as ledger:
            for key, value in batch:
                record = record_in(key, value)
                if record is None:
                    rest[key] = value
                elif not ledger.present([key])[0]:
                    ledger.insert(key, record)
                    referred.update(record.names)
    return rest, referred


def _drop(ledger: Ledger, records: Iterable[tuple[bytes, Record]]) -> None:
    for key, record in records:
        ledger.drop(key, record)


def rebuild_free(ledger: Ledger, seen: Survey) -> int:
    """Make free what nothing owns, and store the sums of the entries; returns how many pages were leaked."""
    free = free_runs([seen.used, seen.held, seen.preparing], seen.state.prepared)
    before = int(seen.free[:, 1].sum(dtype=np.int64))
    ledger.free.replace(free)
    ledger.state = seen.sums
    ledger.lost = 0
    return max(0, sum(extent.pages for extent in free) - before)
