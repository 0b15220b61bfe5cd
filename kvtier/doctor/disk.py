"""The NVMe tier's directory: may it be written, is it what it seems, is there room. Nothing is left behind."""

import mmap
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvtier.config import NvmeSettings
from kvtier.doctor.findings import Finding, Subject, ok, problem, shown_size, warning
from kvtier.errors import TierUnavailable
from kvtier.nvme.directory import FOUND_DAMAGED, read_meta, strangers
from kvtier.nvme.index import map_bytes_for
from kvtier.nvme.segments import disk_free, takes_direct_io

__all__ = ["Mount", "direct_io", "directory", "filesystem", "index_map", "mount_of", "scratch", "space"]

_PAGE = 4096
_FIRST_BYTES = 1 << 20
_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_OVER_THE_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs", "afs", "virtiofs"})
_NORESERVE = 0x4000  # linux/mman.h; Python 3.11's mmap has no name for it


class Mount(NamedTuple):
    """A mounted file system."""

    point: Path
    kind: str


def mount_of(path: Path) -> Mount:
    """The file system that a path is, or would be, on."""
    found = Mount(Path("/"), "unknown")
    resolved = path.absolute().resolve()
    for line in _MOUNTS.read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].encode().decode("unicode_escape"))
        # Later lines are mounted over earlier ones.
        if resolved.is_relative_to(point) and len(point.parts) >= len(found.point.parts):
            found = Mount(point, after.split()[0])
    return found


def _ground(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.is_dir())


@contextmanager
def scratch(nvme: NvmeSettings) -> Iterator[Path]:
    """An empty directory on the tier's file system; gone afterwards, with all that is in it.

    Raises:
        OSError: nothing can be made there.
    """
    with tempfile.TemporaryDirectory(prefix=".kvtier-doctor-", dir=_ground(nvme.path)) as name:
        yield Path(name)


def directory(subject: Subject) -> Iterator[Finding]:
    """Writes to where the tier will write, and reads what an earlier run left."""
    nvme = subject.config.tiering.nvme
    if nvme is None:
        shared = subject.config.tiering.remote is not None
        yield ok("directory", f"no NVMe tier is configured{'' if shared else ': blocks do not outlive the process'}")
        return
    there = next(place for place in (nvme.path, *nvme.path.absolute().parents) if place.exists())
    if not there.is_dir():
        yield problem("directory", f"{there} is a file", "choose a directory of its own as tiering.nvme.path")
        return
    try:
        with scratch(nvme) as place:
            (place / "probe").write_bytes(bytes(_PAGE))
    except OSError as error:
        yield problem(
            "directory",
            f"{nvme.path} cannot be written: {error.strerror or error}",
            "choose a writable directory as tiering.nvme.path, or change its mode or mount",
        )
        return
    yield _left_behind(nvme.path)


def _left_behind(path: Path) -> Finding:
    """What META.json of an earlier run says; the directory is not opened."""
    try:
        meta = read_meta(path / "META.json")
    except TierUnavailable as error:
        what, _, remedy = str(error).rpartition(": ")
        return problem("directory", what, remedy)
    if meta is None:
        others = strangers(path)
        if others:
            return problem("directory", f"{path} holds other files ({others[0]!r})", "choose an empty or new directory")
        return ok("directory", f"{path} is new and can be written")
    if meta.untrusted:
        return warning(
            "directory",
            f"{path} starts empty: {meta.untrusted}",
            "nothing to do; tiering.nvme.durable = true keeps blocks across power losses",
        )
    if meta.damaged:
        return warning(
            "directory",
            f"{path}: {FOUND_DAMAGED}",
            "nothing to do: what is whole of it is kept when it is opened next; test the disk and the memory",
        )
    return ok("directory", f"{path} can be written and holds blocks of an earlier run")


def space(subject: Subject) -> Iterator[Finding]:
    """Room for the capacity above the floor; what the tier has taken already counts."""
    nvme = subject.config.tiering.nvme
    if nvme is None:
        return
    ground = _ground(nvme.path)
    free = disk_free(ground)
    taken = sum(file.stat().st_blocks * 512 for file in nvme.path.glob("seg-*.kv"))
    reachable = max(0, min(nvme.capacity, taken + free - nvme.min_free))
    if not taken and reachable < _FIRST_BYTES:
        yield problem(
            "space",
            f"{ground} has {shown_size(free)} free, tiering.nvme.min_free keeps {shown_size(nvme.min_free)}: "
            "the tier cannot be opened",
            "free space, lower tiering.nvme.min_free, or choose another disk",
        )
    elif reachable < nvme.capacity:
        yield warning(
            "space",
            f"the tier can grow to {shown_size(reachable)}, not to its capacity of {shown_size(nvme.capacity)}",
            "free space, or lower tiering.nvme.capacity or tiering.nvme.min_free",
        )
    else:
        yield ok("space", f"{shown_size(free)} free for a capacity of {shown_size(nvme.capacity)}")


def filesystem(subject: Subject) -> Iterator[Finding]:
    """File systems that are not a local disk."""
    nvme = subject.config.tiering.nvme
    if nvme is None:
        return
    point, kind = mount_of(nvme.path)
    if kind in _IN_MEMORY:
        yield warning(
            "filesystem",
            f"{point} is {kind}: the NVMe tier would lie in memory, and be gone after a restart of the machine",
            "choose a directory on a local disk, or give the memory to tiering.host instead",
        )
    elif kind in _OVER_THE_NETWORK:
        yield problem(
            "filesystem",
            f"{point} is {kind}: the index is a memory map, which is unsound over a network",
            "choose a directory on a local disk",
        )
    elif kind == "overlay" or kind.startswith("fuse"):
        yield warning(
            "filesystem",
            f"{point} is {kind}: slow, and in a container gone with it",
            "mount a volume of a local disk and choose a directory on it",
        )
    else:
        yield ok("filesystem", f"{point} is {kind}")


def direct_io(subject: Subject) -> Iterator[Finding]:
    """Writes and reads a page past the page cache."""
    nvme = subject.config.tiering.nvme
    if nvme is None:
        return
    with scratch(nvme) as place:
        direct = takes_direct_io(place)
    if direct:
        yield ok("direct_io", "files can be read and written past the page cache")
    else:
        yield warning(
            "direct_io",
            "no direct I/O here: every block is copied once more and takes page cache beside its tier",
            "choose a directory on ext4, XFS or another local file system",
        )


def index_map(subject: Subject) -> Iterator[Finding]:
    """Maps as much address space as the index of a full tier may need."""
    nvme = subject.config.tiering.nvme
    if nvme is None:
        return
    needed = map_bytes_for(nvme.capacity // _PAGE)
    try:
        mmap.mmap(-1, needed, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, mmap.PROT_READ).close()
    except OSError as error:
        yield problem(
            "index_map",
            f"{shown_size(needed)} of address space for the index cannot be mapped: {error.strerror or error}",
            "raise `ulimit -v`, or lower tiering.nvme.capacity",
        )
    else:
        yield ok("index_map", f"{shown_size(needed)} of address space can be mapped; memory is used as blocks come")
