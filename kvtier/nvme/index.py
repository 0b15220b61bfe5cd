"""The index: an LMDB environment that survives what LMDB does not forgive.

* A truncated data file kills the process with SIGBUS, a wrong page by an assertion: `kvtier.nvme.pages` reads the file
  before it is opened. What happens to it while it is open cannot be fended off.
* Another process that enlarges the map makes `begin` fail: the new size is adopted, with no transaction open.
* A full map stays full, whatever is deleted: the map is enlarged, and this one transaction counts as refused.
* Its lock file is sparse: on a full disk a new reader is killed. The file is allocated before it is opened.
* One long reader makes the file grow without end: transactions live for one batch of look-ups, and those of processes
  that died in one are ended about once a second.
* An environment does not survive `fork`: the child gets an error instead of a damaged index.
"""

import errno
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from kvtier.errors import CorruptObject, TierError, TierFull, TierUnavailable
from kvtier.nvme.ledger import DATABASES, Ledger
from kvtier.nvme.names import Names
from kvtier.nvme.pages import DamagedIndex

__all__ = ["Index", "map_bytes_for"]

_BYTES_PER_ENTRY = 256
_SLACK = 64 << 20
_READERS = 1024
_LOCK_BYTES = (_READERS + 2) * 64
"""What LMDB makes of its lock file: a line of the processor's cache per reader, and a few of its own."""
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
# Records of another size than any that was written, and figures that no record can hold.
_DECODING = (struct.error, OverflowError)
_DAMAGE = (
    lmdb.BadDbiError,
    lmdb.BadTxnError,
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
    *_DECODING,
)


def map_bytes_for(pages: int) -> int:
    """Map size for the largest index that so many pages can need; only address space until it is used."""
    return _SLACK + pages * _BYTES_PER_ENTRY * 5 // 4


def _allocate(lock_file: Path) -> None:
    """Have the disk set aside the whole table of readers, before LMDB takes a lock on it.

    LMDB maps a sparse file: whoever stores to a hole of it while the disk is full is killed.

    Raises:
        OSError: the disk has no room for it.
    """
    fd = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if os.fstat(fd).st_blocks * 512 < _LOCK_BYTES:
            os.posix_fallocate(fd, 0, _LOCK_BYTES)
    finally:
        os.close(fd)


class Index:
    """Transactions over the index; thread-safe, shared with other processes.

    Args:
        path: its directory, made if absent.
        pages: how many pages the segments may have; None to keep what the index was made for.
        durable: every commit reaches the disk before it returns.
        writable: False to look only, at an index that exists.

    Raises:
        DamagedIndex: what is there cannot be read.
        TierUnavailable: the system refuses the files.
        OSError: the disk has no room for the table of readers.
    """

    def __init__(self, path: Path, pages: int | None, *, durable: bool, writable: bool = True) -> None:
        self._path = path
        self._pid = os.getpid()
        self.damaged = False
        self._gate = threading.Condition()
        self._active = 0
        self._resizing = False
        if writable:
            path.mkdir(exist_ok=True)
        _allocate(path / "lock.mdb")
        with self._translated():
            self._env = lmdb.open(
                str(path),
                map_size=0 if pages is None else map_bytes_for(pages),
                max_dbs=len(DATABASES),
                max_readers=_READERS,
                sync=durable,
                metasync=durable,
                readonly=not writable,
                create=writable,
            )
            self._env.reader_check()
            self._dbs = {name: self._env.open_db(name.encode(), create=writable) for name in DATABASES}
        self._names = Names(self._dbs["names"])

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened it, which must not touch it."""
        return os.getpid() != self._pid

    # ---- transactions

    @contextmanager
    def read(self, lock: "threading.Lock | None" = None) -> Iterator[Ledger]:
        """A snapshot, taken while `lock` is held if one is given, which then is held throughout.

        Lock order: the index before the tier's lock, never the other way round.
        """
        try:
            txn = self._begin(lock)
            try:
                yield Ledger(txn, self._dbs, self._names)
            finally:
                txn.abort()
                if lock is not None:
                    lock.release()
                self._leave()
        except (lmdb.Error, CorruptObject, *_DECODING) as error:
            raise self._translation(error) from error

    @contextmanager
    def write(self) -> Iterator[Ledger]:
        """The one writing transaction of all processes: committed at the end, rolled back by an exception.

        Raises:
            TierFull: the index cannot grow; nothing was changed.
            DamagedIndex: it cannot be read.
        """
        try:
            txn = self._begin(None, write=True)
            try:
                ledger = Ledger(txn, self._dbs, self._names)
                yield ledger
                ledger.save()
            except BaseException:
                txn.abort()
                raise
            else:
                txn.commit()
            finally:
                self._leave()
        except lmdb.MapFullError:
            self._resize(self._env.info()["map_size"] * 5 // 4)
            raise TierFull(f"the index {self._path} was full and has been enlarged; try again") from None
        except (lmdb.Error, CorruptObject, *_DECODING) as error:
            raise self._translation(error) from error

    def _begin(self, lock: "threading.Lock | None", *, write: bool = False) -> Any:
        if self.forked:
            raise TierUnavailable(
                f"the index {self._path} was opened before a fork: open the tier in a process that is spawned"
            )
        while True:
            self._enter()
            if lock is not None:
                lock.acquire()
            try:
                return self._env.begin(write=write)
            except BaseException as error:
                if lock is not None:
                    lock.release()
                self._leave()
                if not isinstance(error, lmdb.MapResizedError):
                    raise
            self._resize(0)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (lmdb.Error, CorruptObject, *_DECODING) as error:
            raise self._translation(error) from error

    def _translation(self, error: Exception) -> TierError:
        """What of LMDB means in the words of tiers."""
        if isinstance(error, (*_DAMAGE, CorruptObject)):
            self.damaged = True
            return DamagedIndex(
                f"the index {self._path} is damaged ({error}): close every process that uses it and reopen, "
                "which keeps what is whole"
            )
        if isinstance(error, lmdb.DiskError) or any(os.strerror(code) in str(error) for code in _FULL_ERRNOS):
            return TierFull(f"the index {self._path} cannot be written: {error}")
        return TierUnavailable(f"the index {self._path} failed: {error}; check the disk and reopen")

    # ---- map size: no transaction may be open while it changes

    def _enter(self) -> None:
        with self._gate:
            while self._resizing:
                self._gate.wait()
            self._active += 1

    def _leave(self) -> None:
        with self._gate:
            self._active -= 1
            self._gate.notify_all()

    def _resize(self, map_bytes: int) -> None:
        with self._gate:
            self._gate.wait_for(lambda: not self._resizing)
            self._resizing = True
            self._gate.wait_for(lambda: self._active == 0)
            try:
                self._env.set_mapsize(map_bytes)
            finally:
                self._resizing = False
                self._gate.notify_all()

    # ---- the whole

    def flush(self) -> None:
        """Write everything committed to the disk."""
        with self._translated():
            self._env.sync(True)

    def compact_into(self, path: Path) -> None:
        """Write a copy without unused pages into another directory, synchronised."""
        with self._translated():
            self._env.copy(str(path), compact=True)
        with (path / "data.mdb").open("rb") as file:
            os.fsync(file.fileno())

    def forget_dead_readers(self) -> None:
        """A process that died in the midst of a look-up keeps its snapshot alive: no page freed since is used again."""
        with self._translated():
            self._env.reader_check()

    def nbytes(self) -> int:
        """Size of the data file; 0 if somebody removed it."""
        data_file = self._path / "data.mdb"
        return data_file.stat().st_size if data_file.is_file() else 0

    def close(self) -> None:
        """Wait for open transactions and close."""
        with self._gate:
            self._gate.wait_for(lambda: self._active == 0)
            self._env.close()
