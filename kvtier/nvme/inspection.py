"""Inspection: a directory seen from outside, without a tier on it, as `kvtier inspect` does.

look       reads only; others may have the directory open, and what a killed process left is left as it is
maintain   opens it as one more writer, which may drop records and reclaim pages
compact    rewrites the index; nobody else may have the directory open
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvtier.errors import ConfigError, TierUnavailable
from kvtier.keys import STORE_KEY_BYTES
from kvtier.metrics import Metrics
from kvtier.nvme.checking import check_directory
from kvtier.nvme.counting import Counts
from kvtier.nvme.directory import FORMAT_VERSION, FOUND_DAMAGED, Directory, read_meta
from kvtier.nvme.extents import PAGE
from kvtier.nvme.index import Index
from kvtier.nvme.io import BlockIO
from kvtier.nvme.ledger import DATABASES
from kvtier.nvme.opening import NvmeOptions, Opened, close_directory, open_directory
from kvtier.nvme.pages import DamagedIndex, check_pages
from kvtier.nvme.rebuilding import replace_index
from kvtier.nvme.recency import Recency
from kvtier.nvme.repairing import repair_directory
from kvtier.nvme.segments import Segments
from kvtier.tiers import BlockRef

__all__ = ["Listed", "Look", "Maintenance", "compact", "look", "maintain"]


_LISTED = 512


@dataclass(frozen=True, slots=True)
class Listed:
    """One block of a directory: its name, how it is stored, and the digest of its namespace."""

    ref: BlockRef
    fmt: str
    nbytes: int


def _require_directory(path: Path) -> None:
    """Raise `ConfigError` unless this is a directory that this release can read."""
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory: name the directory of an NVMe tier")
    try:
        meta = read_meta(path / "META.json")
    except TierUnavailable as error:
        raise ConfigError(str(error)) from error
    if meta is None:
        below = ", ".join(sorted(child.parent.name for child in path.glob("*/META.json")))
        other = f"name one of those in it: {below}" if below else "name another one"
        raise ConfigError(f"{path} is no directory of an NVMe tier (it has no META.json): {other}")


@dataclass(frozen=True, slots=True)
class Look:
    """A directory opened to look only."""

    directory: Directory
    index: Index
    recency: Recency
    blocks: BlockIO
    segments: Segments

    def stats(self) -> dict[str, int | bool]:
        """What costs nothing to know: blocks; bytes used by them, set aside by writers, free and in all; files.

        `clean`: nobody has it open and the last one closed it. `writers`: processes that have it open.
        """
        with self.index.read() as ledger:
            blocks, state = ledger.blocks, ledger.state
        with self.directory.exclusive():
            writers = len(self.directory.others())
            self.directory.load()
        return {
            "format_version": FORMAT_VERSION,
            "clean": self.directory.meta.clean,
            "writers": writers,
            "blocks": blocks,
            "used_bytes": state.used * PAGE,
            "reserved_bytes": (state.reserved + state.preparing) * PAGE,
            "free_bytes": (state.total - state.occupied - state.preparing) * PAGE,
            "capacity_bytes": state.total * PAGE,
            "segments": self.segments.count(),
            "segment_bytes": self.directory.meta.segment_bytes,
            "index_bytes": self.index.nbytes(),
            "recency_bytes": self.recency.nbytes(),
        }

    def listed(self) -> Iterator[Listed]:
        """All blocks, in the order of their keys; some at a time, so that no transaction waits for the caller."""
        start = bytes(STORE_KEY_BYTES)
        while start:
            with self.index.read() as ledger:
                page = list(islice(ledger.records(start), _LISTED))
                found = [Listed(ledger.ref(key, record), ledger.fmt(record), record.nbytes) for key, record in page]
            yield from found
            start = page[-1][0] + b"\0" if len(page) == _LISTED else b""

    def namespaces(self) -> list[int]:
        """Namespaces that the directory has names for."""
        with self.index.read() as ledger:
            return ledger.namespaces()

    def check(self, *, verify: bool) -> dict[str, int]:
        """See `check_directory`."""
        return check_directory(self.directory, self.index, self.recency, self.blocks, verify=verify)


@contextmanager
def look(path: Path) -> Iterator[Look]:
    """Open a directory to look only.

    Raises:
        ConfigError: it is none of an NVMe tier, or of another format version.
        TierUnavailable: its index is damaged, or cannot be trusted; the message says what becomes of it.
    """
    _require_directory(path)
    directory = Directory(path, PAGE)
    try:
        try:
            with directory.exclusive():
                index = _look_into(directory)
        except OSError as error:
            raise TierUnavailable(f"{path} cannot be read ({error}): check its mode") from error
        try:
            with _parts(directory, index) as parts:
                yield parts
        finally:
            index.close()
    finally:
        directory.drop()


def _look_into(directory: Directory) -> Index:
    directory.load()
    if not directory.others():
        fate = _fate(directory)
        if fate:
            raise TierUnavailable(f"{directory.path}: {fate} when it is opened next, or by `kvtier inspect --repair`")
    return Index(directory.path / "index", None, durable=False, writable=False)


def _fate(directory: Directory) -> str:
    """What becomes of the index, and why; "" if nothing speaks against it."""
    if directory.meta.untrusted:
        return f"{directory.meta.untrusted}; it starts empty"
    reason = FOUND_DAMAGED if directory.meta.damaged else ""
    data_file = directory.path / "index" / "data.mdb"
    try:
        reason = reason if check_pages(data_file, DATABASES) else f"keys of {data_file} are out of order"
    except DamagedIndex as error:
        reason = str(error)
    return f"{reason}; what is whole of it is kept" if reason else ""


@contextmanager
def _parts(directory: Directory, index: Index) -> Iterator[Look]:
    recency = Recency(directory.path / "recency.bin", bytes.fromhex(directory.meta.uuid), writable=False)
    segments = Segments(directory.path, directory.meta.segment_bytes // PAGE, direct=False)
    blocks = BlockIO(segments, 1, "kvtier-inspect")
    try:
        yield Look(directory, index, recency, blocks, segments)
    finally:
        blocks.close()
        segments.close()
        recency.close()


@dataclass(frozen=True, slots=True)
class Maintenance:
    """A directory opened as one more writer."""

    opened: Opened
    blocks: BlockIO

    def opening(self) -> dict[str, str]:
        """What it took to open the directory: nothing, or why it `started_empty`, or why its index was `rebuilt`."""
        if not self.opened.reason:
            return {}
        return {"rebuilt" if self.opened.rebuilt else "started_empty": self.opened.reason}

    def repair(self) -> dict[str, int]:
        """See `repair_directory`; what was lost when it was opened counts, too."""
        report = repair_directory(self.opened, self.blocks)
        if self.opened.rebuilt:
            report["dropped_damaged"] += self.opened.rebuilt.lost
        return report

    def clear(self, ns: int | None = None) -> int:
        """Drop all blocks, or those of a namespace; returns how many."""
        return self.opened.space.clear(None if ns is None else (ns,))


@contextmanager
def maintain(path: Path) -> Iterator[Maintenance]:
    """Open a directory to put it in order. Others may have it open.

    Raises:
        ConfigError, TierUnavailable: see `look`. What `look` says would become of the index does so now.
    """
    _require_directory(path)
    counts = Counts(Metrics(), "nvme")
    opened = open_directory(path, None, NvmeOptions(), counts, thorough=True)
    blocks = BlockIO(opened.segments, 1, "kvtier-inspect")
    try:
        yield Maintenance(opened, blocks)
    finally:
        blocks.close()
        close_directory(opened, counts)


def compact(path: Path) -> tuple[int, int]:
    """Rewrite the index without unused pages; returns its bytes before and after.

    Raises:
        ConfigError: see `look`.
        TierUnavailable: others have the directory open, or the index cannot be read.
    """
    with maintain(path):
        pass  # what a dead writer held is reclaimed, and a damaged index rebuilt
    directory = Directory(path, PAGE)
    try:
        with directory.exclusive():
            # Nobody can open it before this is over.
            others = len(directory.others())
            if others:
                raise TierUnavailable(f"{path} is open in {others} other processes: close them before --compact")
            before = replace_index(path, lambda fresh: _compact(path, fresh))
            return before, (path / "index" / "data.mdb").stat().st_size
    except OSError as error:
        raise TierUnavailable(f"{path} cannot be compacted ({error}): free some disk space") from error
    finally:
        directory.drop()


def _compact(path: Path, fresh: Path) -> int:
    index = Index(path / "index", None, durable=False, writable=False)
    try:
        index.compact_into(fresh)
        return index.nbytes()
    finally:
        index.close()
