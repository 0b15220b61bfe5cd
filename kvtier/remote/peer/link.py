"""Link: one connection to a peer, and how records are read over it: from the socket, or where they lie.

Over a Unix socket the service shares its host memory, if the token allows it: a record is then leased, copied from
where it lies, and released, and only the release says that the bytes were its own.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from kvtier.client.errors import Conflict
from kvtier.client.pipeline import Incoming, Pipeline
from kvtier.client.results import Found
from kvtier.client.shared import SharedMemory
from kvtier.client.transfers import Ask
from kvtier.keys import STORE_KEY_BYTES
from kvtier.remote.backend import Fetch
from kvtier.remote.envelope import ENVELOPE_BYTES
from kvtier.wire.frames import Opcode
from kvtier.wire.messages import Delete, Get, Got, List, Listed, Match
from kvtier.wire.packing import unpack_keys

__all__ = ["Link"]

_Answer = TypeVar("_Answer", bound=msgspec.Struct)

# Small questions that are on their way at a time: their answers fit into a socket's memory.
_UNDER_WAY = 64


class Link:
    """One connection; for one call at a time.

    Args:
        pipeline: the connection.
        deadline: for having memory shared over it.

    Raises:
        ClientError: the service announced memory, and did not share it.
    """

    def __init__(self, pipeline: Pipeline, deadline: float) -> None:
        self.pipeline = pipeline
        shares = pipeline.address.startswith("unix:") and pipeline.welcome.shared
        self._memory = SharedMemory.attach(pipeline, 0, deadline) if shares else None
        self._encoded: set[str] = set()

    def many(
        self, opcode: Opcode, asked: Sequence[Match | Delete], kind: type[_Answer], deadline: float
    ) -> list[_Answer]:
        """Ask small questions, many on their way at a time."""
        pipeline = self.pipeline
        answers: list[_Answer] = []
        for start in range(0, len(asked), _UNDER_WAY):
            some = asked[start : start + _UNDER_WAY]
            turns = deque(pipeline.begin(opcode, message, (), deadline) for message in some)
            try:
                while turns:
                    answers.append(pipeline.finish(turns.popleft(), lambda incoming: incoming.head(kind)))
            finally:
                for turn in turns:
                    pipeline.abandon(turn)
        return answers

    def listed(self, ns: str, deadline: float) -> list[bytes]:
        """Keys of all records, once each."""
        keys: dict[bytes, None] = {}

        def take(incoming: Incoming) -> None:
            while incoming.more:
                keys.update(dict.fromkeys(unpack_keys(incoming.head(Listed).keys, STORE_KEY_BYTES)))

        self.pipeline.finish(self.pipeline.begin(Opcode.LIST, List(ns), (), deadline), take)
        return list(keys)

    def heads(self, ns: str, keys: Sequence[bytes], deadline: float) -> list[bytes | None]:
        """The first bytes of each record, as many as an envelope has; None: it is not there."""
        heads: list[bytes | None] = [None] * len(keys)

        def take(incoming: Incoming) -> None:
            for some in _items(incoming):
                found = [(at, bytearray(min(size, ENVELOPE_BYTES))) for at, size in some]
                incoming.body(*[memoryview(head) for _, head in found])
                for at, head in found:
                    heads[at] = bytes(head)

        def look(at: int, found: Found) -> None:
            heads[at] = bytes(found.data[:ENVELOPE_BYTES])

        if not self._leased(ns, keys, deadline, look):
            self._received(_get(ns, keys, deadline, ENVELOPE_BYTES), deadline, take)
        return heads

    def fill(self, ns: str, wanted: Sequence[Fetch], deadline: float) -> list[int | None]:
        """Records straight into their buffers; bytes that each has behind its envelope, None: it is not there."""
        lengths: list[int | None] = [None] * len(wanted)
        keys = [item.name[:STORE_KEY_BYTES] for item in wanted]

        def take(incoming: Incoming) -> None:
            for some in _items(incoming):
                views: list[memoryview] = []
                for at, size in some:
                    item, length = wanted[at], size - ENVELOPE_BYTES
                    lengths[at] = length
                    fits = length == item.body.nbytes
                    views += (item.head, item.body) if fits else (memoryview(bytearray(size)),)
                incoming.body(*views)

        def copy(at: int, found: Found) -> None:
            item, length = wanted[at], found.data.nbytes - ENVELOPE_BYTES
            lengths[at] = length
            if length == item.body.nbytes:
                item.head[:] = found.data[:ENVELOPE_BYTES]
                # Without the GIL, which slices of memoryviews would keep.
                np.copyto(np.frombuffer(item.body, np.uint8), np.frombuffer(found.data[ENVELOPE_BYTES:], np.uint8))

        if not self._leased(ns, keys, deadline, copy):
            self._received(_get(ns, keys, deadline), deadline, take)
        return lengths

    def _received(self, message: Get, deadline: float, take: Callable[[Incoming], None]) -> None:
        self.pipeline.finish(self.pipeline.begin(Opcode.GET, message, (), deadline), take)

    def _leased(self, ns: str, keys: Sequence[bytes], deadline: float, use: Callable[[int, Found], None]) -> bool:
        """Use records where they lie; False: they cannot be, and are to be read from the socket."""
        memory = self._memory
        if memory is None or ns in self._encoded:
            return False
        places = {key: at for at, key in enumerate(keys)}
        try:
            # The tier verifies what it reads, by what the record says of itself: once is enough.
            ask = Ask(ns, keys, None, lossy=False, each=True, depth=0, deadline=deadline)
            with memory.lease(ask, unchecked=True) as lease:
                for found in lease.blocks:
                    use(places[found.key], found)
        except Conflict:
            # The service keeps them encoded.
            self._encoded.add(ns)
            return False
        return True


def _get(ns: str, keys: Sequence[bytes], deadline: float, limit: int | None = None) -> Get:
    return Get(ns=ns, keys=b"".join(keys), each=True, timeout=max(deadline - time.monotonic(), 1e-3), limit=limit)


def _items(incoming: Incoming) -> Iterator[Sequence[tuple[int, int]]]:
    """Answer by answer, index and whole length of each record; the caller takes their bytes before the next."""
    while incoming.more:
        got = incoming.head(Got)
        yield list(zip(got.at, got.sizes, strict=True))
