"""Writing: from reservations to complete records.

A record is written under its own name, whole or not at all, so that other processes may find it before `commit`; this
one does not. What is aborted, or superseded, is removed again.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvtier.errors import FormatMismatch, LeaseError
from kvtier.formats import fidelity
from kvtier.keys import STORE_KEY_BYTES
from kvtier.native.checksum import copy_checksums
from kvtier.remote.backend import Stored, Upload
from kvtier.remote.batches import Batch, check_buffers, sizes_by_run
from kvtier.remote.envelope import Envelope, pack, record_name, unpack
from kvtier.remote.holds import RemoteHandle, rank_of
from kvtier.remote.state import State
from kvtier.tiers import (
    BlockRef,
    Exists,
    Full,
    Handle,
    Owner,
    Reservation,
    Status,
    Ticket,
    checksum_heads,
    completes_run,
)

__all__ = ["Writer"]

_FMT_CHARS = 16  # the width that the envelope, as `block_checksum`, gives a format id
_FULL_SECONDS = 1.0


class Writer:
    """The writing verbs of `kvtier.tiers.Tier`. Thread-safe.

    Args:
        state: the tier's.
        largest: bytes of a block that the other side takes, at most.
    """

    def __init__(self, state: State, largest: int) -> None:
        self._state = state
        self._backend = state.backend
        self._counts = state.counts
        self._largest = largest
        self._full_until = 0.0

    # ---- reservations

    def reserve(
        self, refs: Sequence[BlockRef], sizes: Sequence[int], fmts: Sequence[str], owner: Owner
    ) -> list[Reservation]:
        """See `Tier.reserve`.

        Raises:
            FormatMismatch: a size, format or key that no record can have.
        """
        _check_records(refs, sizes, fmts)
        self._state.require_open()
        if not refs:
            return []
        with self._counts.timed("reserve"):
            heads = self._heads(refs)
            results: list[Reservation] = []
            refused: set[bytes] = set()
            with self._state.lock:
                self._state.holds.require_open()
                for start in range(0, len(refs), self._backend.run):
                    run = slice(start, start + self._backend.run)
                    refusal = self._refusal(refs[run], sizes[run], fmts[run], heads, refused)
                    if isinstance(refusal, Full):
                        refused.update(ref.key for ref in refs[run])
                    if refusal is not None:
                        results += [refusal] * len(refs[run])
                        continue
                    handles = self._handles(refs[run], sizes[run], fmts[run], owner, heads)
                    for handle in handles:
                        self._state.holds.reserve(handle)
                    results += handles
        for reason, count in Counter(answer.reason for answer in results if isinstance(answer, Full)).items():
            self._counts.dropped(reason, count)
        return results

    def _heads(self, refs: Sequence[BlockRef]) -> dict[bytes, bytes | None]:
        """What the other side has of these blocks, exact or not; what is doomed is as good as absent."""
        names = [record_name(ref.key, exact=exact) for ref in refs for exact in (True, False)]
        run = self._backend.run
        if run > 1:
            lasts = [name for at in range(run - 1, len(refs), run) for name in names[2 * at : 2 * at + 2]]
            self._backend.exists(lasts, self._state.movers.limit(None))
        heads = dict(zip(names, self._backend.heads(names, self._state.movers.limit(None)), strict=True))
        with self._state.lock:
            doomed = [name for name in names if self._state.holds.is_doomed(name)]
        # An empty head is a damaged record: there, and to be overwritten.
        return heads | dict.fromkeys(doomed, b"")

    def _refusal(
        self,
        refs: Sequence[BlockRef],
        sizes: Sequence[int],
        fmts: Sequence[str],
        heads: Mapping[bytes, bytes | None],
        refused: set[bytes],
    ) -> Exists | Full | None:
        """Why a run is not written; its last block, by whose name it is found, speaks for all."""
        last, rank = refs[-1], rank_of(refs[-1].exact, fmts[-1])
        if len(refs) < self._backend.run or not completes_run(last, self._backend.run):
            return Full("incomplete_run")
        if self._state.holds.promised(last.key, rank):
            return Exists(ready=False)
        for exact in (True, False):
            there = record_name(last.key, exact=exact)
            envelope = unpack(there, heads[there] or b"")
            if envelope is not None and rank_of(exact, envelope.fmt) >= rank:
                return Exists(ready=True)
        if refs[0].parent in refused:
            return Full("parent_refused")
        if sum(sizes) > self._largest:
            return Full("oversized")
        return Full("no_space_on_server") if time.monotonic() < self._full_until else None

    @staticmethod
    def _handles(
        refs: Sequence[BlockRef],
        sizes: Sequence[int],
        fmts: Sequence[str],
        owner: Owner,
        heads: Mapping[bytes, bytes | None],
    ) -> list[RemoteHandle]:
        handles = []
        for ref, nbytes, fmt in zip(refs, sizes, fmts, strict=True):
            name, lossy = record_name(ref.key, exact=ref.exact), record_name(ref.key, exact=False)
            handle = RemoteHandle(name, Envelope(ref, fmt, nbytes, b""), owner)
            handle.fresh = heads[name] is None
            # With its last record a whole run goes.
            handle.twin = lossy if ref is refs[-1] and ref.exact and heads[lossy] is not None else None
            handles.append(handle)
        return handles

    def _removable(self, handles: Iterable[RemoteHandle]) -> list[bytes]:
        """By what names these records are removed: with its last one a whole run goes."""
        return [handle.name for handle in handles if completes_run(handle.ref, self._backend.run)]

    # ---- bytes

    def write(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """See `Tier.write`. The buffers must stay as they are until the ticket is done."""
        check_buffers(items, writable=False)
        state = self._state
        sizes = [handle.nbytes for handle, _ in items]
        bodies = [data.cast("B")[:size] for (_, data), size in zip(items, sizes, strict=True)]
        checksums = copy_checksums(
            checksum_heads([handle for handle, _ in items]), list(bodies), [None] * len(bodies), sizes
        )
        with state.lock:
            state.holds.require_open()
            handles = state.holds.require([handle for handle, _ in items], leased=False)
            for handle in handles:
                handle.head = b""
                handle.moves += 1
        heads = [pack(h.ref, h.fmt, h.nbytes, checksum) for h, checksum in zip(handles, checksums, strict=True)]
        ticket, start = Ticket(), time.perf_counter()

        def move(window: Sequence[int], limit: float) -> list[Status]:
            uploads = [Upload(handles[at].name, heads[at], bodies[at], handles[at].fresh) for at in window]
            return self._uploaded(uploads, limit)

        def done(statuses: list[Status]) -> None:
            try:
                self._end_moves(handles, heads, statuses)
                self._counts.took("write", start)
            finally:
                state.completions.finish(ticket, statuses)

        groups = sizes_by_run(handles, self._backend.run)
        Batch(state.movers, self._counts, "write", groups, move, done, Status.FULL).start(deadline)
        return ticket

    def _uploaded(self, uploads: Sequence[Upload], limit: float) -> list[Status]:
        outcomes = self._backend.put(uploads, limit)
        beaten = [upload for upload, outcome in zip(uploads, outcomes, strict=True) if outcome is Stored.EXISTS]
        better = self._better(beaten, limit)
        if better:
            # Another process was first with less: the bytes go over the wire twice, which is rare.
            self._backend.put(better, limit)
        full = outcomes.count(Stored.FULL)
        if full:
            self._full_until = time.monotonic() + _FULL_SECONDS
            self._counts.met("full", full)
            self._counts.dropped("no_space_on_server", full)
        return [Status.FULL if outcome is Stored.FULL else Status.OK for outcome in outcomes]

    def _better(self, beaten: Sequence[Upload], limit: float) -> list[Upload]:
        """Those that are worth more than what is there, so that they replace it."""
        if not beaten:
            return []
        run = self._backend.run
        lasts = beaten[run - 1 :: run]
        better: list[Upload] = []
        heads = self._backend.heads([upload.name for upload in lasts], limit)
        for at, (upload, head) in enumerate(zip(lasts, heads, strict=True)):
            own, there = unpack(upload.name, upload.head), unpack(upload.name, head or b"")
            if own is not None and (there is None or fidelity(there.fmt) < fidelity(own.fmt)):
                better += [one._replace(fresh=False) for one in beaten[at * run : (at + 1) * run]]
        return better

    def _end_moves(self, handles: Sequence[RemoteHandle], heads: Sequence[bytes], statuses: Sequence[Status]) -> None:
        """Note what is complete; what was aborted meanwhile goes."""
        aborted: list[RemoteHandle] = []
        with self._state.lock:
            for handle, head, status in zip(handles, heads, statuses, strict=True):
                handle.moves -= 1
                if status is Status.OK:
                    handle.head = head
                if not handle.moves and handle not in self._state.holds.reservations and handle.head:
                    aborted.append(handle)
            ended = self._state.holds.doom(self._removable(aborted))
        self._counts.met("timeout", statuses.count(Status.TIMEOUT))
        self._state.removals.add(ended)

    # ---- ends

    def commit(self, handles: Sequence[Handle]) -> None:
        """See `Tier.commit`."""
        state = self._state
        superfluous: list[bytes] = []
        with state.lock:
            state.holds.require_open()
            reserved = state.holds.require(handles, leased=False)
            unwritten = next((handle for handle in reserved if handle.moves or not handle.head), None)
            if unwritten is not None:
                raise LeaseError(f"block {unwritten.ref.key.hex()} was never completely written: write it or abort")
            for handle in reserved:
                left = state.holds.commit(handle)
                superfluous += left if completes_run(handle.ref, self._backend.run) else []
            ended = state.holds.doom(superfluous)
        state.absent.discard(handle.name for handle in reserved)
        state.removals.add(ended)
        self._counts.written(sum(handle.nbytes for handle in reserved))

    def abort(self, handles: Sequence[Handle]) -> None:
        """See `Tier.abort`. After `close`, which ended all reservations, nothing happens."""
        state = self._state
        written: list[RemoteHandle] = []
        with state.lock:
            if state.holds.closed:
                return
            for handle in handles:
                if isinstance(handle, RemoteHandle) and handle in state.holds.reservations:
                    state.holds.end_reservation(handle)
                    if handle.head and not handle.moves:
                        written.append(handle)
            ended = state.holds.doom(self._removable(written))
        state.removals.add(ended)


def _check_records(refs: Sequence[BlockRef], sizes: Sequence[int], fmts: Sequence[str]) -> None:
    if not len(refs) == len(sizes) == len(fmts):
        raise FormatMismatch(f"{len(refs)} refs, {len(sizes)} sizes, {len(fmts)} formats: expected as many of each")
    for ref, nbytes, fmt in zip(refs, sizes, fmts, strict=True):
        if (
            not 1 <= nbytes < 1 << 32
            or len(ref.key) != STORE_KEY_BYTES
            or not (0 < len(fmt) <= _FMT_CHARS and fmt.isascii())
        ):
            raise FormatMismatch(
                f"record of {nbytes} bytes, format {fmt!r}, key of {len(ref.key)} bytes: expected 1 byte to 4 GiB, "
                f"1..{_FMT_CHARS} ASCII characters and {STORE_KEY_BYTES} bytes"
            )
