"""The way down: copies host blocks to one lower tier, in the background.

The queue is bounded in bytes. What does not fit is a dropped demotion, counted by reason: a slow or full tier
never holds up whoever puts blocks, and never pins more than the bound of the host tier. What was dropped is owed:
it is tried again when it is next used.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvtier.errors import FormatMismatch
from kvtier.hints import NO_HINT, Hint
from kvtier.store.gateway import GatewayTier
from kvtier.store.inflight import InFlight
from kvtier.store.lookup import present
from kvtier.store.port import Port
from kvtier.store.recoding import Recoder, Target
from kvtier.store.runs import members, whole_runs
from kvtier.tiers import OWN_WORK, BlockRef, Full, Handle, Reservation, Status, completes_run

__all__ = ["Demoter"]

_OWNER = OWN_WORK + "demote"
_OWED = 1 << 16
# Reasons that are the tier's: it failed, did not write, or had no room.
_UNTAKEN = ("tier_error", "not_written", "refused", "not_kept")
_log = logging.getLogger(__name__)


class _Block(NamedTuple):
    """A leased host record on its way, and how it is to be stored."""

    source: Handle
    target: Target
    hint: Hint


class Demoter:
    """One thread that copies from `host` to one lower tier, whole runs where the tier keeps such.

    Args:
        host: where the blocks are read in place, under a lease.
        gate: host's port.
        port: of the lower tier.
        recoder: formats.
        bound: bytes of host blocks that may wait here.
        patience: seconds that the tier has for one batch.
    """

    def __init__(
        self, host: GatewayTier, gate: Port, port: Port, recoder: Recoder, *, bound: int, patience: float
    ) -> None:
        self.port = port
        self.run = port.tier.caps.run
        self._host = host
        self._gate = gate
        self._recoder = recoder
        self._bound = bound
        self._patience = patience
        self._inflight = InFlight()
        self._queue: deque[list[tuple[Handle, Hint]]] = deque()
        self._queued: set[bytes] = set()
        # What was dropped, and why.
        self._owed: OrderedDict[bytes, tuple[BlockRef, str]] = OrderedDict()
        self._refused: list[Callable[[BlockRef], bool]] = []
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"kvtier-demote-{port.name}", daemon=True)
        self._thread.start()

    # ---- the queue

    def submit(self, refs: Sequence[BlockRef], hints: Sequence[Hint]) -> None:
        """Queue those of `refs` that host holds, parents first, or the runs that are complete with them; at once."""
        with self._changed:
            fresh = [at for at, ref in enumerate(refs) if ref.key not in self._queued]
        if self.run > 1:
            self._submit_runs([refs[at] for at in fresh if completes_run(refs[at], self.run)], refs, hints)
            return
        leased: list[tuple[Handle, Hint]] = []
        for at in _consecutive(fresh):
            wanted = [refs[place] for place in at]
            handles = self._gate.acquire([ref.key for ref in wanted], _OWNER)
            leased += zip(handles, (hints[place] for place in at), strict=False)
            self._drop("evicted_before_write", wanted[len(handles) :])
        self.enqueue(leased)

    def _submit_runs(self, lasts: Sequence[BlockRef], refs: Sequence[BlockRef], hints: Sequence[Hint]) -> None:
        """Queue the runs that end with `lasts`; hints are known of `refs`, of blocks that came earlier none."""
        known = dict(zip((ref.key for ref in refs), hints, strict=True))
        leased: dict[bytes, tuple[Handle, Hint]] = {}
        for last in lasts:
            handles = self.lease_run(last)
            if not leased.keys().isdisjoint(handle.ref.key for handle in handles):
                # Chains that part within a run have its first blocks in common, and no batch has a block twice.
                self.enqueue(list(leased.values()))
                leased = {}
            leased |= {handle.ref.key: (handle, known.get(handle.ref.key, NO_HINT)) for handle in handles}
        self.enqueue(list(leased.values()))

    def lease_run(self, last: BlockRef) -> list[Handle]:
        """Lease the run that is complete with this block, parents first; empty where host lacks one of its blocks."""
        wanted = members(self._host, last, self.run)
        handles = self._gate.acquire([ref.key for ref in wanted], _OWNER)
        if len(handles) == self.run:
            return list(handles)
        self._gate.release(handles)
        self._drop("incomplete_run", wanted)
        return []

    def enqueue(self, leased: Sequence[tuple[Handle, Hint]]) -> int:
        """Queue leased whole runs, parents first, and take over their leases; how many leading records were taken."""
        taken = 0
        deleted: list[Handle] = []
        with self._changed:
            gone = self._deleted([handle.ref for handle, _ in leased])
            if gone:
                leased, deleted = self._parted(leased, gone.__contains__)
            for at in () if self._closed else range(0, len(leased), self.run):
                nbytes = sum(handle.nbytes for handle, _ in leased[at : at + self.run])
                if self._bytes and self._bytes + nbytes > self._bound:
                    break
                self._bytes += nbytes
                taken += self.run
            if taken:
                self._queue.append(list(leased[:taken]))
                for handle, _ in leased[:taken]:
                    self._queued.add(handle.ref.key)
                    self._owed.pop(handle.ref.key, None)
                self.port.writes.started(sum(handle.nbytes for handle, _ in leased[:taken]))
                self._changed.notify_all()
        rest = [handle for handle, _ in leased[taken:]]
        self._gate.release([*deleted, *rest])
        self._drop("deleted", [handle.ref for handle in deleted])
        self._drop("queue_full", [handle.ref for handle in rest])
        return taken

    def _deleted(self, refs: Sequence[BlockRef]) -> set[BlockRef]:
        """Those of leased blocks that are being deleted, or were since they were leased: host has them no more."""
        nothing: list[BlockRef | None] = [None] * len(refs)
        here = self._gate.attempt("refs", lambda: self._host.refs([ref.key for ref in refs]), nothing)
        gone = {ref for ref, found in zip(refs, here, strict=True) if found is None}
        return gone.union(ref for ref in refs if any(refuses(ref) for refuses in self._refused))

    def _parted(
        self, batch: Sequence[tuple[Handle, Hint]], is_gone: Callable[[BlockRef], bool]
    ) -> tuple[list[tuple[Handle, Hint]], list[Handle]]:
        """The runs of which nothing is gone, and the records of the others."""
        alive = whole_runs(batch, [not is_gone(handle.ref) for handle, _ in batch], self.run)
        kept = {handle for handle, _ in alive}
        return alive, [handle for handle, _ in batch if handle not in kept]

    def lacking(self, refs: Sequence[BlockRef]) -> list[int]:
        """Positions of the blocks that the tier does not hold as well as it could, as far as its index tells.

        All, where the tier is remote: puts would wait for its answer, and it is asked before anything is written.
        """
        if self.port.tier.caps.remote:
            return list(range(len(refs)))
        exact = [self._recoder.exact_in(self.port.tier, ref) for ref in refs]
        lacking: list[int] = []
        for wanted in {*exact}:
            asked = [at for at, one in enumerate(exact) if one is wanted]
            found = self.port.present([refs[at].key for at in asked], exact=wanted)
            lacking += [at for at, here in zip(asked, found, strict=True) if not here]
        return sorted(lacking)

    @property
    def owes_any(self) -> bool:
        """Whether anything was dropped and never tried again."""
        return bool(self._owed)

    def owes(self, keys: Iterable[bytes]) -> list[bytes]:
        """Which of these were dropped before and never tried again."""
        if not self._owed:
            return []
        with self._changed:
            return [key for key in keys if key in self._owed]

    def untaken(self) -> list[bytes]:
        """Of those, the ones that the tier was given and did not take."""
        with self._changed:
            return [key for key, (_, reason) in self._owed.items() if reason in _UNTAKEN]

    def _drop(self, reason: str, refs: Sequence[BlockRef]) -> None:
        if not refs:
            return
        self.port.drop(reason, len(refs))
        self._owe(reason, refs)

    def _owe(self, reason: str, refs: Sequence[BlockRef]) -> None:
        with self._changed:
            self._owed.update((ref.key, (ref, reason)) for ref in refs)
            while len(self._owed) > _OWED:
                self._owed.popitem(last=False)

    @property
    def waiting_bytes(self) -> int:
        """Bytes queued or being written."""
        return self._bytes

    def drain(self) -> bool:
        """Wait until everything queued so far is written or dropped; False: the tier makes no progress."""
        with self._changed:
            while self._bytes:
                if not self._changed.wait(self._patience):
                    return False
        return True

    def passed(self, keys: Collection[bytes]) -> bool:
        """Wait until none of these keys is being written; False: that takes the tier too long."""
        going = self._inflight.going(keys)
        self._inflight.wait(going, time.monotonic() + self._patience)
        return all(event.is_set() for event in going)

    @contextmanager
    def refusing(self, is_gone: Callable[[BlockRef], bool], keys: frozenset[bytes] | None = None) -> Iterator[None]:
        """Blocks are being deleted: none of them is taken meanwhile, and what of them is on its way does not arrive.

        `keys`: theirs, where they are known.
        """
        with self._changed:
            self._refused.append(is_gone)
            parted = [self._parted(batch, is_gone) for batch in self._queue]
            self._queue = deque(alive for alive, _ in parted if alive)
            dead = [handle for _, gone in parted for handle in gone]
            self._ended(dead)
            candidates = self._owed.keys() if keys is None else self._owed.keys() & keys
            for key in [key for key in candidates if is_gone(self._owed[key][0])]:
                del self._owed[key]
            self._inflight.delete(is_gone)
        self._gate.release(dead)
        try:
            yield
        finally:
            with self._changed:
                self._refused.remove(is_gone)

    def _ended(self, handles: Sequence[Handle]) -> None:
        """With the lock held: these do not wait any more."""
        nbytes = sum(handle.nbytes for handle in handles)
        self._bytes -= nbytes
        self._queued.difference_update([handle.ref.key for handle in handles])
        self.port.writes.ended(nbytes)
        self._changed.notify_all()

    def close(self) -> bool:
        """Write what is queued, then end the thread; False: the tier hangs. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.drain()
        self._thread.join(self._patience)
        return not self._thread.is_alive()

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                batch = self._queue.popleft()
                claimed = self._inflight.claim([handle.ref for handle, _ in batch]).mine
            mine = whole_runs(batch, claimed, self.run)
            refs = [handle.ref for (handle, _), own in zip(batch, claimed, strict=True) if own]
            handles = [handle for handle, _ in batch]
            written = False
            try:
                written = self.port.attempt("demote", lambda: self._write(mine), False)  # noqa: B023
            except Exception:  # noqa: BLE001  the thread's top level: one bad batch must not end it
                _log.exception("demotion of %d blocks to %s died", len(mine), self.port.name)
            if not written:
                self._drop("tier_error", [handle.ref for handle, _ in mine])
            self.port.take_back(self._inflight.finish(refs))
            self._gate.release(handles)
            with self._changed:
                self._ended(handles)

    def _write(self, batch: Sequence[tuple[Handle, Hint]]) -> bool:
        blocks = [_Block(handle, self._recoder.down(self.port.tier, handle), hint) for handle, hint in batch]
        for block in blocks:
            if block.target.fallback is not None:
                self.port.fell_back(block.target.fallback)
        blocks = self._lacking(blocks)
        while blocks:
            count = self._fitting(blocks)
            self._write_chunk(blocks[:count])
            blocks = blocks[count:]
        return True

    def _lacking(self, blocks: list[_Block]) -> list[_Block]:
        """Without those that the tier holds already, as far as they have to be encoded before their size is known."""
        lacking = [True] * len(blocks)
        for exact in (True, False):
            asked = [
                at
                for at in range(self.run - 1, len(blocks), self.run)
                if blocks[at].target.variable and blocks[at].target.ref.exact is exact
            ]
            if asked:
                keys = [blocks[at].source.ref.key for at in asked]
                found = present(self.port.tier, keys, self._patience, exact=exact)
                for at, here in zip(asked, found, strict=True):
                    lacking[at] = not here
        return whole_runs(blocks, lacking, self.run)

    def _fitting(self, blocks: Sequence[_Block]) -> int:
        """How many leading blocks go at a time: as many as staging holds encoded."""
        total = 0
        for at in range(0, len(blocks), self.run):
            total += sum(map(self._staged, blocks[at : at + self.run]))
            if at and total > self.port.staging.limit:
                return at
        return len(blocks)

    def _staged(self, block: _Block) -> int:
        return 0 if block.target.codec is None else self._padded(block.target.nbytes)

    def _padded(self, nbytes: int) -> int:
        align = self.port.tier.caps.align
        return -(-nbytes // align) * align

    def _write_chunk(self, blocks: Sequence[_Block]) -> None:
        with self.port.staging.take(sum(map(self._staged, blocks))) as staging:
            scratch = _Scratch(staging, self.port.tier.caps.align)
            blocks, early = self._encoded_early(blocks, scratch)
            slots = self.port.tier.reserve(
                [block.target.ref for block in blocks],
                [early[key].nbytes if (key := b.source.ref.key) in early else b.target.nbytes for b in blocks],
                [block.target.fmt for block in blocks],
                _OWNER,
                [block.hint for block in blocks],
            )
            try:
                full = [b.source.ref for b, slot in zip(blocks, slots, strict=True) if isinstance(slot, Full)]
                self._drop("refused", full)
                self._store(self._filled(blocks, slots, early, scratch))
            finally:
                # What was committed is no reservation any more; the rest is given back, whatever happened.
                self.port.tier.abort([slot for slot in slots if isinstance(slot, Handle)])

    def _encoded_early(
        self, blocks: Sequence[_Block], scratch: "_Scratch"
    ) -> tuple[list[_Block], dict[bytes, memoryview]]:
        """Encode what has no size before; leaves out what cannot be encoded, and its descendants."""
        early: dict[bytes, memoryview] = {}
        bad: set[bytes | None] = set()
        for block in blocks:
            ref, variable = block.source.ref, block.target.variable
            data = self._encodable(block, scratch) if variable and ref.parent not in bad else None
            if ref.parent in bad or (variable and data is None):
                bad.add(ref.key)
            elif data is not None:
                early[ref.key] = data
        return self._without(bad, blocks), early

    def _without(self, bad: set[bytes | None], blocks: Sequence[_Block]) -> list[_Block]:
        """The runs in which nothing is bad; the rest is dropped."""
        kept = whole_runs(blocks, [block.source.ref.key not in bad for block in blocks], self.run)
        keys = {block.source.ref.key for block in kept}
        self._drop("unencodable", [ref for block in blocks if (ref := block.source.ref).key not in keys])
        return kept

    def _filled(
        self,
        blocks: Sequence[_Block],
        slots: Sequence[Reservation],
        early: Mapping[bytes, memoryview],
        scratch: "_Scratch",
    ) -> list[tuple[Handle, memoryview]]:
        """Encode what has room now; what cannot be encoded takes its descendants with it."""
        pairs: dict[bytes, tuple[Handle, memoryview]] = {}
        bad: set[bytes | None] = set()
        room = [(block, slot) for block, slot in zip(blocks, slots, strict=True) if isinstance(slot, Handle)]
        for block, slot in room:
            ref = block.source.ref
            data = early.get(ref.key)
            if ref.parent not in bad and data is None:
                data = self._encodable(block, scratch)
            if data is None or ref.parent in bad:
                bad.add(ref.key)
            else:
                pairs[ref.key] = (slot, data)
        return [pairs[block.source.ref.key] for block in self._without(bad, [block for block, _ in room])]

    def _store(self, pairs: Sequence[tuple[Handle, memoryview]]) -> None:
        """Write and commit. The tier is waited for however long it takes: until then the bytes are its to read."""
        if not pairs:
            return
        start = time.perf_counter()
        statuses = self.port.tier.write(pairs, time.monotonic() + self._patience).wait().statuses
        good = [slot for (slot, _), status in zip(pairs, statuses, strict=True) if status is Status.OK]
        self.port.tier.commit(good)
        self.port.writes.observe(sum(slot.nbytes for slot in good), time.perf_counter() - start)
        self._owe("not_kept", self._lost([slot.ref for slot in good]))
        self._drop(
            "not_written",
            [slot.ref for (slot, _), status in zip(pairs, statuses, strict=True) if status is not Status.OK],
        )

    def _lost(self, refs: Sequence[BlockRef]) -> list[BlockRef]:
        """Those that a commit dropped and counted, as an index without room does; of a remote tier nobody knows."""
        if self.port.tier.caps.remote or not self.port.breaker.due:
            return []
        here = self.port.present([ref.key for ref in refs], exact=False)
        return [ref for ref, found in zip(refs, here, strict=True) if not found]

    def _encodable(self, block: _Block, scratch: "_Scratch") -> memoryview | None:
        try:
            return self._encode(block, scratch)
        except FormatMismatch as error:
            _log.warning("block %s is not demoted to %s: %s", block.source.ref.key.hex(), self.port.name, error)
            return None

    def _encode(self, block: _Block, scratch: "_Scratch") -> memoryview:
        """The block's bytes as the tier is to hold them: host's own where they are copied as they are."""
        data, target = self._host.buffer(block.source), block.target
        if target.codec is None:
            return data
        raw = self._recoder.to_raw(block.source, data, target.group)
        out = scratch.take(target.nbytes)
        return out[: target.codec.encode(raw, self._recoder.layout(target.ref.ns), out, target.group)]


class _Scratch:
    """Carves aligned pieces off one staging buffer, in order."""

    def __init__(self, memory: memoryview, align: int) -> None:
        self._memory = memory
        self._align = align
        self._at = 0

    def take(self, nbytes: int) -> memoryview:
        start = self._at
        self._at += -(-nbytes // self._align) * self._align
        return self._memory[start : start + nbytes]


def _consecutive(places: Sequence[int]) -> list[list[int]]:
    """Split ascending positions where they are not consecutive."""
    groups: list[list[int]] = []
    for place in places:
        if groups and groups[-1][-1] == place - 1:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups
