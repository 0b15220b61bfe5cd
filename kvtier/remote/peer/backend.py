"""PeerBackend: records as blocks of a cache service, over its data port.

A record is one opaque block: its envelope, and what is behind it. The service keeps exact records in one namespace and
the others in a second, both named by the digest of the tier's prefix, so that all who share a prefix share blocks; it
salts them for its tenant and moves them between its own tiers. What it knows of a chain (parent and depth) is what the
envelope says: it evicts the deepest first, as the store that wrote them would.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from kvtier.client.errors import Busy, NotFound, QuotaExceeded, Refused, TooLarge
from kvtier.errors import TierUnavailable
from kvtier.keys import STORE_KEY_BYTES
from kvtier.remote.backend import BackendStats, Fetch, Stored, Upload
from kvtier.remote.envelope import ENVELOPE_BYTES, record_name, unpack
from kvtier.remote.peer.connections import Connections
from kvtier.remote.peer.link import Link
from kvtier.wire.frames import Opcode
from kvtier.wire.messages import (
    Create,
    Delete,
    Deleted,
    Match,
    Matched,
    NamespacesAnswer,
    Outcomes,
    Put,
    Stats,
    StatsAnswer,
)
from kvtier.wire.packing import unpack_runs

__all__ = ["PeerBackend"]

_T = TypeVar("_T")

_EXACT = record_name(b"", exact=True)
_NO_PARENT = bytes(STORE_KEY_BYTES)
# A list of all records comes at once. To tell the envelopes of some of them the service brings these to host memory.
_LIST_SECONDS = 60.0
_LISTED = 64
_STORED = {"stored": Stored.OK, "exists": Stored.EXISTS, "dropped": Stored.FULL}


class PeerBackend:
    """Implements `kvtier.remote.Backend` over a cache service. Thread-safe.

    Args:
        connections: to the service.
        prefix: the tier's; services keep the records of each prefix apart.
    """

    durable = False  # the service knows
    run = 1

    def __init__(self, connections: Connections, prefix: str) -> None:
        self.name = f"peer {connections.peer.address}"
        self._connections = connections
        self._namespaces = {record_name(b"", exact=exact): _namespace(prefix, exact) for exact in (True, False)}

    # ---- looking up

    def exists(self, names: Sequence[bytes], deadline: float) -> list[bool]:
        """See `Backend.exists`. Renews nobody's recency."""
        return self._by_class(names, lambda ns, some: self._present(ns, some, deadline), absent=False)

    def _present(self, ns: str, names: Sequence[bytes], deadline: float) -> list[bool]:
        # One by one, all on their way at once: of several, the service tells a leading run, and takes holes for none.
        asked = [Match(ns, key) for key in _keys(names)]
        found = self._asked(
            lambda link: link.many(Opcode.MATCH, asked, Matched, deadline), [Matched([])] * len(names), deadline
        )
        return [bool(one.tiers) for one in found]

    def heads(self, names: Sequence[bytes], deadline: float) -> list[bytes | None]:
        """See `Backend.heads`. The service brings the records to its host memory, where `get` finds them."""

        def look(ns: str, some: Sequence[bytes]) -> list[bytes | None]:
            return self._asked(lambda link: link.heads(ns, _keys(some), deadline), [None] * len(some), deadline)

        return self._by_class(names, look, absent=None)

    # ---- bytes

    def get(self, items: Sequence[Fetch], deadline: float) -> list[int | None]:
        """See `Backend.get`."""
        fetches = {item.name: item for item in items}

        def fetch(ns: str, names: Sequence[bytes]) -> list[int | None]:
            wanted = [fetches[name] for name in names]
            return self._asked(lambda link: link.fill(ns, wanted, deadline), [None] * len(names), deadline)

        return self._by_class([item.name for item in items], fetch, absent=None)

    def put(self, items: Sequence[Upload], deadline: float) -> list[Stored]:
        """See `Backend.put`."""
        uploads = {item.name: item for item in items}

        def store(ns: str, names: Sequence[bytes]) -> list[Stored]:
            return self._stored(ns, [uploads[name] for name in names], deadline)

        return self._by_class([item.name for item in items], store, absent=Stored.FULL)

    def _stored(self, ns: str, items: Sequence[Upload], deadline: float) -> list[Stored]:
        replacing = [item for item in items if not item.fresh]
        if replacing:
            # The service keeps what it has. Between the two, readers miss.
            self.remove([item.name for item in replacing], deadline)
        try:
            outcomes = self._within(ns, partial(_put, ns, items, deadline), deadline)
        except (Busy, QuotaExceeded, TooLarge):
            return [Stored.FULL] * len(items)
        except Refused as error:
            raise TierUnavailable(f"{self.name} refuses a put: {error}") from error
        return [_STORED[outcome] for outcome in unpack_runs(outcomes.outcomes)]

    def remove(self, names: Sequence[bytes], deadline: float) -> list[bool]:
        """See `Backend.remove`. What descends from them goes with them."""

        def drop(ns: str, some: Sequence[bytes]) -> list[bool]:
            # Children first, so that each is told to have been there.
            asked = [Delete(ns, key) for key in reversed(_keys(some))]
            answers = self._asked(
                lambda link: link.many(Opcode.DELETE, asked, Deleted, deadline), [Deleted(0)] * len(some), deadline
            )
            return [bool(answer.deleted) for answer in reversed(answers)]

        return self._by_class(names, drop, absent=False)

    # ---- the whole

    def names(self, deadline: float) -> Iterator[list[bytes]]:
        """See `Backend.names`."""
        for kind, ns in self._namespaces.items():
            limit = min(deadline, time.monotonic() + _LIST_SECONDS)
            keys = self._asked(partial(Link.listed, ns=ns, deadline=limit), [], limit)
            for start in range(0, len(keys), _LISTED):
                yield [key + kind for key in keys[start : start + _LISTED]]

    def stats(self, deadline: float) -> BackendStats:
        """See `Backend.stats`: of the token's tenant, all of its tiers together."""
        try:
            answer = self._connections.run(
                lambda link: link.pipeline.call(Opcode.STATS, Stats(), StatsAnswer, deadline), deadline
            )
        except Refused as error:
            raise TierUnavailable(f"{self.name} refuses its figures: {error}") from error
        tenants = answer.stats["tenants"]
        tiers = [tenant["tiers"][tier] for tenant in tenants for tier in tenant["quotas"] if tier in tenant["tiers"]]
        return BackendStats(
            sum(tier["blocks"] for tier in tiers),
            sum(tier["bytes"] for tier in tiers),
            sum(tier["capacity_bytes"] for tier in tiers),
        )

    def close(self) -> None:
        """See `Backend.close`."""
        self._connections.close()

    # ---- the service's namespaces

    def _by_class(
        self, names: Sequence[bytes], call: Callable[[str, Sequence[bytes]], Sequence[_T]], absent: _T
    ) -> list[_T]:
        """One call for the exact names and one for the others; answers in the order of `names`."""
        answers: dict[bytes, _T] = {}
        for kind, ns in self._namespaces.items():
            some = list(dict.fromkeys(name for name in names if name[STORE_KEY_BYTES:] == kind))
            if some:
                answers.update(zip(some, call(ns, some), strict=True))
        return [answers.get(name, absent) for name in names]

    def _asked(self, call: Callable[[Link], list[_T]], absent: list[_T], deadline: float) -> list[_T]:
        """What the service answers; `absent` where it has no such namespace: nobody wrote there yet."""
        try:
            return self._connections.run(call, deadline)
        except NotFound:
            return absent
        except Refused as error:
            raise TierUnavailable(f"{self.name}: {error}") from error

    def _within(self, ns: str, call: Callable[[Link], _T], deadline: float) -> _T:
        """A call that needs the namespace: it is made where there is none, also anew after a service lost it."""
        try:
            return self._connections.run(call, deadline)
        except NotFound:
            made = Create(ns)
            self._connections.run(
                lambda link: link.pipeline.call(Opcode.CREATE, made, NamespacesAnswer, deadline), deadline
            )
            return self._connections.run(call, deadline)


def _namespace(prefix: str, exact: bool) -> str:  # noqa: FBT001
    digest = hashlib.sha256(b"kvtier.peer.1\0" + prefix.encode()).hexdigest()[:16]
    return f"tier.{digest}.{'exact' if exact else 'lossy'}"


def _keys(names: Sequence[bytes]) -> list[bytes]:
    return [name[:STORE_KEY_BYTES] for name in names]


def _put(ns: str, items: Sequence[Upload], deadline: float, link: Link) -> Outcomes:
    refs = [_chained(item) for item in items]
    message = Put(
        ns=ns,
        keys=b"".join([item.name[:STORE_KEY_BYTES] for item in items]),
        sizes=[ENVELOPE_BYTES + item.body.nbytes for item in items],
        depths=[depth for depth, _ in refs],
        parents=b"".join([parent for _, parent in refs]),
        timeout=max(deadline - time.monotonic(), 1e-3),
    )
    body = [view for item in items for view in (memoryview(item.head), item.body)]
    turn = link.pipeline.begin(Opcode.PUT, message, body, deadline)
    return link.pipeline.finish(turn, lambda incoming: incoming.head(Outcomes))


def _chained(item: Upload) -> tuple[int, bytes]:
    """Depth and parent as the service is told them.

    The parent of an exact block is exact, too, and thus in the same namespace; that of another may not be.
    """
    envelope = unpack(item.name, item.head)
    if envelope is None or item.name[STORE_KEY_BYTES:] != _EXACT:
        return -1, _NO_PARENT
    return envelope.ref.depth, envelope.ref.parent or _NO_PARENT
