"""Rebuilding an index from what is whole in it, for the one process that has the directory open.

Entries whose seals are broken are left out, a key that no longer stands where it belongs among them; so are the paths
by which LMDB finds keys. Which pages are free follows from the records, and what dead writers held is free as well.
"""

import os
import shutil
from array import array
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from kvtier.nvme.checking import free_runs
from kvtier.nvme.directory import Directory
from kvtier.nvme.extents import PAGE
from kvtier.nvme.index import Index
from kvtier.nvme.ledger import DATABASES, Ledger, State
from kvtier.nvme.pages import check_pages

__all__ = ["Rebuilt", "rebuild_index", "replace_index"]

_BATCH = 4096
_Made = TypeVar("_Made")


class Rebuilt(NamedTuple):
    """What became of the records: how many were kept, and how many left out."""

    kept: int
    lost: int


def replace_index(path: Path, make: Callable[[Index, Path], _Made]) -> _Made:
    """Put another index in the place of a directory's; nobody may have it open, and it stays if anything fails.

    Args:
        path: the directory.
        make: given the index, opened to look only, and an empty directory, it makes one there and synchronises it.

    Returns:
        What `make` did.

    Raises:
        OSError: the disk has no room for it.
    """
    there, fresh = path / "index", path / "index" / "fresh"
    shutil.rmtree(fresh, ignore_errors=True)  # of one that was killed
    try:
        fresh.mkdir()
        index = Index(there, None, durable=False, writable=False)
        try:
            made = make(index, fresh)
        finally:
            index.close()
        (fresh / "data.mdb").replace(there / "data.mdb")
        (there / "lock.mdb").unlink(missing_ok=True)
        _sync(there)
        return made
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rebuild_index(directory: Directory) -> Rebuilt:
    """Make the index anew from its whole entries.

    Raises:
        DamagedIndex: LMDB cannot read it.
        OSError, TierFull: the disk has no room for it.
    """
    # LMDB is about to read all of it.
    check_pages(directory.path / "index" / "data.mdb", DATABASES)
    files = sum(file.stat().st_size for file in directory.path.glob("seg-*.kv"))
    return replace_index(directory.path, lambda old, path: _rebuild(old, path, files // PAGE))


def _rebuild(old: Index, path: Path, pages: int) -> Rebuilt:
    with old.read(otherwise=State(pages, pages)) as source:
        index = Index(path, source.total, durable=False)
        try:
            _fill(index, source)
            index.flush()
            with index.read() as ledger:
                return Rebuilt(ledger.blocks, source.blocks - ledger.blocks)
        finally:
            index.close()


def _fill(index: Index, source: Ledger) -> None:
    with index.write() as ledger:
        names = ledger.take_names(source)
        ledger.meter = source.meter
        ledger.state = State(source.total, source.prepared)
    used = array("I")
    records = source.records()
    while batch := list(islice(records, _BATCH)):
        with index.write() as ledger:
            for key, record in batch:
                if names.issuperset(record.names) and not ledger.present([key])[0]:
                    ledger.insert(key, record)
                    for extent in record.extents:
                        used.extend(extent)
    table = np.frombuffer(used, np.uint32).reshape(-1, 2)
    end = int(table.sum(axis=1, dtype=np.int64).max(initial=0))
    with index.write() as ledger:
        ledger.prepared = max(ledger.prepared, end)
        ledger.total = max(ledger.total, ledger.prepared)
        ledger.free.replace(free_runs([table], ledger.prepared))
