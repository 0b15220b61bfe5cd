"""Which server has which key: one server for all, or a cluster's slots."""

import binascii
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvtier.errors import TierError, TierUnavailable
from kvtier.remote.valkey.node import Address, Node, Refused
from kvtier.remote.valkey.resp import Reply, ReplyError, command

__all__ = ["ClusterRouter", "Router", "SingleRouter", "slot_of"]

SLOTS = 16384
_log = logging.getLogger(__name__)
_REFRESH_SECONDS = 1.0


class Router(Protocol):
    """Thread-safe."""

    def node(self, key: bytes, deadline: float) -> Node:
        """The server of a key. Raises `TierUnavailable` or `TierTimeout` where that cannot be found out."""
        ...

    def moved(self, slot: int, address: Address) -> None:
        """A server said that another one has this slot now."""
        ...

    def doubt(self) -> None:
        """A server could not be reached, or is not what it was: ask again who has what, soon."""
        ...

    def at(self, address: Address) -> Node:
        """The server at an address."""
        ...

    def primaries(self, deadline: float) -> list[Node]:
        """Every server that has keys of its own."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


def slot_of(key: bytes) -> int:
    """The cluster slot of a key: CRC-16 (XMODEM) of what is in its first braces, or of all of it."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1) if start >= 0 else -1
    return binascii.crc_hqx(key[start + 1 : end] if end > start + 1 else key, 0) % SLOTS


class SingleRouter:
    """One server has everything."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def node(self, key: bytes, deadline: float) -> Node:
        """See `Router.node`."""
        return self._node

    def moved(self, slot: int, address: Address) -> None:
        """See `Router.moved`. Raises `Refused`: this server is part of a cluster."""
        raise Refused(f"{self._node.address} is part of a cluster: use valkey+cluster:// (with TLS valkeys+cluster://)")

    def doubt(self) -> None:
        """See `Router.doubt`."""

    def at(self, address: Address) -> Node:
        """See `Router.at`."""
        return self._node

    def primaries(self, deadline: float) -> list[Node]:
        """See `Router.primaries`."""
        return [self._node]

    def close(self) -> None:
        """See `Router.close`."""
        self._node.close()


class ClusterRouter:
    """The slots of a cluster, asked for when they are first needed, and again when they may have changed.

    Args:
        seeds: some of its servers.
        make: a node for an address.
    """

    def __init__(self, seeds: Sequence[Address], make: Callable[[Address], Node]) -> None:
        self._seeds = tuple(seeds)
        self._make = make
        self._lock = threading.Lock()
        self._nodes: dict[Address, Node] = {}
        self._slots: list[Address | None] = [None] * SLOTS
        self._doubtful = True
        self._next_refresh = 0.0

    def node(self, key: bytes, deadline: float) -> Node:
        """See `Router.node`."""
        self._refresh(deadline)
        address = self._slots[slot_of(key)]
        if address is None:
            raise TierUnavailable(f"no server of the cluster at {self._seeds[0]} has slot {slot_of(key)}")
        return self.at(address)

    def moved(self, slot: int, address: Address) -> None:
        """See `Router.moved`."""
        self._slots[slot % SLOTS] = address
        self.doubt()

    def doubt(self) -> None:
        """See `Router.doubt`."""
        self._doubtful = True

    def at(self, address: Address) -> Node:
        """See `Router.at`."""
        with self._lock:
            found = self._nodes.get(address)
            if found is None:
                found = self._nodes[address] = self._make(address)
            return found

    def primaries(self, deadline: float) -> list[Node]:
        """See `Router.primaries`."""
        self._refresh(deadline)
        addresses = dict.fromkeys(address for address in self._slots if address is not None)
        if not addresses:
            raise TierUnavailable(f"the cluster at {self._seeds[0]} does not say which server has what")
        return [self.at(address) for address in addresses]

    def close(self) -> None:
        """See `Router.close`."""
        with self._lock:
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()

    def _refresh(self, deadline: float) -> None:
        """Ask who has what, if that is in doubt; one thread at a time, and not more often than every second."""
        if not self._doubtful:
            return
        with self._lock:
            now = time.monotonic()
            if now < self._next_refresh:
                return
            self._next_refresh = now + _REFRESH_SECONDS
        known = dict.fromkeys([*(address for address in self._slots if address is not None), *self._seeds])
        for address in known:
            try:
                self._slots = self._asked(self.at(address), deadline)
            except Refused:
                raise
            except TierError as error:
                _log.debug("no map of the cluster from %s: %s", address, error)
            else:
                self._doubtful = False
                return

    @staticmethod
    def _asked(node: Node, deadline: float) -> list[Address | None]:
        connection = node.take(deadline)
        try:
            (reply,) = connection.ask([command("CLUSTER", "SLOTS")], deadline)
        except OSError as error:
            node.drop(connection)
            raise TierUnavailable(f"{node.address}: {error}") from error
        node.give(connection)
        if isinstance(reply, ReplyError):
            raise Refused(f"{node.address} is no part of a cluster, use valkey:// (with TLS valkeys://): {reply}")
        if not isinstance(reply, list):
            raise TierUnavailable(f"{node.address}: no map of a cluster: {reply!r}")
        slots: list[Address | None] = [None] * SLOTS
        for start, stop, address in _ranges(reply, node.address):
            slots[start : stop + 1] = [address] * (stop + 1 - start)
        return slots


def _ranges(reply: Iterable[Reply], asked: Address) -> Iterable[tuple[int, int, Address]]:
    """Slot ranges and their primaries, from the reply to CLUSTER SLOTS."""
    for entry in reply:
        match entry:
            case [int(start), int(stop), [host, int(port), *_], *_] if 0 <= start <= stop < SLOTS:
                # A server that does not know its own name means the one that it was asked by.
                name = host.decode() if isinstance(host, bytes) and host not in (b"", b"?") else asked.host
                yield start, stop, Address(name, port)
            case _:
                raise TierUnavailable(f"{asked}: CLUSTER SLOTS names no slots: {entry!r}")
