"""The pages of an LMDB data file, read before LMDB reads them: it believes what they say, and a wrong one kills.

file    meta | meta | pages of trees, overflow pages, free pages in any order
meta    magic, version, ..., the trees of free pages and of databases, last page, transaction; the newer one counts
page    number, flags, lower and upper bound of the gap; offsets of nodes up to `lower`, the nodes from `upper` on
node    length of data (branch: child page), flags, length of key; key, data; without gaps between nodes

Checked is all that LMDB relies on: every page in its place and used once, nodes that tile their page, keys in order
through the whole tree, depths and sums as they are kept. Not checked is what values say, which have seals of their own
(`kvtier.nvme.seals`). Data file version 1, that of LMDB 0.9.
"""

import os
import struct
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import CorruptObject, TierUnavailable
from kvtier.nvme.extents import PAGE
from kvtier.nvme.seals import unseal

__all__ = ["DamagedIndex", "check_pages", "entries_of", "missing_bytes", "whole_entries"]

_MAGIC = 0xBEEFC0DE
_VERSION = 1
_HEADER = 16
_NODE = 8
_MAX_KEY = 511
_MAX_DEPTH = 32
_MAX_MAP = 1 << 46
_NO_PAGE = 2**64 - 1
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_BIG, _SUBTREE = 1, 2
_INTEGER_KEYS = 8
_TREE = struct.Struct("<IHHQQQQQ")
_HEAD = struct.Struct("<QHHI")
_META_HEAD = struct.Struct("<IIQQ")
_NODE_HEAD = struct.Struct("<4H")
_CHUNK = 1024

# Masks that blank what follows a key of n bytes in its first 16.
_HIGH = np.array([(2**64 - 1) ^ (2 ** (8 * max(0, 8 - n)) - 1) for n in range(17)], np.uint64)
_LOW = np.array([(2**64 - 1) ^ (2 ** (8 * min(8, 16 - n)) - 1) for n in range(17)], np.uint64)

_U64 = NDArray[np.uint64]
_I64 = NDArray[np.int64]


class DamagedIndex(CorruptObject, TierUnavailable):
    """The index cannot be read any more. Opening the directory again keeps what is whole of it."""


class _Tree(NamedTuple):
    """What a database says of its tree."""

    pad: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int


class _Meta(NamedTuple):
    page_bytes: int
    map_bytes: int
    free: _Tree
    main: _Tree
    last_page: int
    txn: int

    @property
    def fits(self) -> bool:
        """Whether there can be so many pages."""
        return 1 <= self.last_page and (self.last_page + 1) * self.page_bytes <= self.map_bytes <= _MAX_MAP


class _Nodes(NamedTuple):
    """Nodes of some pages, in the order of their keys.

    pages: [p, page_bytes]. rows: which of the pages; at: offset in `pages` of the node; sizes: of data; flags;
    key_sizes; high, low: the first 16 bytes of the key. All [n].
    """

    pages: NDArray[np.uint8]
    rows: _I64
    at: _I64
    sizes: _I64
    flags: _I64
    key_sizes: _I64
    high: _U64
    low: _U64

    def inline(self, node: int) -> tuple[bytes, bytes]:
        """Key and data of a node; of one whose data lies elsewhere, the number of the page where it does."""
        start = int(self.at[node]) + _NODE
        middle = start + int(self.key_sizes[node])
        end = middle + (8 if self.flags[node] & _BIG else int(self.sizes[node]))
        memory = self.pages.reshape(-1)
        return memory[start:middle].tobytes(), memory[middle:end].tobytes()


def missing_bytes(data_file: Path) -> int:
    """By how many bytes a data file is shorter than its newest meta page says; 0 if it is whole or absent.

    No damage by itself: LMDB does not write pages at the end that were freed by the transaction that made them.

    Raises:
        DamagedIndex: it has no meta page.
    """
    if not data_file.exists():
        return 0
    with data_file.open("rb") as file:
        meta = _meta(file.fileno(), data_file)
        return max(0, (meta.last_page + 1) * meta.page_bytes - os.fstat(file.fileno()).st_size)


def check_pages(data_file: Path, databases: Collection[str]) -> bool:
    """Read all pages that are in use, none of which may change meanwhile; a file that is absent is sound.

    Args:
        data_file: LMDB's.
        databases: all that may be in it.

    Returns:
        Whether the keys of all databases are in order. Where they are not LMDB misses some that are there, and no more
        may be written; but all can be read one after the other.

    Raises:
        DamagedIndex: LMDB would fail on it, or die.
        OSError: it cannot be read.
    """
    if not data_file.exists():
        return True
    with data_file.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        walk = _Walk(file.fileno(), data_file, _meta(file.fileno(), data_file))
        return walk.whole(frozenset(name.encode() for name in databases))


def whole_entries(data_file: Path) -> Iterator[tuple[bytes, bytes]]:
    """Key and value of every entry whose seal is whole, of all databases, in any order and whatever their trees say.

    Only of pages that are in use: what was deleted may lie on others.

    Args:
        data_file: LMDB's, which nobody has open.

    Raises:
        DamagedIndex: nothing tells which pages are in use.
        OSError: it cannot be read.
    """
    with data_file.open("rb") as file:
        yield from _Walk(file.fileno(), data_file, _meta_left(file.fileno(), data_file)).salvaged()


def entries_of(data_file: Path, database: str) -> int | None:
    """How many entries a database has; None if that cannot be told."""
    with data_file.open("rb") as file:
        try:
            walk = _Walk(file.fileno(), data_file, _meta_left(file.fileno(), data_file))
            return next((tree.entries for name, tree in walk.trees() if name == database.encode()), None)
        except DamagedIndex:
            return None


def _meta(fd: int, data_file: Path) -> _Meta:
    """The meta page that counts; both must be sound."""
    first = os.pread(fd, PAGE, 0)
    page_bytes = struct.unpack_from("<I", first, 40)[0] if len(first) == PAGE else 0
    second = os.pread(fd, PAGE, page_bytes)
    metas = [_unpack_meta(page, place) for place, page in enumerate((first, second)) if len(page) == PAGE]
    sound = [meta for meta in metas if meta is not None and meta.page_bytes == page_bytes]
    # One that says that it is older or newer than it is would bring back what the last transaction deleted.
    if len(sound) < 2 or abs(sound[0].txn - sound[1].txn) > 1:
        raise DamagedIndex(f"{data_file} has no sound meta page")
    return max(sound, key=lambda meta: meta.txn)


def _meta_left(fd: int, data_file: Path) -> _Meta:
    """The same where one is damaged, if both still say which one is newer: the walks find out what else is wrong."""
    try:
        return _meta(fd, data_file)
    except DamagedIndex:
        pages = [os.pread(fd, PAGE, at) for at in (0, PAGE)]
        metas = sorted((_told(page) for page in pages if len(page) == PAGE), key=lambda meta: meta.txn)
        if len(metas) == 2 and metas[1].txn - metas[0].txn == 1 and metas[1].page_bytes == PAGE and metas[1].fits:
            return metas[1]
        raise


def _unpack_meta(page: bytes, place: int) -> _Meta | None:
    meta = _told(page)
    number, _, flags, _ = _HEAD.unpack_from(page)
    magic, version, _, _ = _META_HEAD.unpack_from(page, _HEADER)
    if (number, flags, magic, version) != (place, _META, _MAGIC, _VERSION):
        return None
    sized = 512 <= meta.page_bytes <= 1 << 15 and meta.page_bytes & (meta.page_bytes - 1) == 0
    # Transactions take turns with the two pages; a new file has none so far.
    return meta if sized and meta.fits and (not meta.txn or meta.txn % 2 == place) else None


def _told(page: bytes) -> _Meta:
    """What a meta page says, sound or not."""
    map_bytes = _META_HEAD.unpack_from(page, _HEADER)[3]
    free, main = (_Tree(*_TREE.unpack_from(page, at)) for at in (40, 88))
    return _Meta(free.pad, map_bytes, free, main, *struct.unpack_from("<QQ", page, 136))


class _Walk:
    """One walk over all trees of a data file."""

    def __init__(self, fd: int, data_file: Path, meta: _Meta) -> None:
        self._fd = fd
        self._file = data_file
        self._meta = meta
        self._bytes = meta.page_bytes
        self._seen = np.zeros(meta.last_page + 1, np.bool_)
        self._seen[:2] = True
        self._counted = [0, 0, 0, 0]  # leaves, branches, overflow pages, entries of the tree under way
        self._ordered = True

    def whole(self, databases: frozenset[bytes]) -> bool:
        """All trees, and the pages that are free; whether the keys of databases are in order."""
        trees = list(self.trees())
        self._require(self._ordered and databases.issuperset(name for name, _ in trees))
        for _, tree in trees:
            for nodes in self._leaves(tree, 0):
                for node in np.flatnonzero(nodes.flags).tolist():
                    self._data(nodes, node)
        ordered, self._ordered = self._ordered, True
        self._free()
        return ordered

    def trees(self) -> Iterator[tuple[bytes, _Tree]]:
        """The databases by name."""
        for nodes in self._leaves(self._meta.main, 0):
            for node in range(len(nodes.at)):
                name, data = nodes.inline(node)
                self._require(nodes.flags[node] == _SUBTREE and len(data) == _TREE.size)
                yield name, _Tree(*_TREE.unpack(data))

    def _free(self) -> None:
        for nodes in self._leaves(self._meta.free, _INTEGER_KEYS):
            self._require(bool(((nodes.high > 0) & (nodes.high <= self._meta.txn)).all()))
            for node in range(len(nodes.at)):
                self._freed(self._data(nodes, node))
        self._require(self._ordered)

    def salvaged(self) -> Iterator[tuple[bytes, bytes]]:
        """See `whole_entries`."""
        for number in self._in_use().tolist():
            page = os.pread(self._fd, self._bytes, number * self._bytes)
            # What belongs elsewhere is of another time.
            for key, data in _listed(page) if page[:8] == number.to_bytes(8, "little") else ():
                value = unseal(key, data)
                if value is not None:
                    yield key, value

    def _in_use(self) -> _I64:
        """Pages of the trees that are not free; where either is damaged, the other one tells.

        Where they contradict each other, one names a page by mistake: what lies on it may be of another time.
        """
        free, used = self._claimed(self._free), self._claimed(self._databases)
        if free is None and used is None:
            raise DamagedIndex(f"{self._file} has damaged pages, and nothing tells which are in use")
        every = np.ones_like(self._seen)
        every[:2] = False
        return np.flatnonzero(every & (every if used is None else used) & (every if free is None else ~free))

    def _claimed(self, walk: Callable[[], None]) -> NDArray[np.bool_] | None:
        """Which pages a walk of its own meets, and the first two; None if it fails."""
        self._seen[2:], self._ordered = False, True
        try:
            walk()
        except DamagedIndex:
            return None
        return self._seen.copy()

    def _databases(self) -> None:
        for _, tree in list(self.trees()):
            for _ in self._leaves(tree, 0):
                pass

    def _require(self, sound: "bool | np.bool_") -> None:
        if not sound:
            raise DamagedIndex(f"{self._file} has damaged pages")

    def _claim(self, numbers: _I64) -> None:
        """These pages get the one use that a page may have."""
        self._require((numbers <= self._meta.last_page).all() and (numbers >= 0).all())
        self._require(not self._seen[numbers].any() and len(np.unique(numbers)) == len(numbers))
        self._seen[numbers] = True

    def _read(self, numbers: _I64) -> NDArray[np.uint8]:
        """These pages one behind the other, and 16 bytes behind the last one."""
        memory = np.zeros(len(numbers) * self._bytes + 16, np.uint8)
        breaks = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        for start, end in pairwise(breaks):
            part = memory[start * self._bytes : end * self._bytes]
            self._require(os.preadv(self._fd, [part.data], int(numbers[start]) * self._bytes) == len(part))
        return memory

    # ---- trees

    def _leaves(self, tree: _Tree, flags: int) -> Iterator[_Nodes]:
        """Walk a tree from its root, level by level; yields the nodes of its leaves."""
        empty = tree.root == _NO_PAGE
        self._require(tree.flags == flags and tree.depth < _MAX_DEPTH and (tree.depth == 0) == empty)
        self._require(empty or tree.root <= self._meta.last_page)
        self._counted = [0, 0, 0, 0]
        # The least key that a page may have comes down from the node above it.
        pages, high, low = np.array([0 if empty else tree.root]), np.zeros(1, np.uint64), np.zeros(1, np.uint64)
        for level in range(tree.depth):
            leaf = level == tree.depth - 1
            below = []
            for at in range(0, len(pages), _CHUNK):
                part, end = slice(at, at + _CHUNK), slice(at + _CHUNK, at + _CHUNK + 1)
                nodes = self._nodes(pages[part], leaf=leaf, integers=flags == _INTEGER_KEYS)
                firsts = np.flatnonzero(np.diff(nodes.rows, prepend=-1))
                if leaf:
                    self._in_order(
                        np.append(np.insert(nodes.high, firsts, high[part]), high[end]),
                        np.append(np.insert(nodes.low, firsts, low[part]), low[end]),
                    )
                    yield nodes
                else:
                    # A branch's first node has no key of its own.
                    nodes.high[firsts], nodes.low[firsts] = high[part], low[part]
                    below.append((nodes.sizes | nodes.flags << 32, nodes.high, nodes.low))
            if not leaf:
                pages, high, low = (np.concatenate(column) for column in zip(*below, strict=True))
                self._in_order(high, low)
        self._require(self._counted == [tree.leaves, tree.branches, tree.overflows, tree.entries])

    def _in_order(self, high: _U64, low: _U64) -> None:
        self._ordered &= bool(((high[:-1] < high[1:]) | ((high[:-1] == high[1:]) & (low[:-1] <= low[1:]))).all())

    def _nodes(self, numbers: _I64, *, leaf: bool, integers: bool) -> _Nodes:
        """The nodes of these pages."""
        self._claim(numbers)
        memory = self._read(numbers)
        pages = memory[:-16].reshape(len(numbers), self._bytes)
        words = memory.view("<u2")
        heads = pages.view("<u2")[:, :8].astype(np.int64)
        self._require((pages.view("<i8")[:, 0] == numbers).all())
        counts, upper = self._bounds(heads, leaf=leaf, least=1 if leaf or integers else 2)
        slots = np.arange(int(counts.max()))
        offsets = pages.view("<u2")[:, 8 : 8 + len(slots)][slots < counts[:, None]].astype(np.int64)
        self._require(((offsets % 2 == 0) & (offsets + _NODE <= self._bytes)).all())
        rows = np.repeat(np.arange(len(numbers)), counts)
        at = rows * self._bytes + offsets
        size_low, size_high, flags, key_sizes = (words[at // 2 + field].astype(np.int64) for field in range(4))
        sizes = size_low | size_high << 16
        self._tiled(at, rows, key_sizes + (np.where(flags & _BIG, 8, sizes) if leaf else 0), upper)
        self._counted[not leaf] += len(numbers)
        self._counted[3] += len(at) if leaf else 0
        high, low = self._keys(memory, at, key_sizes, integers=integers)
        return _Nodes(pages, rows, at, sizes, flags, key_sizes, high, low)

    def _bounds(self, heads: _I64, *, leaf: bool, least: int) -> tuple[_I64, _I64]:
        """How many nodes pages have, and where the first one begins, from headers [p, 8 words]."""
        flags, lower, upper = heads[:, 5], heads[:, 6], heads[:, 7]
        self._require((flags == (_LEAF if leaf else _BRANCH)).all())
        self._require(((lower % 2 == 0) & (lower >= _HEADER + 2 * least)).all())
        self._require(((lower <= upper) & (upper <= self._bytes)).all())
        return (lower - _HEADER) // 2, upper

    def _tiled(self, at: _I64, rows: _I64, sizes: _I64, upper: _I64) -> None:
        """Nodes lie from `upper` to the end of their page, one behind the other."""
        pages = np.arange(len(upper)) * self._bytes
        ends = at + (_NODE + sizes + 1) // 2 * 2
        self._require((ends <= pages[rows] + self._bytes).all())
        begun, ended = (np.zeros(len(upper) * self._bytes // 2 + 1, np.bool_) for _ in range(2))
        begun[at // 2] = begun[(pages + self._bytes) // 2] = True
        ended[ends // 2] = ended[(pages + upper) // 2] = True
        self._require(np.count_nonzero(begun) == len(at) + len(upper) and np.array_equal(begun, ended))

    def _keys(self, memory: NDArray[np.uint8], at: _I64, sizes: _I64, *, integers: bool) -> tuple[_U64, _U64]:
        """The first 16 bytes of keys, as numbers that sort as LMDB sorts them."""
        windows: NDArray[np.void] = np.ndarray(
            (len(memory) // 2 - 3,), "<u8" if integers else ">u8", memory, strides=(2,)
        )
        places = (at + _NODE) // 2
        high = windows[places].astype(np.uint64)
        if integers:
            self._require(((sizes == 0) | (sizes == 8)).all())
            return np.where(sizes == 8, high, np.uint64(0)), np.zeros(len(at), np.uint64)
        self._require((sizes <= _MAX_KEY).all())
        shown = np.minimum(sizes, 16)
        return high & _HIGH[shown], windows[places + 4].astype(np.uint64) & _LOW[shown]

    # ---- data

    def _data(self, nodes: _Nodes, node: int) -> bytes:
        """The data of a node, wherever it lies."""
        _, data = nodes.inline(node)
        if not nodes.flags[node]:
            return data
        self._require(nodes.flags[node] == _BIG)
        size, first = int(nodes.sizes[node]), int.from_bytes(data, "little")
        count = (_HEADER - 1 + size) // self._bytes + 1
        self._require(first + count <= len(self._seen))
        numbers = np.arange(first, first + count)
        self._claim(numbers)
        self._counted[2] += count
        memory = self._read(numbers)[: _HEADER + size].tobytes()
        number, _, flags, pages = _HEAD.unpack_from(memory)
        self._require((number, flags, pages) == (first, _OVERFLOW, count))
        return memory[_HEADER:]

    def _freed(self, data: bytes) -> None:
        """A record of free pages: how many, and which, in descending order."""
        self._require(len(data) >= 8)
        count = int.from_bytes(data[:8], "little")
        self._require(8 + 8 * count <= len(data))
        numbers = np.frombuffer(data, "<i8", count, 8)
        self._require((numbers[1:] < numbers[:-1]).all())
        self._claim(numbers)


def _listed(page: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Key and data of the nodes that a leaf lists; what was deleted may still lie on it, in front of them."""
    lower, upper = struct.unpack_from("<HH", page, 12) if len(page) >= _HEADER else (0, 0)
    for at in memoryview(page)[_HEADER : max(_HEADER, min(lower, upper, len(page)) // 2 * 2)].cast("H"):
        if upper <= at <= len(page) - _NODE:
            size, more, flags, key_size = _NODE_HEAD.unpack_from(page, at)
            middle = at + _NODE + key_size
            if not (more or flags) and middle + size <= len(page):
                yield page[at + _NODE : middle], page[middle : middle + size]
