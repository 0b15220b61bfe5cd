"""One read under way: lease what is there, bring it into host, hand it out in place."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np

from kvtier import formats
from kvtier.errors import LeaseError
from kvtier.service.cache.errors import ServiceError
from kvtier.service.cache.inflight import InFlight
from kvtier.service.cache.namespaces import OpenNamespace
from kvtier.service.cache.reading import Found, InHost, Reading
from kvtier.store import Lease, TieredStore
from kvtier.tiers import Handle, expired

__all__ = ["Read", "ReadRequest"]

_RAW = "raw"


class ReadRequest(NamedTuple):
    """What is asked for.

    Args:
        space: the namespace.
        chain: chain keys.
        parts: of each block.
        owner: who holds what is found.
        lossy: whether blocks that are not exact will do.
        each: whatever is there; False: the leading run.
        deadline: `time.monotonic()` seconds.
        most: bytes, at most.
        depth: of the first key in its chain.
        checked: False: the reader compares what it reads with `Found.guard`.
    """

    space: OpenNamespace
    chain: Sequence[bytes]
    parts: Sequence[int]
    owner: str
    lossy: bool
    each: bool
    deadline: float
    most: int
    depth: int = 0
    checked: bool = True


class _Run:
    """Consecutive blocks of the chain, from `start` on, under one lease."""

    __slots__ = ("lease", "start", "tiers", "whole")

    def __init__(self, start: int) -> None:
        self.start = start
        self.lease: Lease | None = None
        self.tiers: list[str] = []
        self.whole = 0


class Read:
    """Drives one read through the store's threads. Ends as a `Reading`, or lets go of everything.

    Args:
        store: the tenant's.
        inflight: the tenant's.
        request: what is asked for.
        ended: told once that nothing is held any more.
    """

    def __init__(
        self, store: TieredStore, inflight: InFlight, request: ReadRequest, ended: Callable[["Read"], object]
    ) -> None:
        self.future: Future[Reading] = Future()
        self.future.set_running_or_notify_cancel()
        self._store = store
        self._inflight = inflight
        self._request = request
        self._ended = ended
        self._runs: list[_Run] = []
        self._taken = 0
        self._waiting = 0
        self._over = False
        self._reading: Reading | None = None
        self._lock = threading.Lock()

    @property
    def owner(self) -> str:
        """Who reads."""
        return self._request.owner

    def start(self) -> None:
        """Begin. Returns at once, also where a remote tier has to be asked."""
        request = self._request
        if not request.each:
            self._begin([(0, len(request.chain))])
            return
        keys = request.space.keys(request.chain, request.parts)
        located = self._store.whereabouts(keys, lossy=request.lossy, deadline=request.deadline)
        located.add_done_callback(self._located)

    def _located(self, future: "Future[list[str | None]]") -> None:
        with self._attempt():
            names, parts = future.result(), len(self._request.parts)
            there = [None not in names[at : at + parts] for at in range(0, len(names), parts)]
            edges = np.flatnonzero(np.diff([False, *there, False]))
            self._begin([(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)])

    def _begin(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Lease runs [start, stop) of the chain."""
        with self._lock:
            if self._over:
                return
            self._runs = [_Run(start) for start, _ in ranges]
            self._waiting = len(ranges)
        if not ranges:
            self._hand_out()
            return
        for run, (start, stop) in zip(self._runs, ranges, strict=True):
            self._acquire(run, self._request.chain[start:stop])

    def _acquire(self, run: _Run, chain: Sequence[bytes]) -> None:
        request = self._request
        future = self._store.acquire(
            request.space.keys(chain, request.parts),
            request.owner,
            parts=len(request.parts),
            lossy=request.lossy,
            deadline=request.deadline,
            depth=request.depth + run.start,
            checked=request.checked,
        )
        future.add_done_callback(partial(self._acquired, run))

    def _acquired(self, run: _Run, future: "Future[Lease]") -> None:
        with self._attempt():
            if self._keeps(run, future.result()) and self._last():
                self._take()
                self._fetch()

    def _keeps(self, run: _Run, lease: Lease) -> bool:
        """Take a lease over; one that comes after the end is let go."""
        with self._lock:
            over = self._over
            if not over:
                run.lease = lease
                run.tiers = [tier.name for tier, _ in lease.blocks]
        if over:
            self._store.release(lease)
        return not over

    def _take(self) -> None:
        nbytes = sum(self._raw_bytes(run.lease) for run in self._runs if run.lease is not None)
        if nbytes > self._request.most:
            raise ServiceError(
                "too_large",
                f"{nbytes} bytes were found: at most {self._request.most} at a time; ask for fewer blocks",
            )
        self._inflight.take(nbytes)
        with self._lock:
            over = self._over
            self._taken = 0 if over else nbytes
        if over:
            self._inflight.give(nbytes)

    def _raw_bytes(self, lease: Lease) -> int:
        """Of the blocks as they will be handed out; they may lie encoded, several times smaller."""
        sizes = self._request.space.spec.block_bytes
        if not sizes:
            return lease.nbytes(0, len(lease))
        return len(lease) * sum(sizes[part] for part in self._request.parts)

    def _fetch(self) -> None:
        """Bring into host what is not there."""
        away = []
        for run in self._runs:
            if run.lease is None:
                continue
            run.whole = len(run.lease)
            if any(tier is not self._store.host for tier, _ in run.lease.blocks):
                away.append(run)
        self._waiting = len(away)
        if not away:
            self._hand_out()
        for run in away:
            if run.lease is not None:
                fetched = self._store.fetch(run.lease, 0, run.whole, deadline=self._request.deadline)
                fetched.add_done_callback(partial(self._fetched, run))

    def _fetched(self, run: _Run, future: "Future[int]") -> None:
        with self._attempt():
            run.whole = future.result()
            if self._last():
                self._hand_out()

    def _hand_out(self) -> None:
        request = self._request
        if expired(request.deadline):
            raise ServiceError("timeout", "the blocks did not arrive in time: ask again, or allow more time")
        blocks = [found for run in self._runs for found in self._found(run)]
        reading = Reading(blocks, len(blocks) // len(request.parts), self.end)
        with self._lock:
            over = self._over
            self._reading = None if over else reading
        if not over:
            self.future.set_result(reading)

    def _found(self, run: _Run) -> list[Found]:
        if run.lease is None:
            return []
        request, parts, host = self._request, self._request.parts, self._store.host
        handles = [handle for _, handle in run.lease.part(0, run.whole)]
        names = ((at, key, part) for at, key in enumerate(request.chain[run.start :], run.start) for part in parts)
        parents = [handle.ref.parent for handle in handles]
        for place, part in enumerate(parts):
            parents[place :: len(parts)] = request.space.masked(parents[place :: len(parts)], part)
        rows = zip(handles, names, parents, run.tiers, host.buffers(handles), strict=False)
        return [self._one(*row) for row in rows]

    def _one(
        self, handle: Handle, name: tuple[int, bytes, int], parent: bytes | None, tier: str, memory: memoryview
    ) -> Found:
        (_, _, part), ref, data = name, handle.ref, memory[: handle.nbytes]
        layout = None if handle.fmt == _RAW else self._request.space.layout(part)
        if layout is None:
            in_host = InHost(self._store.host, handle)
            return Found(*name, ref, parent, tier, data, in_host)
        if not self._request.checked:
            raise ServiceError("conflict", "these blocks lie encoded in host, and are decoded checked only: get them")
        raw = memoryview(bytearray(layout.block_bytes()))
        formats.get(handle.fmt).decode(data, layout, raw)
        return Found(*name, ref, parent, tier, raw.toreadonly())

    def _last(self) -> bool:
        with self._lock:
            self._waiting -= 1
            return not self._waiting

    def _attempt(self) -> "_Attempt":
        return _Attempt(self)

    def fail(self, error: BaseException) -> None:
        """End it with an error, unless it has ended."""
        if self.end():
            self.future.set_exception(error)

    def abandon(self) -> None:
        """Its owner is gone."""
        with self._lock:
            reading = self._reading
        if reading is None:
            self.fail(LeaseError(f"owner {self._request.owner!r} of this read is gone"))
        else:
            reading.close()

    def end(self) -> bool:
        """Let go of everything, whatever is still under way; whether this call did it."""
        with self._lock:
            if self._over:
                return False
            self._over = True
            taken, self._taken = self._taken, 0
        for run in self._runs:
            if run.lease is not None:
                self._store.release(run.lease)
        self._inflight.give(taken)
        self._ended(self)
        return True


class _Attempt:
    """A step of a read in one of the store's threads: what it raises ends the read."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self._read.fail(error)
        return isinstance(error, Exception)
