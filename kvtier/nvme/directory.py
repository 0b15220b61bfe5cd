"""The directory: its version, who has it open, and whether what lies in it can be trusted.

LOCK              flock held while somebody opens or closes
META.json         format version, uuid, segment size; boot id of the last opener, clean flag
index/            LMDB; priorities.bin: see `kvtier.nvme.priorities`
recency.bin       see `kvtier.nvme.recency`
seg-00000.kv ...  bytes of blocks
locks/<uuid>      flock held as long as that writer lives: what a dead one holds is anyone's to reclaim

An index that was not synchronised may be damaged after a power loss, not after the death of its processes: if the
machine was restarted (the kernel's boot id changed) since a writer left without closing, the directory starts empty.
"""

import fcntl
import json
import os
import re
import shutil
import threading
import uuid
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from kvtier.errors import ConfigError, TierUnavailable
from kvtier.nvme.extents import PAGE

__all__ = ["FORMAT_VERSION", "FOUND_DAMAGED", "Directory", "Meta", "boot_id", "read_meta", "strangers"]

FORMAT_VERSION = 3
FOUND_DAMAGED = "its index was found damaged"
"""What `Meta.damaged` means."""

_NAMES = frozenset({"LOCK", "META.json", "META.json.new", "index", "locks", "recency.bin"})
_PREFIXES = ("seg-", "probe-")
_WRITER = re.compile("[0-9a-f]{32}")

_opened: set[tuple[int, int]] = set()
_inherited: set[tuple[int, int]] = set()
_opened_lock = threading.Lock()
_writers: "weakref.WeakSet[Directory]" = weakref.WeakSet()


def _after_fork() -> None:
    """What the parent had open, a child cannot open again: LMDB allows one opening per process.

    The child must not keep its parent's lock alive either, once the parent is dead. Closing the child's descriptor
    leaves the lock to the parent, which has the other one.
    """
    global _opened_lock  # noqa: PLW0603  the parent's may be held by a thread that does not exist here
    _opened_lock = threading.Lock()
    _inherited.update(_opened)
    _opened.clear()
    for directory in _writers:
        directory.disinherit()


os.register_at_fork(after_in_child=_after_fork)


def boot_id() -> str:
    """Identifies this run of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, slots=True)
class Meta:
    """What META.json says.

    durable: every writer since the last clean close synchronised its commits. damaged: the index failed whoever had it
    open. index: what the index's file was at the last clean close.
    """

    version: int
    uuid: str
    segment_bytes: int
    boot_id: str = ""
    clean: bool = True
    durable: bool = True
    damaged: bool = False
    index: str = ""

    @property
    def interrupted(self) -> bool:
        """Whether the machine stopped while somebody had it open: what was written last may be on the disk, or not."""
        return not self.clean and self.boot_id != boot_id()

    @property
    def untrusted(self) -> str:
        """Why the directory must start empty; "" if it need not. Only meaningful if nobody else has it open."""
        if self.interrupted and not self.durable:
            return "the machine was restarted while it was open, and it was not opened as durable"
        return ""


def read_meta(path: Path) -> Meta | None:
    """Contents of META.json, None if there is none.

    Raises:
        TierUnavailable: it is damaged, or of a version that this code cannot read.
    """
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TierUnavailable(f"{path} cannot be read ({error}): remove the directory to start empty") from error
    version = data.get("version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise TierUnavailable(
            f"{path} has format version {version!r}, this release reads {FORMAT_VERSION}: "
            "use another directory, or remove this one"
        )
    try:
        # Directories of earlier releases do not say what the index was.
        data.setdefault("index", "")
        meta = Meta(**{field.name: data[field.name] for field in fields(Meta)})
        sound = len(bytes.fromhex(meta.uuid)) == 16 and meta.segment_bytes >= PAGE and meta.segment_bytes % PAGE == 0
    except (KeyError, TypeError, ValueError) as error:
        raise TierUnavailable(f"{path} is damaged ({error!r}): remove the directory to start empty") from error
    if not sound:
        raise TierUnavailable(f"{path} is damaged ({meta}): remove the directory to start empty")
    return meta


def _is_ours(name: str) -> bool:
    return name in _NAMES or name.startswith(_PREFIXES)


def strangers(path: Path) -> list[str]:
    """Names in a directory, if it is there, that no tier gives."""
    return [entry.name for entry in path.iterdir() if not _is_ours(entry.name)] if path.exists() else []


class Directory:
    """One opened directory of this process.

    Args:
        path: where it is or will be; nothing is written before it was found usable.
        segment_bytes: size of segment files if the directory is new; an existing one keeps its own.

    Raises:
        ConfigError: the path is a file or somebody else's directory.
        TierUnavailable: it cannot be made, read or written, is of another version, or is open in this process.

    Attributes:
        meta: META.json as read under the lock.
        writer: 16 bytes that name this opening; its flock lives as long as this object or the process.
    """

    def __init__(self, path: Path, segment_bytes: int) -> None:
        # Files are opened when they are needed, wherever the process has gone by then.
        self.path = path = path.absolute()
        self._fresh_segment_bytes = segment_bytes
        self.writer = uuid.uuid4().bytes
        self._writer_fd = -1
        self._identity: tuple[int, int] | None = None
        self.meta = self._look() or self._new_meta()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._register()
            (path / "locks").mkdir(exist_ok=True)
        except OSError as error:
            self._unregister()
            raise TierUnavailable(f"{path} cannot be used ({error}): choose a writable directory") from error

    def _look(self) -> Meta | None:
        """Decide, without a trace, whether the path can be ours."""
        try:
            if self.path.exists() and not self.path.is_dir():
                raise ConfigError(f"{self.path} is a file: the NVMe tier needs a directory of its own")
            meta = read_meta(self.path / "META.json")
            others = [] if meta else strangers(self.path)
        except OSError as error:
            raise TierUnavailable(f"{self.path} cannot be read ({error}): choose another directory") from error
        if others:
            raise ConfigError(f"{self.path} holds other files ({others[0]!r}): choose an empty or new directory")
        if self.path.exists() and not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
            raise TierUnavailable(f"{self.path} is not writable: choose another directory or change its mode")
        return meta

    def _new_meta(self) -> Meta:
        return Meta(FORMAT_VERSION, uuid.uuid4().hex, self._fresh_segment_bytes)

    def _register(self) -> None:
        status = self.path.stat()
        identity = (status.st_dev, status.st_ino)
        with _opened_lock:
            if identity in _inherited:
                raise TierUnavailable(
                    f"{self.path} was open in the parent of this process: open it in one that is spawned, not forked"
                )
            if identity in _opened:
                raise TierUnavailable(
                    f"{self.path} is open in this process already: share that tier, or close it first"
                )
            _opened.add(identity)
        self._identity = identity

    def _unregister(self) -> None:
        with _opened_lock:
            _opened.discard(self._identity or (-1, -1))

    # ---- opening and closing

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Nobody else opens, closes or reclaims meanwhile."""
        fd = os.open(self.path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def load(self) -> None:
        """Read META.json again, now that nobody changes it; what a crash left before the first one is removed."""
        found = read_meta(self.path / "META.json")
        if found is None:
            self.wipe()
        else:
            self.meta = found

    def index_touched(self) -> bool:
        """Whether the index is another than the last clean close left."""
        return self.meta.index != self._index_state()

    def _index_state(self) -> str:
        """Changes with every change of the index's file, also one that hides the time of it."""
        try:
            status = (self.path / "index" / "data.mdb").stat()
        except FileNotFoundError:
            return ""
        return f"{status.st_ino}:{status.st_size}:{status.st_ctime_ns}"

    def wipe(self) -> None:
        """Remove all contents and start a new identity. Only for the one process that has it open."""
        for entry in self.path.iterdir():
            if entry.name == "index":
                shutil.rmtree(entry)
            elif entry.name not in ("LOCK", "locks") and _is_ours(entry.name):
                entry.unlink()
        self.meta = replace(self._new_meta(), segment_bytes=self.meta.segment_bytes)
        self._store(self.meta)

    def enter(self, *, durable: bool) -> None:
        """Begin to live as a writer, and mark the directory as in use."""
        if self._writer_fd < 0:
            self._writer_fd = os.open(self._lock_file(self.writer), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._writer_fd, fcntl.LOCK_EX)
            _writers.add(self)
        durable = durable and (self.meta.clean or self.meta.durable)
        # Whoever gets as far as this has seen to the damage.
        self._store(replace(self.meta, boot_id=boot_id(), clean=False, durable=durable, damaged=False))

    def leave(self, *, clean: bool, damaged: bool = False) -> None:
        """Stop living as a writer; the last one leaves the directory clean, if it could write everything down."""
        last = not self.others()
        meta = read_meta(self.path / "META.json")
        if meta is not None:
            marked = replace(meta, damaged=meta.damaged or damaged)
            self._store(replace(marked, clean=True, index=self._index_state()) if clean and last else marked)
        self._forget_writer()

    def disinherit(self) -> None:
        """In a child of `fork`: leave everything to the parent."""
        if self._writer_fd >= 0:
            os.close(self._writer_fd)
            self._writer_fd = -1

    def _forget_writer(self) -> None:
        if self._writer_fd >= 0:
            self._lock_file(self.writer).unlink(missing_ok=True)
            os.close(self._writer_fd)
            self._writer_fd = -1

    def drop(self) -> None:
        """Let the process open the directory again."""
        self._forget_writer()
        self._unregister()

    def _store(self, meta: Meta) -> None:
        self.meta = meta
        fresh = self.path / "META.json.new"
        with fresh.open("w") as file:
            json.dump(asdict(meta), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path / "META.json")
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # ---- who lives

    def others(self) -> list[bytes]:
        """Other living writers; the files of dead ones are removed. Call it under `exclusive`."""
        names = [entry.name for entry in (self.path / "locks").iterdir()]
        writers = [bytes.fromhex(name) for name in names if _WRITER.fullmatch(name)]
        return [writer for writer in writers if writer != self.writer and not self._bury(writer)]

    def dead(self, writers: Iterable[bytes]) -> set[bytes]:
        """Those of the writers that live no more. Call it under `exclusive`."""
        return {writer for writer in set(writers) - {self.writer} if self._bury(writer)}

    def _bury(self, writer: bytes) -> bool:
        """Whether a writer is dead; its file is removed then."""
        path = self._lock_file(writer)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            with suppress(FileNotFoundError):
                path.unlink()
            return True
        finally:
            os.close(fd)

    def _lock_file(self, writer: bytes) -> Path:
        return self.path / "locks" / writer.hex()
