"""Exchanges: a batch's commands to whichever servers have its keys, and their replies.

All of a batch's commands for one server are sent at once, and their replies received in order: one round trip. Every
command may be repeated, so a connection that turns out to be stale is replaced and the commands sent again.

reply                                        what becomes of it
MOVED, ASK, READONLY, TRYAGAIN               the command goes to the right server, a few times at most
OOM                                          given back: the server is full
WRONGTYPE                                    none: that key is somebody else's
LOADING, CLUSTERDOWN, MASTERDOWN, others     `TierUnavailable`
"""

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvtier.errors import TierTimeout, TierUnavailable
from kvtier.remote.backend import Fetch
from kvtier.remote.counting import Counts
from kvtier.remote.valkey.node import Address, Connection, Node, Refused
from kvtier.remote.valkey.resp import Reply, ReplyError, command
from kvtier.remote.valkey.routing import Router

__all__ = ["Dispatcher", "Exchange", "Gets", "Sets", "Smalls"]

_HOPS = 5
_ATTEMPTS = 3
_WAIT_SECONDS = 0.02
_ASKING = command("ASKING")
_ELSEWHERE = frozenset({"MOVED", "ASK", "READONLY", "TRYAGAIN"})
_REFUSALS = frozenset({"NOAUTH", "NOPERM", "WRONGPASS"})


class Exchange(Protocol):
    """A batch's commands and replies, one per item."""

    def command(self, item: int) -> Sequence[bytes | memoryview]:
        """The command of an item, in pieces."""
        ...

    def reply(self, connection: Connection, item: int, deadline: float) -> Reply:
        """Receive the reply to it."""
        ...


class Smalls:
    """Commands with small replies."""

    def __init__(self, commands: Sequence[bytes]) -> None:
        self._commands = commands

    def command(self, item: int) -> Sequence[bytes | memoryview]:
        """See `Exchange.command`."""
        return (self._commands[item],)

    def reply(self, connection: Connection, item: int, deadline: float) -> Reply:
        """See `Exchange.reply`."""
        return connection.replies.next(deadline)


class Gets(Smalls):
    """Commands whose replies are records, received into the memory of `items`."""

    def __init__(self, commands: Sequence[bytes], items: Sequence[Fetch]) -> None:
        super().__init__(commands)
        self._items = items

    def reply(self, connection: Connection, item: int, deadline: float) -> Reply:
        """See `Exchange.reply`."""
        _, head, body = self._items[item]
        return connection.replies.record(head, body, deadline)


class Sets:
    """Commands that carry records: sent from where they lie."""

    def __init__(self, commands: Sequence[Sequence[bytes | memoryview]]) -> None:
        self._commands = commands

    def command(self, item: int) -> Sequence[bytes | memoryview]:
        """See `Exchange.command`."""
        return self._commands[item]

    def reply(self, connection: Connection, item: int, deadline: float) -> Reply:
        """See `Exchange.reply`."""
        return connection.replies.next(deadline)


class _Group(NamedTuple):
    """Items that go to one server. asking: it does not have their slot for good yet."""

    node: Node
    items: list[int]
    asking: bool


class Dispatcher:
    """Thread-safe.

    Args:
        router: which server has which key.
        counts: where to count.
    """

    def __init__(self, router: Router, counts: Counts) -> None:
        self.router = router
        self._counts = counts

    def run(self, keys: Sequence[bytes], exchange: Exchange, deadline: float) -> list[Reply]:
        """The reply for every key; of errors, only OOM is given back.

        Raises:
            TierUnavailable, TierTimeout: see `Backend`.
        """
        replies: list[Reply] = [None] * len(keys)
        groups = self._by_key(keys, range(len(keys)), deadline)
        for _ in range(_HOPS):
            self._round(groups, exchange, replies, deadline)
            astray = [group for group in groups if any(_code(replies[item]) in _ELSEWHERE for item in group.items)]
            if not astray:
                break
            groups = self._redirected(astray, keys, replies, deadline)
        for at, reply in enumerate(replies):
            if isinstance(reply, ReplyError):
                replies[at] = _kept(reply)
        return replies

    def ask(self, node: Node, commands: Sequence[bytes], deadline: float) -> list[Reply]:
        """The replies of one server to commands without keys. Raises as `run` does."""
        replies: list[Reply] = [None] * len(commands)
        self._round([_Group(node, list(range(len(commands))), asking=False)], Smalls(commands), replies, deadline)
        return [_kept(reply) if isinstance(reply, ReplyError) else reply for reply in replies]

    # ---- one round

    def _by_key(self, keys: Sequence[bytes], items: Sequence[int], deadline: float) -> list[_Group]:
        groups: dict[int, _Group] = {}
        for item in items:
            node = self.router.node(keys[item], deadline)
            groups.setdefault(id(node), _Group(node, [], asking=False)).items.append(item)
        return list(groups.values())

    def _round(self, groups: Sequence[_Group], exchange: Exchange, replies: list[Reply], deadline: float) -> None:
        """Send everything to everybody, then receive: as long as the slowest takes, not as all together."""
        under_way: list[tuple[_Group, Connection]] = []
        try:
            # Not in one expression: what was sent is owed replies, even where the next group fails.
            for group in groups:
                under_way.append((group, self._sent(group, exchange, deadline)))  # noqa: PERF401
            while under_way:
                group, connection = under_way[-1]
                self._received(group, connection, exchange, replies, deadline)
                under_way.pop()
        finally:
            # Whatever owes replies is of no use to anybody else.
            for group, connection in under_way:
                group.node.drop(connection)

    def _sent(self, group: _Group, exchange: Exchange, deadline: float) -> Connection:
        asking = (_ASKING,) if group.asking else ()
        pieces = [piece for item in group.items for piece in (*asking, *exchange.command(item))]
        for attempt in range(_ATTEMPTS):
            connection = group.node.take(deadline)
            try:
                connection.transport.send(pieces, deadline)
            except OSError as error:
                group.node.drop(connection)
                self._lost(group.node, connection, error, last=attempt == _ATTEMPTS - 1)
            else:
                return connection
        raise TierUnavailable(f"{group.node.address}: every connection ended at once")

    def _received(
        self, group: _Group, connection: Connection, exchange: Exchange, replies: list[Reply], deadline: float
    ) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                for item in group.items:
                    if group.asking:
                        connection.replies.next(deadline)
                    replies[item] = exchange.reply(connection, item, deadline)
            except OSError as error:
                group.node.drop(connection)
                self._lost(group.node, connection, error, last=attempt == _ATTEMPTS - 1)
                connection = self._sent(group, exchange, deadline)
            else:
                group.node.give(connection)
                return

    def _lost(self, node: Node, connection: Connection, error: OSError, *, last: bool) -> None:
        """What a connection's end means: nothing, where it had been idle and may have ended long ago."""
        if isinstance(error, TimeoutError):
            raise TierTimeout(f"{node.address}: {error}") from error
        if connection.fresh or last:
            node.failed()
            self.router.doubt()
            raise TierUnavailable(f"{node.address}: {error.strerror or error}") from error
        self._counts.met("retry")
        node.forget()

    # ---- the wrong server

    def _redirected(
        self, groups: Sequence[_Group], keys: Sequence[bytes], replies: Sequence[Reply], deadline: float
    ) -> list[_Group]:
        """Where the items go that these servers do not have."""
        others: list[int] = []
        asking: dict[Address, list[int]] = {}
        pause = False
        for group in groups:
            for item in group.items:
                reply = replies[item]
                code = _code(reply)
                if code not in _ELSEWHERE or not isinstance(reply, ReplyError):
                    continue
                if code == "ASK":
                    asking.setdefault(_address(reply, group.node)[1], []).append(item)
                    continue
                others.append(item)
                if code == "MOVED":
                    self.router.moved(*_address(reply, group.node))
                else:
                    self.router.doubt()
                    pause = True
        self._counts.met("redirect", len(others) + sum(map(len, asking.values())))
        if pause:
            time.sleep(min(_WAIT_SECONDS, max(deadline - time.monotonic(), 0)))
        asked = [_Group(self.router.at(address), items, asking=True) for address, items in asking.items()]
        return [*asked, *self._by_key(keys, others, deadline)]


def _code(reply: Reply) -> str:
    return reply.code if isinstance(reply, ReplyError) else ""


def _address(reply: ReplyError, node: Node) -> tuple[int, Address]:
    """Slot and server of `MOVED 42 10.0.0.1:6379`; a server without a name is the one that said so, at another port."""
    try:
        _, slot, place = reply.split(" ")
        host, _, port = place.rpartition(":")
        return int(slot), Address(host or node.address.host, int(port))
    except ValueError:
        raise TierUnavailable(f"{node.address}: no address in the redirection {reply!r}") from None


def _kept(reply: ReplyError) -> Reply:
    """What remains of an error reply. Raises `TierUnavailable` for one that concerns the whole."""
    if reply.code == "OOM":
        return reply
    if reply.code == "WRONGTYPE":
        return None
    if reply.code in _REFUSALS:
        raise Refused(f"the server refuses: {reply}")
    raise TierUnavailable(f"the server answers: {reply}")
