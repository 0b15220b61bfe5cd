"""Opening a directory: what is checked and repaired before the first block is served, and what closing leaves."""

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from kvtier.errors import CapacityError, ConfigError, CorruptObject, TierError, TierFull, TierUnavailable
from kvtier.keys import STORE_KEY_BYTES
from kvtier.nvme.counting import Counts
from kvtier.nvme.directory import FOUND_DAMAGED, Directory
from kvtier.nvme.extents import PAGE
from kvtier.nvme.holds import Holds
from kvtier.nvme.index import Index
from kvtier.nvme.ledger import DATABASES
from kvtier.nvme.pages import check_pages, missing_bytes
from kvtier.nvme.rebuilding import Rebuilt, discard_unfinished, rebuild_index
from kvtier.nvme.recency import Recency
from kvtier.nvme.segments import Segments, disk_free, takes_direct_io
from kvtier.nvme.space import Space

__all__ = ["NvmeOptions", "Opened", "close_directory", "open_directory", "sync_directory"]

_log = logging.getLogger(__name__)

_MIN_CAPACITY = 1 << 20
_RESTORED = 4096
_MAX_PAGES = 2**32 - 1
_CHECKED_AFTER_DEATH = 64 << 20
"""Bytes of the largest index that is checked after a writer's death, which does no damage by itself: about 0.3 s."""


@dataclass(frozen=True, slots=True)
class NvmeOptions:
    """How an NVMe tier works.

    Args:
        segment_bytes: size of segment files, a multiple of 4 KiB; an existing directory keeps its own.
        io_threads: workers; each gives the device up to 4 MiB at a time.
        min_free_bytes: free space of the file system that the tier never goes below when it grows.
        durable: every commit survives a power loss; without it, those since the last `flush` may be lost, and a
            directory that was open then starts empty.
    """

    segment_bytes: int = 256 << 20
    io_threads: int = 4
    min_free_bytes: int = 1 << 30
    durable: bool = False

    def __post_init__(self) -> None:
        if self.segment_bytes < _MIN_CAPACITY or self.segment_bytes % PAGE:
            raise ConfigError(f"segment_bytes={self.segment_bytes}: expected a multiple of {PAGE}, at least 1 MiB")
        if not 1 <= self.io_threads <= 256:
            raise ConfigError(f"io_threads={self.io_threads}: expected 1 to 256")
        if self.min_free_bytes < 0:
            raise ConfigError(f"min_free_bytes={self.min_free_bytes}: expected 0 or more")


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts of an opened directory.

    rebuilt: what became of the records where the index was rebuilt. reason: why it was, or why the directory started
    empty; "" where neither was the case.
    """

    directory: Directory
    index: Index
    recency: Recency
    segments: Segments
    space: Space
    holds: Holds
    rebuilt: Rebuilt | None = None
    reason: str = ""


def open_directory(
    path: Path, capacity_bytes: int | None, options: NvmeOptions, counts: Counts, *, thorough: bool = False
) -> Opened:
    """Open or make a directory, with the capacity given; None keeps that of an existing one.

    `thorough`: check an index that nobody else has open whatever speaks for it, and however large it is.

    Raises:
        CapacityError: the capacity is below 1 MiB, above 16 TiB, or the file system is full.
        ConfigError: the path cannot be a tier's, or others use it with a larger capacity.
        TierUnavailable: it cannot be opened; the message says what to do.
    """
    total = None if capacity_bytes is None else capacity_bytes // PAGE
    if capacity_bytes is not None and not _MIN_CAPACITY <= capacity_bytes <= _MAX_PAGES * PAGE:
        raise CapacityError(f"NVMe capacity of {capacity_bytes} bytes: expected 1 MiB to 16 TiB")
    _check_disk(path, options)
    directory = Directory(path, options.segment_bytes)
    try:
        with directory.exclusive():
            return _open_locked(directory, total, options, counts, thorough=thorough)
    except OSError as error:
        directory.drop()
        raise TierUnavailable(f"{path} cannot be opened ({error}): check its mode and the disk's space") from error
    except TierFull as error:
        directory.drop()
        raise CapacityError(f"{path} cannot be opened: {error}; free some disk space") from error
    except BaseException:
        directory.drop()
        raise


def _check_disk(path: Path, options: NvmeOptions) -> None:
    """A new directory needs room for its first megabyte above the floor."""
    if (path / "META.json").exists():
        return
    above = next((place for place in (path, *path.absolute().parents) if place.is_dir()), Path("/"))
    free = disk_free(above)
    if free < options.min_free_bytes + _MIN_CAPACITY:
        raise CapacityError(
            f"{above} has {free} bytes free, {options.min_free_bytes} of them must stay free: "
            "free some space, lower tiering.nvme.min_free or choose another disk"
        )


def _open_locked(
    directory: Directory, total: int | None, options: NvmeOptions, counts: Counts, *, thorough: bool
) -> Opened:
    directory.load()
    reason = directory.meta.untrusted
    if directory.others():
        if reason or directory.meta.damaged:
            raise TierUnavailable(
                f"{directory.path}: {reason or FOUND_DAMAGED}, and others have it open: close them, then open it again"
            )
        return _open_parts(directory, total, options, counts, alone=False)
    discard_unfinished(directory.path)
    if not reason:
        try:
            return _open_alone(directory, total, options, counts, thorough=thorough)
        except CorruptObject as error:
            reason = str(error)
    _log.error("%s starts EMPTY: %s", directory.path, reason)
    counts.failed("open", reason)
    directory.wipe()
    return replace(_open_parts(directory, total, options, counts, alone=True), reason=reason)


def _open_alone(
    directory: Directory, total: int | None, options: NvmeOptions, counts: Counts, *, thorough: bool
) -> Opened:
    """Open it as it is, or with its index rebuilt if that is damaged.

    Raises:
        CorruptObject: there is nothing to rebuild it from.
    """
    try:
        reason = _make_safe(directory, thorough=thorough)
    except CorruptObject as error:
        reason = str(error)
    if not reason:
        try:
            return _open_parts(directory, total, options, counts, alone=True)
        except CorruptObject as error:
            reason = str(error)
    rebuilt = rebuild_index(directory)
    _log.error("%s has a rebuilt index, %d blocks kept, %d lost: %s", directory.path, *rebuilt, reason)
    counts.failed("open", reason)
    counts.altered(rebuilt.lost)
    opened = _open_parts(directory, total, options, counts, alone=True)
    return replace(opened, rebuilt=rebuilt, reason=reason)


def _make_safe(directory: Directory, *, thorough: bool) -> str:
    """See to it that LMDB can open its file, and that there is sense in it; for the one process that has it open.

    Returns:
        Why it must be rebuilt before anything else; "" if nothing speaks for it.

    Raises:
        DamagedIndex: LMDB would fail on it, or die; or entries that are no records were altered.
    """
    data_file = directory.path / "index" / "data.mdb"
    reason = FOUND_DAMAGED if directory.meta.damaged else ""
    missing = missing_bytes(data_file)
    if missing or thorough or reason or _suspicious(directory, data_file):
        reason = reason if check_pages(data_file, DATABASES) else f"keys of {data_file} are out of order"
    if missing:
        # Free pages only. They are not read before they are written, but what is mapped should be there.
        with data_file.open("r+b") as file:
            file.truncate(data_file.stat().st_size + missing)
    if not reason and data_file.exists():
        index = Index(data_file.parent, None, durable=False)
        try:
            with index.read() as ledger:
                ledger.require_whole()
        finally:
            index.close()
    return reason


def _suspicious(directory: Directory, data_file: Path) -> bool:
    if directory.meta.clean:
        return directory.index_touched()
    return data_file.exists() and data_file.stat().st_size <= _CHECKED_AFTER_DEATH


def _open_parts(
    directory: Directory, total: int | None, options: NvmeOptions, counts: Counts, *, alone: bool
) -> Opened:
    rows = directory.path / "recency.bin"
    if directory.meta.interrupted:
        # Its pages reached the disk in any order, and apart from the index. Afterwards nobody knows that.
        rows.unlink(missing_ok=True)
    directory.enter(durable=options.durable)
    index = Index(directory.path / "index", total, durable=options.durable)
    recency: Recency | None = None
    try:
        recency = Recency(rows, bytes.fromhex(directory.meta.uuid))
        segments = _open_segments(directory, counts)
        holds = Holds()
        space = Space(directory, index, recency, segments, holds, options.min_free_bytes, counts)
        opened = Opened(directory, index, recency, segments, space, holds)
        _settle(opened, total, alone=alone)
    except BaseException:
        if recency is not None:
            recency.close()
        index.close()
        raise
    return opened


def _open_segments(directory: Directory, counts: Counts) -> Segments:
    direct = takes_direct_io(directory.path)
    if not direct:
        counts.fell_back("buffered_io")
    return Segments(directory.path, directory.meta.segment_bytes // PAGE, direct=direct)


def _settle(opened: Opened, total: int | None, *, alone: bool) -> None:
    """Bring holds of the dead, the capacity and the recency rows in order."""
    directory, space, index = opened.directory, opened.space, opened.index
    with index.read() as ledger:
        writers = ledger.writers()
        current = ledger.total
    space.reclaim_from(directory.dead(writers))
    if opened.recency.fresh:
        _restore_recency(opened)
    if total is None:
        return
    if total >= current:
        space.grow_total(total)
    elif alone:
        space.resize(total)
    else:
        raise ConfigError(
            f"{directory.path} is in use with a capacity of {current * PAGE} bytes: "
            f"open it with as much, not {total * PAGE}, or close the others first"
        )
    if alone:
        # Also what is left of a time when there was more, if whoever made it smaller died before it came to this.
        opened.segments.cut(total)


def sync_directory(opened: Opened, counts: Counts) -> bool:
    """Have the disk keep everything committed; False, and counted, if it refuses."""
    try:
        opened.segments.sync()
        opened.index.flush()
        opened.recency.flush()
    except (OSError, TierFull) as error:
        counts.failed("flush", error)
        return False
    return True


def close_directory(opened: Opened, counts: Counts) -> None:
    """Free what this writer holds and let go; the last one leaves the directory marked clean."""
    directory = opened.directory
    try:
        opened.space.close()
        with directory.exclusive():
            opened.space.reclaim_from({directory.writer})
            directory.leave(clean=sync_directory(opened, counts), damaged=opened.index.damaged)
    except (TierError, OSError) as error:
        counts.failed("close", error)
        # The directory itself may be gone.
        with suppress(TierError, OSError), directory.exclusive():
            directory.leave(clean=False, damaged=opened.index.damaged)
    finally:
        opened.index.close()
        opened.recency.close()
        opened.segments.close()
        directory.drop()


def _restore_recency(opened: Opened) -> None:
    """Enter all records into a recency file that was made anew, some at a time."""
    start = bytes(STORE_KEY_BYTES)
    while start:
        with opened.index.write() as ledger:
            batch = list(islice(ledger.records(start), _RESTORED))
            if batch:
                opened.recency.restore(ledger, batch)
        start = batch[-1][0] + b"\0" if len(batch) == _RESTORED else b""
    opened.recency.finish()
