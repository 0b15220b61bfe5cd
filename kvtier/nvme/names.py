"""Names: small numbers for namespace digests and format ids, the same for all processes on a directory.

database `names`    `name:`, kind, value -> number u32      and, to find the way back,      `#`, kind, number -> value

Either entry is enough: where one was altered, the other one tells. No other database has entries of this shape.
"""

import struct
from collections.abc import Iterable
from typing import Any, TypeVar, cast

from kvtier.errors import CorruptObject, FormatMismatch
from kvtier.keys import namespace_index
from kvtier.nvme.seals import seal, unseal

__all__ = ["FORMAT", "NAMESPACE", "Names", "names_in"]

FORMAT, NAMESPACE = b"f", b"n"
"""Kinds of names."""

_ID = struct.Struct("<I")
_THERE, _BACK = b"name:", b"#"
_BACK_BYTES = len(_BACK + FORMAT) + _ID.size
_MAX_FORMAT = 255
_REMEMBERED = 1 << 16
_Known = TypeVar("_Known", bytes, int)
_Value = TypeVar("_Value", bytes, int)


class Names:
    """The names of one directory.

    Args:
        db: the database `names`.
    """

    __slots__ = ("_db", "_digests", "_formats", "_ids")

    def __init__(self, db: Any) -> None:
        self._db = db
        # Committed ids never change, so they are remembered, as many as are of use; those of a transaction under way
        # are not. Digests, not this process's indices: those change when a namespace is forgotten and comes again.
        self._ids: dict[bytes, int] = {}
        self._formats: dict[int, str] = {}
        self._digests: dict[int, bytes] = {}

    def every(self, txn: Any) -> dict[tuple[bytes, int], bytes]:
        """Kind and number of every name, and its value; reads them all."""
        with txn.cursor(self._db) as cursor:
            return names_in((key, value) for key, data in cursor if (value := unseal(key, data)) is not None)

    def put(self, txn: Any, kind: bytes, number: int, value: bytes) -> None:
        """Give a name a number, in a write transaction."""
        packed = _ID.pack(number)
        for key, data in ((_THERE + kind + value, packed), (_BACK + kind + packed, value)):
            txn.put(key, seal(key, data), db=self._db)

    def intern(self, txn: Any, kind: bytes, value: bytes, fresh: set[bytes]) -> int:
        """The number of a name, given to it now if it has none.

        Args:
            txn: a write transaction.
            kind: of the name.
            value: the name.
            fresh: names that this transaction has given a number; they are known to it only.

        Raises:
            FormatMismatch: a record has no room for the number of one more format.
        """
        name = _THERE + kind + value
        known = self._ids.get(name)
        if known is not None:
            return known
        data = txn.get(name, db=self._db)
        packed = None if data is None else unseal(name, data)
        if packed is not None:
            number = cast(int, _ID.unpack(packed)[0])
            if name not in fresh:
                _remember(self._ids, name, number)
            return number
        numbers = {number: known for (of, number), known in self.every(txn).items() if of == kind}
        free = max(numbers, default=-1) + 1
        number = next((number for number, known in numbers.items() if known == value), free)
        if kind == FORMAT and number > _MAX_FORMAT:
            raise FormatMismatch(f"format {value!r}: the directory knows {number} others already; use a fresh one")
        self.put(txn, kind, number, value)
        fresh.add(name)
        return number

    def format(self, txn: Any, number: int) -> str:
        """The format id behind a committed number."""
        known = self._formats.get(number)
        if known is None:
            known = self._formats[number] = self._value(txn, FORMAT, number).decode()
        return known

    def namespace(self, txn: Any, number: int) -> int:
        """This process's index of the namespace behind a committed number."""
        known = self._digests.get(number)
        if known is None:
            known = self._value(txn, NAMESPACE, number)
            _remember(self._digests, number, known)
        return namespace_index(known)

    def digests(self, txn: Any) -> dict[int, bytes]:
        """The digests of all namespaces that have a committed number, by that."""
        return {number: value for (kind, number), value in self.every(txn).items() if kind == NAMESPACE}

    def _value(self, txn: Any, kind: bytes, number: int) -> bytes:
        key = _BACK + kind + _ID.pack(number)
        data = txn.get(key, db=self._db)
        value = None if data is None else unseal(key, data)
        if value is None:
            value = self.every(txn).get((kind, number))
        if value is None:
            raise CorruptObject(f"nothing has the number {number} that a record refers to")
        return value


def names_in(entries: Iterable[tuple[bytes, bytes]]) -> dict[tuple[bytes, int], bytes]:
    """Kind and number of the names among these entries, and their values."""
    found: dict[tuple[bytes, int], bytes] = {}
    for key, value in entries:
        # Page numbers of other databases are shorter, and may begin like this.
        if key.startswith(_BACK) and len(key) == _BACK_BYTES:
            found[key[1:2], cast(int, _ID.unpack(key[2:])[0])] = value
        elif key.startswith(_THERE):
            found[key[len(_THERE) : len(_THERE) + 1], cast(int, _ID.unpack(value)[0])] = key[len(_THERE) + 1 :]
    return found


def _remember(known: dict[_Known, _Value], name: _Known, value: _Value) -> None:
    if len(known) >= _REMEMBERED:
        known.clear()
    known[name] = value
