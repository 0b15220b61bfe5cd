"""The Tier protocol: what host, NVMe and remote memory have in common, and the results they speak in.

One record's life inside a tier:

    absent --reserve--> reserved --write, commit--> ready --acquire--> leased n x
       ^                   |                          |  ^                 |
       +------abort--------+                          |  +----release------+
       +-----------evict, remove, clear---------------+

Batches everywhere, buffers are the caller's, and long work is submit -> `Ticket` -> poll or wait.
A miss, a damaged block and a full tier are statuses; only a tier that fails as a whole raises.
"""

import enum
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import xxhash

from kvtier.errors import TierTimeout
from kvtier.hints import Hint
from kvtier.keys import namespace_digest
from kvtier.layout import Span

__all__ = [
    "OWN_WORK",
    "RECEIVING",
    "USED_ELSEWHERE",
    "AddressableTier",
    "BlockRef",
    "Completions",
    "Done",
    "Exists",
    "Full",
    "Handle",
    "ListingTier",
    "MeteredTier",
    "Owner",
    "RegionShare",
    "Reservation",
    "Status",
    "Ticket",
    "Tier",
    "TierCaps",
    "block_checksum",
    "checksum_head",
    "checksum_heads",
    "completes_run",
    "counted",
    "expired",
    "namespaces_in",
    "record_heads",
]

Owner: TypeAlias = str
"""Who holds a lease: a request, a worker, a job. Everything an owner holds can be ended at once."""

OWN_WORK = "store."
"""Owners that begin with this are the store itself: their leases are no use of a block, and renew no recency."""

RECEIVING: Owner = OWN_WORK + "receiving"
"""Reservations of this owner are memory for bytes on their way: where there is none, no block is dropped for it yet."""

USED_ELSEWHERE: Owner = "used.elsewhere"
"""Leases of this owner renew recency, and are neither hits nor misses."""

_FEW_TICKETS = 64


class BlockRef(NamedTuple):
    """One part of one block, as tiers see it.

    key: store key, 16 bytes. ns: `keys.namespace_index`. depth: position in its chain, 0 first.
    parent: store key of the preceding block, None for depth 0. exact: True only if the bytes, and all
    KV that they were computed from, are lossless. depth -1 means that the parent is unknown.
    """

    key: bytes
    ns: int
    depth: int
    parent: bytes | None
    exact: bool


class Status(enum.Enum):
    """Outcome of one item of a batch."""

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"  # found, failed its checksum: removed, counted, for the caller a miss
    FULL = "full"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class TierCaps:
    """What a tier can do, so that nobody probes with isinstance.

    variable_size: takes formats whose size is known only after encoding. durable: outlives the process.
    shared: other processes may change it. partial_read: can read a range of a block. align: buffers and
    lengths that are multiples of this many bytes move without a copy. remote: to ask it takes round trips of a network.
    probe: seconds that `contains` may take, after which the tier counts as one that gives no answer.
    metered: counts what is written to it, over processes and restarts: it is a `MeteredTier`. listing: can say which
    records it has: it is a `ListingTier`.

    run: blocks per object, 1 but in remote tiers: [k * run, (k + 1) * run) of one chain by depth, named by the last.
    Where it is more than 1, `reserve`, `write` and `commit` take whole runs, parents first, one after the other; the
    keys of one `acquire` are of one chain and end where a run ends; `contains` may know a run by its last key only.
    """

    variable_size: bool = False
    durable: bool = False
    shared: bool = False
    partial_read: bool = False
    align: int = 1
    run: int = 1
    remote: bool = False
    probe: float = 0.05
    metered: bool = False
    listing: bool = False


class RegionShare(NamedTuple):
    """What another process needs to map a memory region; `fd` stays its owner's.

    memory: the owner's mapping, for whoever is in its process; it is not sent.
    """

    region: int
    fd: int
    nbytes: int
    writable: bool
    memory: memoryview | None = None


class Handle:
    """A hold on one record: reserved (its writer's) or leased (a reader's). Made and ended by its tier.

    Tiers subclass it to carry where the bytes lie. `nbytes` is the stored length, `fmt` the format id, `checksum` that
    of a leased record (`block_checksum`), b"" where its tier does not say.
    """

    __slots__ = ("checksum", "fmt", "nbytes", "owner", "ref")

    def __init__(self, ref: BlockRef, nbytes: int, fmt: str, owner: Owner) -> None:
        self.ref = ref
        self.nbytes = nbytes
        self.fmt = fmt
        self.owner = owner
        self.checksum = b""


@dataclass(frozen=True, slots=True)
class Exists:
    """`reserve` found the key already there, at equal or higher fidelity; `ready` False: being written."""

    ready: bool


@dataclass(frozen=True, slots=True)
class Full:
    """`reserve` could not make room, or the block's parent was refused in the same batch."""

    reason: str


Reservation: TypeAlias = Handle | Exists | Full


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """Result of a ticket: one status per item, and for `acquire` a handle for each leading OK."""

    ticket: "Ticket"
    statuses: tuple[Status, ...]
    handles: tuple[Handle, ...] = ()


class Ticket:
    """A submitted batch. Take its result once, by `wait` or through the tier's `poll`."""

    __slots__ = ("__weakref__", "_pending", "_result")

    def __init__(self) -> None:
        # Locked until the result is there: a tenth of the work of an Event, and most tickets are never waited for.
        self._pending = threading.Lock()
        self._pending.acquire()
        # Not a Done, which refers back: a dropped ticket must go at once, and its handles with it.
        self._result: tuple[tuple[Status, ...], tuple[Handle, ...]] | None = None

    @property
    def done(self) -> Done | None:
        """The result, or None while the work is under way. Never blocks."""
        return None if self._result is None else Done(self, *self._result)

    def wait(self, timeout: float | None = None) -> Done:
        """Block until the result is there.

        Raises:
            TierTimeout: `timeout` seconds passed. The work goes on and may still complete.
        """
        limit = -1 if timeout is None else min(max(timeout, 0), threading.TIMEOUT_MAX)
        if self._result is None and self._pending.acquire(timeout=limit):
            self._pending.release()
        done = self.done
        if done is None:
            raise TierTimeout(f"no result within {timeout} s; wait again or abort the operation")
        return done

    def finish(self, statuses: Sequence[Status], handles: Sequence[Handle] = ()) -> "Ticket":
        """Called once, by the tier: publish the result and wake whoever waits."""
        self._result = (tuple(statuses), tuple(handles))
        self._pending.release()
        return self


class Completions:
    """Hands finished tickets to `poll`, in the order of completion; a ticket that nobody kept is dropped. Thread-safe.

    What it remembers is bounded by the tickets that are kept, whether anybody calls `poll` or not.
    """

    def __init__(self) -> None:
        self._finished: deque[weakref.ref[Ticket]] = deque(maxlen=65536)
        self._limit = _FEW_TICKETS
        # A finalizer may end a ticket while this thread is in here.
        self._lock = threading.RLock()

    def finish(self, ticket: Ticket, statuses: Sequence[Status], handles: Sequence[Handle] = ()) -> Ticket:
        """Complete a ticket and queue it for `poll`."""
        ticket.finish(statuses, handles)
        with self._lock:
            self._finished.append(weakref.ref(ticket))
            if len(self._finished) > self._limit:
                self._forget_dropped()
        return ticket

    def _forget_dropped(self) -> None:
        for _ in range(len(self._finished)):
            known = self._finished.popleft()
            if known() is not None:
                self._finished.append(known)
        self._limit = 2 * len(self._finished) + _FEW_TICKETS

    def poll(self) -> list[Done]:
        """Results that became ready since the last call."""
        with self._lock:
            return self._ready()

    def _ready(self) -> list[Done]:
        ready = []
        while self._finished:
            ticket = self._finished.popleft()()
            if ticket is not None and ticket.done is not None:
                ready.append(ticket.done)
        return ready


class Tier(Protocol):
    """A place that keeps blocks. Thread-safe; every verb takes a batch.

    Deadlines are absolute `time.monotonic()` seconds, None for no limit: an item that is not done by then is
    TIMEOUT. Keys of one batch that belong to one chain come in chain order, parents first.

    Invariants:
        1. No reader sees a reserved record; no slot is reused while leased or reserved.
        2. Bytes that fail their checksum are never handed out: CORRUPT, counted, removed.
        3. Occupied bytes never exceed the capacity, at no instant.
        4. A block that is dropped or refused takes its descendants of the same batch with it.
        5. Locks cover state changes only; bytes move outside them.
    """

    name: str
    caps: TierCaps

    def contains(self, keys: Sequence[bytes], deadline: float | None = None, *, exact: bool = False) -> Ticket:
        """OK or MISS per key; `exact`: a record that is not exact is a MISS. Takes no lease and renews no recency."""
        ...

    def acquire(
        self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None, *, exact: bool = False
    ) -> Ticket:
        """Verify and lease the longest leading run that is ready (`exact`: and exact); renews its recency.

        `Done.handles` has one leased handle per leading OK; from the first other status on, all are not OK.
        A tier whose bytes are verified on `read` verifies here that they are still indexed.
        """
        ...

    def read(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """Copy each leased record into its buffer (at least `nbytes` long), verifying its checksum.

        A buffer whose item is not OK holds undefined bytes: never use them. What a longer one has behind `nbytes` may
        be overwritten, up to the next multiple of `TierCaps.align`.
        """
        ...

    def reserve(
        self,
        refs: Sequence[BlockRef],
        sizes: Sequence[int],
        fmts: Sequence[str],
        owner: Owner,
        hints: Sequence[Hint] | None = None,
    ) -> list[Reservation]:
        """Make room for new records, evicting if needed. The record stays invisible until `commit`.

        A record that is there at equal or higher fidelity (exact first, then `formats.fidelity`) is `Exists`; one of
        lower fidelity is replaced at `commit`.
        """
        ...

    def write(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """Copy bytes into reserved records, completely, still invisible. FULL: this medium did not take them.

        What a longer buffer has behind `nbytes` may be stored with it, up to the next multiple of `TierCaps.align`.
        """
        ...

    def commit(self, handles: Sequence[Handle]) -> None:
        """Make written records visible (and end the reservations).

        Raises:
            LeaseError: a handle was never completely written, or is no reservation any more.
        """
        ...

    def abort(self, handles: Sequence[Handle]) -> None:
        """Drop reservations. Idempotent; a handle that was committed is none any more and is left alone."""
        ...

    def release(self, handles: Sequence[Handle]) -> None:
        """End leases.

        Raises:
            LeaseError: a handle was released before.
        """
        ...

    def hint(self, keys: Sequence[bytes], hints: Sequence[Hint]) -> None:
        """Take new hints for records that are here; keys that are absent are ignored. Renews no recency."""
        ...

    def remove(self, keys: Sequence[bytes]) -> Ticket:
        """Drop records and what descends from them: OK, or MISS where nothing was there.

        A leased record becomes invisible at once and is freed with its last lease.
        """
        ...

    def release_owner(self, owner: Owner) -> None:
        """End all leases and reservations of an owner that is gone. Unknown owners hold nothing."""
        ...

    def clear(self, ns: int | Collection[int] | None = None) -> Ticket:
        """Remove every record of a namespace, of several at once, or of all (None). One status.

        See `namespaces_in`.
        """
        ...

    def poll(self) -> list[Done]:
        """Tickets that finished since the last call."""
        ...

    def stats(self) -> dict[str, int]:
        """Counters and gauges: at least blocks, bytes, capacity_bytes, leases, reservations."""
        ...

    def flush(self) -> None:
        """Make everything committed as durable as the tier can."""
        ...

    def close(self) -> None:
        """Finish what is under way and let go of files, memory and threads. Idempotent."""
        ...


class AddressableTier(Tier, Protocol):
    """A tier whose records are memory: device copies and lower tiers read and write them in place."""

    def buffer(self, handle: Handle) -> memoryview:
        """The record's own memory: writable while reserved, read-only while leased. Padded to `caps.align`."""
        ...

    def buffers(self, handles: Sequence[Handle]) -> list[memoryview]:
        """`buffer` of each, in one go."""
        ...

    def seal(self, handles: Sequence[Handle], checksums: Sequence[bytes] | None = None) -> None:
        """The bytes were put in place through `buffer`: checksum them, as `write` would have.

        checksums: those that the bytes had where they came from, b"" for unknown. They are taken as they are: what
        went wrong on the way is found when the record is read.
        """
        ...

    def span(self, handle: Handle) -> Span:
        """Where another process that mapped the regions finds the record."""
        ...

    def regions(self) -> list[RegionShare]:
        """What other processes map to read records in place; never writable."""
        ...


class MeteredTier(Tier, Protocol):
    """A tier that knows how much all its processes wrote, so that they can share a budget (`TierCaps.metered`)."""

    def ahead(self, bytes_per_day: int) -> float:
        """By how many bytes what was committed runs ahead of this budget, which accrues evenly, by wall time.

        From the first call on commits count against it, also those of processes that never call.
        """
        ...


class ListingTier(Tier, Protocol):
    """A tier that can say which records it has (`TierCaps.listing`)."""

    def listed(self, ns: int) -> Iterator[list[bytes]]:
        """Keys of all records of a namespace, in batches, exact or not.

        Those that come and go meanwhile may be missing, and one may come twice. Holds nothing between two batches.
        """
        ...


def block_checksum(ref: BlockRef, fmt: str, data: memoryview | bytes) -> bytes:
    """16-byte xxh3_128 over `checksum_head` and the bytes.

    Bound to the key: intact bytes of another block fail it too.
    """
    digest = xxhash.xxh3_128(checksum_head(ref, fmt))
    digest.update(data)
    return digest.digest()


def checksum_head(ref: BlockRef, fmt: str) -> bytes:
    """What a block's checksum is bound to beside its bytes: key, namespace and format, 64 bytes."""
    return ref.key + _namespace_and_format(ref.ns, fmt)


def record_heads(keys: Sequence[bytes], ns: int, fmt: str) -> list[bytes]:
    """`checksum_head` of each of these keys, of one namespace and format."""
    rest = _namespace_and_format(ns, fmt)
    return [key + rest for key in keys]


def checksum_heads(handles: Sequence[Handle]) -> list[bytes]:
    """`checksum_head` of each handle's record."""
    rest = _namespace_and_format
    return [handle.ref.key + rest(handle.ref.ns, handle.fmt) for handle in handles]


@functools.lru_cache(maxsize=1024)
def _namespace_and_format(ns: int, fmt: str) -> bytes:
    return namespace_digest(ns) + fmt.encode().ljust(16, b"\0")


def completes_run(ref: BlockRef, run: int) -> bool:
    """Whether a run (see `TierCaps.run`) is complete with this block."""
    return run == 1 or ref.depth % run == run - 1


def counted(owner: Owner) -> bool:
    """Whether what an owner leases, or does not find, counts as hits and misses."""
    return owner != USED_ELSEWHERE and not owner.startswith(OWN_WORK)


def namespaces_in(ns: int | Collection[int] | None) -> frozenset[int] | None:
    """What `Tier.clear` is asked for, as a set; None: all."""
    return ns if ns is None else frozenset((ns,) if isinstance(ns, int) else ns)


def expired(deadline: float | None) -> bool:
    """Whether an absolute `time.monotonic()` deadline has passed."""
    return deadline is not None and time.monotonic() >= deadline
