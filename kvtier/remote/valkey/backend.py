"""ValkeyBackend: records as string values of a Valkey or Redis server or cluster.

A record's name there is the prefix and the name that it is given; its value, the envelope and the block's bytes.
"""

import time
from collections.abc import Iterator, Sequence

from kvtier.errors import TierUnavailable
from kvtier.remote.backend import BackendStats, Fetch, Stored, Upload
from kvtier.remote.envelope import ENVELOPE_BYTES, NAME_BYTES
from kvtier.remote.valkey.exchange import Dispatcher, Gets, Sets, Smalls
from kvtier.remote.valkey.node import Node
from kvtier.remote.valkey.resp import Reply, ReplyError, command

__all__ = ["ValkeyBackend"]

_SCANNED = 512
# For one batch of a walk that may take an hour as a whole.
_SCAN_SECONDS = 5.0


class ValkeyBackend:
    """Implements `kvtier.remote.Backend`. Thread-safe.

    Args:
        dispatcher: finds the servers.
        prefix: what the names of all records begin with there.
        ttl: seconds after which the server drops a record; 0: never.
    """

    run = 1

    name = "valkey"
    # Whether it writes to disk is set up there, and mostly it does not.
    durable = False

    def __init__(self, dispatcher: Dispatcher, *, prefix: bytes, ttl: int = 0) -> None:
        self._dispatcher = dispatcher
        self._prefix = prefix
        width = len(prefix) + NAME_BYTES
        self._get = b"*2\r\n$3\r\nGET\r\n$%d\r\n%b" % (width, prefix)
        self._head = b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b" % (width, prefix)
        self._head_end = b"\r\n$1\r\n0\r\n$%d\r\n%d\r\n" % (len(str(ENVELOPE_BYTES - 1)), ENVELOPE_BYTES - 1)
        self._exists = b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b" % (width, prefix)
        self._unlink = b"*2\r\n$6\r\nUNLINK\r\n$%d\r\n%b" % (width, prefix)
        expiry = command("EX", ttl).partition(b"\r\n")[2] if ttl else b""
        words = 5 if ttl else 3
        self._set = b"\r\n$3\r\nSET\r\n$%d\r\n%b" % (width, prefix)
        self._set_words = {False: b"*%d" % words, True: b"*%d" % (words + 1)}
        self._set_end = {False: b"\r\n" + expiry, True: b"\r\n" + expiry + b"$2\r\nNX\r\n"}

    # ---- the verbs

    def exists(self, names: Sequence[bytes], deadline: float) -> list[bool]:
        """See `Backend.exists`; a look-up of this kind does not renew a key's age."""
        return [reply == 1 for reply in self._small(names, self._exists, b"\r\n", deadline)]

    def heads(self, names: Sequence[bytes], deadline: float) -> list[bytes | None]:
        """See `Backend.heads`."""
        replies = self._small(names, self._head, self._head_end, deadline)
        return [reply if isinstance(reply, bytes) and reply else None for reply in replies]

    def remove(self, names: Sequence[bytes], deadline: float) -> list[bool]:
        """See `Backend.remove`."""
        return [reply == 1 for reply in self._small(names, self._unlink, b"\r\n", deadline)]

    def _small(self, names: Sequence[bytes], start: bytes, end: bytes, deadline: float) -> list[Reply]:
        """One command per name, with a small reply."""
        commands = [start + name + end for name in names]
        return self._dispatcher.run(self._keys(names), Smalls(commands), deadline)

    def _keys(self, names: Sequence[bytes]) -> list[bytes]:
        return [self._prefix + name for name in names]

    def get(self, items: Sequence[Fetch], deadline: float) -> list[int | None]:
        """See `Backend.get`."""
        exchange = Gets([self._get + item.name + b"\r\n" for item in items], items)
        replies = self._dispatcher.run(self._keys([item.name for item in items]), exchange, deadline)
        return [reply if isinstance(reply, int) else None for reply in replies]

    def put(self, items: Sequence[Upload], deadline: float) -> list[Stored]:
        """See `Backend.put`."""
        exchange = Sets([self._set_command(item) for item in items])
        replies = self._dispatcher.run(self._keys([item.name for item in items]), exchange, deadline)
        return [_stored(reply) for reply in replies]

    def _set_command(self, item: Upload) -> list[bytes | memoryview]:
        start = b"%b%b%b\r\n$%d\r\n%b" % (
            self._set_words[item.fresh],
            self._set,
            item.name,
            ENVELOPE_BYTES + item.body.nbytes,
            item.head,
        )
        return [start, item.body, self._set_end[item.fresh]]

    # ---- the whole

    def names(self, deadline: float) -> Iterator[list[bytes]]:
        """See `Backend.names`."""
        pattern = b"".join(b"\\%c" % byte if byte in b"*?[]^\\" else b"%c" % byte for byte in self._prefix) + b"*"
        for node in self._dispatcher.router.primaries(deadline):
            cursor = b"0"
            while True:
                limit = min(deadline, time.monotonic() + _SCAN_SECONDS)
                reply = self._ask(node, command("SCAN", cursor, "MATCH", pattern, "COUNT", _SCANNED), limit)
                match reply:
                    case [bytes(cursor), [*keys]]:
                        found = [key[len(self._prefix) :] for key in keys if isinstance(key, bytes)]
                        yield [name for name in found if len(name) == NAME_BYTES]
                    case _:
                        raise TierUnavailable(f"{node.address}: no reply to SCAN: {reply!r}")
                if cursor == b"0":
                    break

    def stats(self, deadline: float) -> BackendStats:
        """See `Backend.stats`. Counts all keys of the servers, and the memory that their data takes."""
        total = BackendStats(0, 0, 0)
        for node in self._dispatcher.router.primaries(deadline):
            blocks = self._ask(node, command("DBSIZE"), deadline)
            info = self._ask(node, command("INFO", "memory"), deadline)
            if not isinstance(blocks, int) or not isinstance(info, bytes):
                raise TierUnavailable(f"{node.address}: no reply to DBSIZE and INFO: {blocks!r}")
            fields = dict(line.split(b":", 1) for line in info.split(b"\r\n") if b":" in line)
            total = BackendStats(
                total.blocks + blocks,
                total.bytes + (int(fields.get(b"used_memory_dataset", 0)) if blocks else 0),
                total.capacity_bytes + int(fields.get(b"maxmemory", 0)),
            )
        return total

    def _ask(self, node: Node, line: bytes, deadline: float) -> Reply:
        (reply,) = self._dispatcher.ask(node, [line], deadline)
        return reply

    def close(self) -> None:
        """See `Backend.close`."""
        self._dispatcher.router.close()


def _stored(reply: Reply) -> Stored:
    if isinstance(reply, ReplyError):
        return Stored.FULL
    return Stored.EXISTS if reply is None else Stored.OK
