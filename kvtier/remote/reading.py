"""Reading: from keys to leases to verified bytes.

Look-ups run in the caller's thread and cost one round trip. What was found and is gone when it is read is a plain
miss; what is damaged is removed.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from kvtier.errors import KVTierError, TierTimeout
from kvtier.native.checksum import copy_checksums
from kvtier.remote.backend import Fetch
from kvtier.remote.batches import Batch, check_buffers, sizes_by_run
from kvtier.remote.envelope import ENVELOPE_BYTES, Envelope, record_name, unpack
from kvtier.remote.holds import RemoteHandle
from kvtier.remote.state import State
from kvtier.tiers import Handle, Owner, Status, Ticket, checksum_heads, counted, expired

__all__ = ["Reader"]

_T = TypeVar("_T")
_LOOKUPS = 512


class _Found(NamedTuple):
    """A record that a look-up found; envelope None: damaged."""

    name: bytes
    head: bytes
    envelope: Envelope | None


class Reader:
    """The reading verbs of `kvtier.tiers.Tier`. Thread-safe."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._backend = state.backend
        self._counts = state.counts

    # ---- looking up

    def contains(self, keys: Sequence[bytes], deadline: float | None = None, *, exact: bool = False) -> Ticket:
        """See `Tier.contains`."""
        self._state.require_open()
        if expired(deadline):
            return self._finish([Status.TIMEOUT] * len(keys))

        def ask(names: Sequence[bytes]) -> list[bool]:
            return self._backend.exists(names, self._state.movers.limit(deadline))

        try:
            found = self._asked(_names(keys, exact=exact), ask, absent=False)
        except TierTimeout:
            self._counts.met("timeout")
            return self._finish([Status.TIMEOUT] * len(keys))
        present = [any(found[name] for name in _names([key], exact=exact)) for key in keys]
        return self._finish([Status.OK if here else Status.MISS for here in present])

    def acquire(
        self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None, *, exact: bool = False
    ) -> Ticket:
        """See `Tier.acquire`. Verifies that the blocks are there; `read` verifies their bytes."""
        self._state.require_open()
        if expired(deadline):
            return self._finish([Status.TIMEOUT] * len(keys))
        handles: list[RemoteHandle] = []
        status = Status.MISS
        try:
            with self._counts.timed("acquire"):
                for batch in _batches(keys, self._backend.run):
                    found, status = self._run(batch, deadline, exact=exact)
                    leased = self._lease(found, owner)
                    handles += leased
                    if len(leased) < len(found):
                        # Somebody in this process removed one meanwhile.
                        status = Status.MISS
                    if len(leased) < len(batch):
                        break
        except TierTimeout:
            self._counts.met("timeout")
            status = Status.TIMEOUT
        except BaseException:
            self.release(handles)
            raise
        if counted(owner):
            self._counts.looked_up(len(handles), len(keys) - len(handles))
        rest = [status] * (len(keys) - len(handles))
        return self._state.completions.finish(Ticket(), [Status.OK] * len(handles) + rest, handles)

    def _run(self, keys: Sequence[bytes], deadline: float | None, *, exact: bool) -> tuple[list[_Found], Status]:
        """The leading run of records, and why it ended."""

        def ask(names: Sequence[bytes]) -> list[bytes | None]:
            return self._backend.heads(names, self._state.movers.limit(deadline))

        status, in_runs = Status.OK, self._backend.run > 1
        if in_runs:
            keys, status = self._in_runs(keys, deadline, exact=exact)
        heads = self._asked(_names(keys, exact=exact), ask, absent=None, certain=in_runs)
        run: list[_Found] = []
        for key in keys:
            found = self._best(key, heads, deadline, exact=exact)
            if isinstance(found, Status):
                return run, found
            run.append(found)
        return run, status

    def _in_runs(self, keys: Sequence[bytes], deadline: float | None, *, exact: bool) -> tuple[Sequence[bytes], Status]:
        """The leading ones of `keys`, which end where a run ends, whose runs are there, and why no more."""
        run = self._backend.run

        def ask(names: Sequence[bytes]) -> list[bytes | None]:
            limit = self._state.movers.limit(deadline)
            self._backend.exists(names, limit)
            return self._backend.heads(names, limit)

        ends = range((len(keys) - 1) % run, len(keys), run)
        heads = self._asked(_names([keys[end] for end in ends], exact=exact), ask, absent=None)
        for end in ends:
            found = self._best(keys[end], heads, deadline, exact=exact)
            if isinstance(found, Status):
                return keys[: max(end - run + 1, 0)], found
        return keys, Status.OK

    def _best(
        self, key: bytes, heads: Mapping[bytes, bytes | None], deadline: float | None, *, exact: bool
    ) -> _Found | Status:
        """A block's best sound record, or why there is none; damaged ones are removed."""
        records = [
            _Found(name, head, unpack(name, head))
            for name in _names([key], exact=exact)
            if (head := heads[name]) is not None
        ]
        damaged = [record.name for record in records if record.envelope is None]
        self._discard(damaged, self._state.movers.limit(deadline))
        sound = next((record for record in records if record.envelope is not None), None)
        return sound or (Status.CORRUPT if damaged else Status.MISS)

    def _asked(
        self,
        names: Sequence[bytes],
        ask: Callable[[Sequence[bytes]], Sequence[_T]],
        absent: _T,
        *,
        certain: bool = False,
    ) -> dict[bytes, _T]:
        """The answer for each name; not asked for what must not be seen or, unless `certain`, was absent lately."""
        state = self._state
        stamp = state.absent.stamp
        with state.lock:
            visible = [name for name in names if not state.holds.hides(name)]
        wanted = visible if certain else [name for name in visible if name not in state.absent]
        self._counts.met("negative", len(visible) - len(wanted))
        answers = dict.fromkeys(names, absent)
        if wanted:
            answers |= zip(wanted, ask(wanted), strict=True)
            state.absent.add([name for name in wanted if not answers[name]], stamp)
        return answers

    def _lease(self, found: Iterable[_Found], owner: Owner) -> list[RemoteHandle]:
        """Lease what this process may still see."""
        handles: list[RemoteHandle] = []
        with self._state.lock:
            self._state.holds.require_open()
            for name, head, envelope in found:
                if envelope is None or self._state.holds.hides(name):
                    break
                handles.append(RemoteHandle(name, envelope, owner, head))
            self._state.holds.lease(handles)
        return handles

    def _finish(self, statuses: Sequence[Status]) -> Ticket:
        return self._state.completions.finish(Ticket(), statuses)

    # ---- bytes

    def read(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """See `Tier.read`. The buffers are the tier's until the ticket is done, and nobody writes to them later."""
        check_buffers(items, writable=True)
        state = self._state
        with state.lock:
            state.holds.require_open()
            handles = state.holds.require([handle for handle, _ in items], leased=True)
            state.holds.hold(handles)
        bodies = [data.cast("B")[: handle.nbytes] for handle, (_, data) in zip(handles, items, strict=True)]
        ticket, start = Ticket(), time.perf_counter()

        def move(window: Sequence[int], limit: float) -> list[Status]:
            return self._fetched([handles[at] for at in window], [bodies[at] for at in window], limit)

        def done(statuses: list[Status]) -> None:
            try:
                with state.lock:
                    ended = state.holds.unhold(handles)
                state.removals.add(ended)
                good = [h.nbytes for h, status in zip(handles, statuses, strict=True) if status is Status.OK]
                self._counts.read(sum(good))
                self._counts.met("timeout", statuses.count(Status.TIMEOUT))
                self._counts.took("read", start)
            finally:
                state.completions.finish(ticket, statuses)

        sizes = sizes_by_run(handles, self._backend.run)
        Batch(state.movers, self._counts, "read", sizes, move, done, Status.MISS).start(deadline)
        return ticket

    def _fetched(self, handles: Sequence[RemoteHandle], bodies: Sequence[memoryview], limit: float) -> list[Status]:
        room = memoryview(bytearray(ENVELOPE_BYTES * len(handles)))
        heads = [room[at * ENVELOPE_BYTES : (at + 1) * ENVELOPE_BYTES] for at in range(len(handles))]
        fetches = [Fetch(handle.name, head, body) for handle, head, body in zip(handles, heads, bodies, strict=True)]
        lengths = self._backend.get(fetches, limit)
        sums = copy_checksums(
            checksum_heads(handles), list(bodies), [None] * len(handles), [handle.nbytes for handle in handles]
        )
        statuses = [
            self._verified(handle, length, head, found)
            for handle, length, head, found in zip(handles, lengths, heads, sums, strict=True)
        ]
        self._counts.met("gone", statuses.count(Status.MISS))
        self._discard(
            [handle.name for handle, status in zip(handles, statuses, strict=True) if status is Status.CORRUPT], limit
        )
        return statuses

    @staticmethod
    def _verified(handle: RemoteHandle, length: int | None, head: memoryview, checksum: bytes) -> Status:
        if length is None:
            return Status.MISS
        if length == handle.nbytes and head == handle.head:
            return Status.OK if checksum == handle.checksum else Status.CORRUPT
        # Another record than the leased one: somebody's newer version, or damage.
        now = unpack(handle.name, head) if length >= 0 else None
        return Status.CORRUPT if now is None or (length != now.nbytes) else Status.MISS

    def _discard(self, names: Sequence[bytes], limit: float) -> None:
        """Remove damaged records, if that can be done in time, and count them."""
        if not names:
            return
        self._counts.damaged(len(names))
        try:
            self._backend.remove(names, limit)
        except KVTierError as error:
            self._counts.failed("remove", error)

    def release(self, handles: Sequence[Handle]) -> None:
        """See `Tier.release`. After `close`, which ended all leases, nothing happens."""
        with self._state.lock:
            if self._state.holds.closed:
                return
            leased = self._state.holds.require(handles, leased=True)
            ended = self._state.holds.end_leases(leased)
        self._state.removals.add(ended)


def _batches(keys: Sequence[bytes], run: int) -> Iterator[Sequence[bytes]]:
    """What is looked up at a time; each ends where a run ends, as `keys` do."""
    step = max(_LOOKUPS // run, 1) * run
    head = len(keys) % step
    if head:
        yield keys[:head]
    for start in range(head, len(keys), step):
        yield keys[start : start + step]


def _names(keys: Iterable[bytes], *, exact: bool) -> list[bytes]:
    """What the records of these blocks may be called, the best first."""
    classes = (True,) if exact else (True, False)
    return [record_name(key, exact=one) for key in keys for one in classes]
