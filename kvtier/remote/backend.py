"""What a remote tier is built on: a store of named records somewhere else, reached by blocking calls.

A record is an envelope of `envelope.ENVELOPE_BYTES` bytes and the block's bytes behind it, written and replaced as
one. Names are `envelope.NAME_BYTES` bytes (`envelope.record_name`); where and under which prefix a backend keeps them
is its own business.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["Backend", "BackendStats", "Fetch", "Stored", "Upload"]


class Fetch(NamedTuple):
    """One record to read: its envelope goes to `head` (`ENVELOPE_BYTES` bytes), what is behind it to `body`."""

    name: bytes
    head: memoryview
    body: memoryview


class Upload(NamedTuple):
    """One record to write. `fresh`: only if there is none of that name, so that the first writer wins."""

    name: bytes
    head: bytes
    body: memoryview
    fresh: bool


class Stored(enum.Enum):
    """What became of an upload."""

    OK = "ok"
    EXISTS = "exists"  # fresh, and somebody was first
    FULL = "full"


@dataclass(frozen=True, slots=True)
class BackendStats:
    """Of the whole store, whoever wrote it. capacity_bytes: 0 where nobody knows a limit."""

    blocks: int
    bytes: int
    capacity_bytes: int


class Backend(Protocol):
    """Thread-safe; every call is one batch that blocks, without the GIL, until its answers are there.

    Deadlines are absolute `time.monotonic()` seconds. A call is over at its deadline whatever the other side does, and
    writes to no buffer afterwards. Each call may be repeated: whatever it did before failing does no harm.

    Every verb raises for the batch as a whole, and only:
        TierUnavailable: the other side cannot be reached, or refuses; said at once while it was so a moment ago.
        TierTimeout: no answer by the deadline, or none for as long as the backend waits for a sign of life.

    Where `run` is more than 1, `put` gets whole runs, and `exists` is asked for the last records of runs before `heads`
    or `get` are for others; those of runs that were not there are absent. `remove` takes a record's whole run with it.

    Attributes:
        name: for errors and threads.
        durable: what was written outlives a restart of the other side.
        run: blocks per object, see `TierCaps.run`.
    """

    name: str
    durable: bool
    run: int

    def exists(self, names: Sequence[bytes], deadline: float) -> list[bool]:
        """Which records are there; renews nobody's recency where that can be had."""
        ...

    def heads(self, names: Sequence[bytes], deadline: float) -> list[bytes | None]:
        """The envelope of each record, or whatever bytes it has fewer; None: there is no such record."""
        ...

    def get(self, items: Sequence[Fetch], deadline: float) -> list[int | None]:
        """Read records straight into their buffers; bytes that each has behind its envelope, None: absent.

        Where that is not `body.nbytes`, or the batch raised, `body` holds undefined bytes; where it is negative, the
        record is shorter than an envelope.
        """
        ...

    def put(self, items: Sequence[Upload], deadline: float) -> list[Stored]:
        """Write records, each all or nothing. The buffers must stay as they are until this returns."""
        ...

    def remove(self, names: Sequence[bytes], deadline: float) -> list[bool]:
        """Remove records; which of them were there."""
        ...

    def names(self, deadline: float) -> Iterator[list[bytes]]:
        """All records, in batches; those that come and go meanwhile may be missing, and one may come twice."""
        ...

    def stats(self, deadline: float) -> BackendStats:
        """How full the other side is."""
        ...

    def close(self) -> None:
        """Let go of connections; calls under way fail with `TierUnavailable`. Idempotent."""
        ...
