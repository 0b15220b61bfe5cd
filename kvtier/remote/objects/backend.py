"""ObjectBackend: runs of records as objects of a bucket or files of a directory, through obstore.

    <url>/<root>/<first byte of the key>/<store key of the run's last block><e or l>

An object is written once, whole, by whoever is first (`create` mode: If-None-Match, or a link that fails), and read by
range, provided that it is still the version that was looked at (If-Match).
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, GenericError, PreconditionError
from obstore.store import ObjectStore

from kvtier.remote.backend import BackendStats, Fetch, Stored, Upload
from kvtier.remote.counting import Counts
from kvtier.remote.envelope import ENVELOPE_BYTES, NAME_BYTES
from kvtier.remote.objects.directory import Directory, Known
from kvtier.remote.objects.packing import Record, pack_table, table_bytes, unpack_table
from kvtier.remote.objects.requests import Requests

__all__ = ["ObjectBackend"]

_FRESH_SECONDS = 0.5
_KNOWN = 1 << 13
_LISTED = 256
# Fewer objects than a store lists at once are counted whenever somebody asks, more only now and then.
_FEW = 1000
_REST = 50
_NO_SPACE = ("os error 28", "os error 122", "507 Insufficient Storage")


class _Damaged(NamedTuple):
    """An object whose table is none."""


class _Piece(NamedTuple):
    """Records that lie side by side in one object; `places`: of the fetches that they are for."""

    known: Known
    records: list[Record]
    places: list[int]


class ObjectBackend:
    """Implements `kvtier.remote.Backend`. Thread-safe.

    Args:
        store: where; closed by nobody.
        name: for errors and threads.
        counts: where is counted what happens to requests.
        root: folder of the objects, of which all have the same run.
        run: records per object.
        durable: what was written outlives a restart of the other side.
        concurrency: requests at a time.
    """

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        counts: Counts,
        *,
        root: str,
        run: int,
        durable: bool = True,
        concurrency: int = 32,
    ) -> None:
        self.name = name
        self.durable = durable
        self.run = run
        self._store = store
        self._root = root
        self._table_bytes = table_bytes(run)
        self._requests = Requests(name, counts, concurrency)
        self._directory = Directory(_KNOWN, _FRESH_SECONDS)
        self._stats = BackendStats(0, 0, 0)
        self._count_again = 0.0

    # ---- looking up

    def exists(self, names: Sequence[bytes], deadline: float) -> list[bool]:
        """See `Backend.exists`. A name that no object seen is known to hold is taken for that of a run."""
        seen = [self._directory.find(name) for name in names]
        stale = [at for at, found in enumerate(seen) if found is None or not self._directory.is_fresh(found[0])]
        lasts = {at: names[at] if (found := seen[at]) is None else found[0].last for at in stale}
        wanted = list(dict.fromkeys(lasts.values()))
        loaded = dict(
            zip(wanted, self._requests.run([partial(self._load, last) for last in wanted], deadline), strict=True)
        )
        # What was seen a moment ago is there.
        there = [True] * len(names)
        for at, last in lasts.items():
            there[at] = _holds(loaded[last], names[at])
        return there

    def heads(self, names: Sequence[bytes], deadline: float) -> list[bytes | None]:
        """See `Backend.heads`. Of runs it is asked for what `exists` or `names` has just read."""
        if self.run == 1:
            self.exists(names, deadline)
        found = self._directory.find_chain(names)
        return [
            self._unseen(name) if place is None else place[1].head for name, place in zip(names, found, strict=True)
        ]

    def _unseen(self, name: bytes) -> bytes | None:
        return b"" if self._directory.is_damaged(name) else None

    async def _load(self, last: bytes) -> Known | _Damaged | None:
        """Read an object's table; None: there is no such object."""
        path = self._path(last)
        try:
            answer = await obstore.get_async(self._store, path, options={"range": (0, self._table_bytes)})
            data, nbytes, tag = bytes(await answer.bytes_async()), answer.meta["size"], answer.meta["e_tag"]
        except FileNotFoundError:
            self._directory.forget(last)
            return None
        except GenericError:
            # An empty object has no such range, and that is no failure of the store.
            if await self._size(path) != 0:
                raise
            data, nbytes, tag = b"", 0, None
        table = unpack_table(last, data, nbytes, self.run)
        if table is None:
            self._directory.damaged(last)
            return _Damaged()
        return self._directory.put(last, table, tag)

    async def _size(self, path: str) -> int | None:
        try:
            return (await obstore.head_async(self._store, path))["size"]
        except FileNotFoundError:
            return None

    # ---- bytes

    def get(self, items: Sequence[Fetch], deadline: float) -> list[int | None]:
        """See `Backend.get`. One copy, from the memory in which the answer arrived."""
        pieces = self._pieces(items)
        answers = self._requests.run([partial(self._fetch, piece) for piece in pieces], deadline)
        lengths: list[int | None] = [None] * len(items)
        for piece, data in zip(pieces, answers, strict=True):
            for at, nbytes in zip(piece.places, _unpacked(piece, data, items), strict=True):
                lengths[at] = nbytes
        return lengths

    def _pieces(self, items: Sequence[Fetch]) -> list[_Piece]:
        pieces: list[_Piece] = []
        for at, place in enumerate(self._directory.find_chain([item.name for item in items])):
            if place is None:
                continue
            known, record = place
            before = pieces[-1] if pieces else None
            if (
                before is not None
                and before.known is known
                and before.records[-1].offset + before.records[-1].nbytes == record.offset
            ):
                before.records.append(record)
                before.places.append(at)
            else:
                pieces.append(_Piece(known, [record], [at]))
        return pieces

    async def _fetch(self, piece: _Piece) -> "obstore.Bytes | _Damaged | None":
        """The bytes of a piece; None: it is not there any more as it was."""
        try:
            return await self._range(piece.known, piece.records)
        except FileNotFoundError:
            self._directory.forget(piece.known.last)
            return None
        except PreconditionError:
            now = await self._load(piece.known.last)
        if not isinstance(now, Known):
            return now
        try:
            return await self._range(now, piece.records) if now.table == piece.known.table else None
        except (FileNotFoundError, PreconditionError):
            return None

    async def _range(self, known: Known, records: Sequence[Record]) -> "obstore.Bytes":
        options: obstore.GetOptions = {"range": (records[0].offset, records[-1].offset + records[-1].nbytes)}
        if known.tag is not None:
            options["if_match"] = known.tag
        answer = await obstore.get_async(self._store, self._path(known.last), options=options)
        return await answer.bytes_async()

    def put(self, items: Sequence[Upload], deadline: float) -> list[Stored]:
        """See `Backend.put`: whole runs, one after the other."""
        runs = [items[at : at + self.run] for at in range(0, len(items), self.run)]
        outcomes = self._requests.run([partial(self._write, run) for run in runs], deadline)
        return [outcome for outcome in outcomes for _ in range(self.run)]

    async def _write(self, run: Sequence[Upload]) -> Stored:
        last = run[-1].name
        sizes = [item.body.nbytes for item in run]
        packed = pack_table([item.name for item in run], [item.head for item in run], sizes)
        try:
            written = await obstore.put_async(
                self._store,
                self._path(last),
                [packed, *(item.body for item in run)],
                mode="create" if run[-1].fresh else "overwrite",
                use_multipart=False,
            )
        except AlreadyExistsError:
            await self._load(last)
            return Stored.EXISTS
        except GenericError as error:
            if any(sign in str(error) for sign in _NO_SPACE):
                return Stored.FULL
            raise
        table = unpack_table(last, packed, len(packed) + sum(sizes), self.run)
        if table is not None:
            self._directory.put(last, table, written["e_tag"])
        return Stored.OK

    # ---- removal

    def remove(self, names: Sequence[bytes], deadline: float) -> list[bool]:
        """See `Backend.remove`. Takes every object known to hold a record, and with it the run's other records."""
        objects = [self._directory.holding(name) or [name] for name in names]
        wanted = list(dict.fromkeys(last for lasts in objects for last in lasts))
        gone = dict(
            zip(wanted, self._requests.run([partial(self._delete, last) for last in wanted], deadline), strict=True)
        )
        return [any(gone[last] for last in lasts) for lasts in objects]

    async def _delete(self, last: bytes) -> bool:
        path = self._path(last)
        self._directory.forget(last)
        # Stores agree to delete what is not there.
        if await self._size(path) is None:
            return False
        try:
            await obstore.delete_async(self._store, path)
        except FileNotFoundError:
            return False
        return True

    # ---- the whole

    def names(self, deadline: float) -> Iterator[list[bytes]]:
        """See `Backend.names`."""
        for lasts, _ in self._listed(deadline):
            loaded = self._requests.run([partial(self._load, last) for last in lasts], deadline)
            names: list[bytes] = []
            for last, known in zip(lasts, loaded, strict=True):
                if isinstance(known, Known):
                    names += [record.name for record in known.table.records]
                elif known is not None:
                    names.append(last)
            yield names

    def _listed(self, deadline: float) -> Iterator[tuple[list[bytes], int]]:
        """The objects' names, in batches, and their bytes; what else lies there is not ours."""
        listing = obstore.list(self._store, self._root, chunk_size=_LISTED)

        async def batch() -> Sequence["obstore.ObjectMeta"]:
            try:
                return await anext(listing)
            except StopAsyncIteration:
                return ()

        while found := self._requests.run([batch], deadline)[0]:
            named = [(name, meta["size"]) for meta in found if (name := _name_in(meta["path"])) is not None]
            yield [name for name, _ in named], sum(nbytes for _, nbytes in named)

    def stats(self, deadline: float) -> BackendStats:
        """See `Backend.stats`: counted by listing; of many objects it may be old."""
        start = time.monotonic()
        if start < self._count_again:
            return self._stats
        objects = total = 0
        for lasts, nbytes in self._listed(deadline):
            objects += len(lasts)
            total += nbytes
        now = time.monotonic()
        self._count_again = now if objects < _FEW else now + _REST * (now - start)
        self._stats = BackendStats(objects * self.run, total - objects * self._table_bytes, 0)
        return self._stats

    def close(self) -> None:
        """See `Backend.close`."""
        self._requests.close()

    def _path(self, last: bytes) -> str:
        key = last[:-1].hex()
        return f"{self._root}/{key[:2]}/{key}{last[-1:].decode()}"


def _holds(loaded: Known | _Damaged | None, name: bytes) -> bool:
    """Whether an object that was just read has a record; a damaged one is taken to."""
    if isinstance(loaded, Known):
        return any(record.name == name for record in loaded.table.records)
    return loaded is not None


def _unpacked(piece: _Piece, data: "obstore.Bytes | _Damaged | None", items: Sequence[Fetch]) -> list[int | None]:
    """Copy a piece to where its records are wanted; their lengths."""
    if data is None:
        return [None] * len(piece.places)
    whole = np.frombuffer(memoryview(b"" if isinstance(data, _Damaged) else data), np.uint8)
    if whole.nbytes != sum(record.nbytes for record in piece.records):
        for at in piece.places:
            items[at].head[:] = bytes(ENVELOPE_BYTES)
        return [0] * len(piece.places)
    offset = 0
    for record, at in zip(piece.records, piece.places, strict=True):
        items[at].head[:] = record.head
        if record.nbytes == items[at].body.nbytes:
            # Without the GIL, unlike a copy between memoryviews.
            np.copyto(np.frombuffer(items[at].body, np.uint8), whole[offset : offset + record.nbytes])
        offset += record.nbytes
    return [record.nbytes for record in piece.records]


def _name_in(path: str) -> bytes | None:
    """The name of the object at a path; None: it is not one of ours."""
    stem = path.rpartition("/")[2]
    try:
        name = bytes.fromhex(stem[:-1]) + stem[-1:].encode()
    except ValueError:
        return None
    return name if len(name) == NAME_BYTES and name[-1:] in b"el" else None
