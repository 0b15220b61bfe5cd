"""Shared memory: blocks are read where they lie in the service's host memory, and put from a staging region.

    get   lease -> copy out of the mapped region -> release    the copy is verified in the same pass, here
    put   copy into the staging region -> stage                the service copies and checks it while the next is filled

The mapping of host memory is read-only: the kernel refuses every write through it. A copy counts only once the service
has confirmed that the blocks were held until it was made.
"""

import queue
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from kvtier.attach import AttachedRegion, recv_regions
from kvtier.client.errors import DeadlineExceeded, ProtocolError, Refused, TooLarge
from kvtier.client.pipeline import Incoming, Pipeline, Turn
from kvtier.client.results import Block, Found, PutOutcome
from kvtier.client.stream import PlainStream
from kvtier.client.transfers import Ask, Places, found_of, guards_of, outcomes_of, put_head, requests
from kvtier.errors import FormatMismatch, TierUnavailable
from kvtier.keys import STORE_KEY_BYTES
from kvtier.layout import Span
from kvtier.native.checksum import copy_checksums
from kvtier.wire import messages as wire
from kvtier.wire.frames import Opcode, WireError
from kvtier.wire.packing import LONGEST_KEY

__all__ = ["Lease", "SharedMemory"]

# The first blocks are there soon; while they are copied the service finds the others, at whose bytes it does not look.
_FIRST_BYTES = 8 << 20
_WINDOW_BYTES = 32 << 20
# Of blocks that may be larger than the last ones were, and of such whose size is not known.
_GUESSED_BYTES = 16 << 20
_OPAQUE_BLOCKS = 8
_UNDER_WAY = 2
_SLOTS = 2
_PAGE = 4096
_RELEASE_SECONDS = 5.0


class Lease:
    """Blocks that are held where they lie. A context manager.

    blocks: what was found; their `data` are read-only views that must not be used after `close`. The hold lasts until
    then, or until the connection ends: `close` says so if it did.
    """

    def __init__(self, memory: "SharedMemory", lease: int, blocks: list[Found]) -> None:
        self.blocks = blocks
        self._memory = memory
        self._lease = [lease] if lease else []

    def close(self) -> None:
        """Let go of the blocks. Idempotent.

        Raises:
            Interrupted: the hold had ended before: what was read meanwhile may be bytes of other blocks.
        """
        if self._lease:
            self._memory.release(self._lease.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SharedMemory:
    """The regions of one connection. Thread-safe.

    Args:
        pipeline: the connection.
        regions: by id.
        staging: id of the one to put from; None: there is none.
    """

    def __init__(self, pipeline: Pipeline, regions: Mapping[int, AttachedRegion], staging: int | None) -> None:
        self._pipeline = pipeline
        self._regions = regions
        self._typical: dict[str, int] = {}
        self._slot_bytes = 0
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._staging: AttachedRegion | None = None
        if staging is not None:
            region = self._staging = regions[staging]
            self._slot_bytes = region.nbytes // _SLOTS // _PAGE * _PAGE
            for slot in range(_SLOTS):
                self._slots.put(slot * self._slot_bytes)

    @classmethod
    def attach(cls, pipeline: Pipeline, staging: int, deadline: float) -> "SharedMemory":
        """Have the service's memory mapped here.

        Raises:
            Refused: it does not share it with this caller.
        """

        def take(incoming: Incoming) -> tuple[wire.Shared, dict[int, AttachedRegion]]:
            shared = incoming.head(wire.Shared)
            stream = pipeline.stream
            if not isinstance(stream, PlainStream):
                raise WireError("regions over a connection that cannot carry them")
            try:
                return shared, recv_regions(stream.sock)
            except (OSError, TierUnavailable) as error:
                raise WireError(f"no regions came: {error}") from error

        turn = pipeline.begin(Opcode.SHARE, wire.Share(staging), (), deadline)
        shared, regions = pipeline.finish(turn, take)
        if {told.id for told in shared.regions} != regions.keys() or shared.staging not in (None, *regions):
            pipeline.close()
            raise ProtocolError(f"regions {sorted(regions)} came, others were announced: {shared}")
        return cls(pipeline, regions, shared.staging)

    # ---- reading

    def lease(self, ask: Ask, *, unchecked: bool = False) -> Lease:
        """Hold blocks in place; `unchecked`: whoever reads them verifies them, by what is known of them elsewhere."""
        asked = ask.lease(0, ask.keys, unchecked=unchecked)
        with self._whole():
            answer = self._pipeline.call(Opcode.LEASE, asked, wire.Leased, ask.deadline)
            return Lease(self, answer.lease, found_of(answer, ask.keys, self._views(answer)))

    def get(self, ask: Ask, into: Sequence[memoryview] | None, block_bytes: int) -> list[Found]:
        """Copy blocks out, window by window; `block_bytes`: of all asked parts of one block, 0 if they differ."""
        places = Places(ask, into)
        typical, widest = block_bytes or self._typical.get(ask.ns, 0), _WINDOW_BYTES if block_bytes else _GUESSED_BYTES
        limits = self._pipeline.welcome.limits
        while True:
            windows = list(_windows(ask.keys, typical, widest, limits))
            try:
                found = self._get(ask, places, windows, unchecked=True)
                # A block is damaged: the service, which is to look at all of them now, drops it.
                return self._get(ask, places, windows, unchecked=False) or [] if found is None else found
            except TooLarge:
                most = max(len(keys) for _, keys in windows)
                if most == 1:
                    raise
                # They are larger than those that were read last.
                typical = max(2 * typical, limits.batch_bytes // most)

    def _get(
        self, ask: Ask, places: Places, windows: Sequence[tuple[int, Sequence[bytes]]], *, unchecked: bool
    ) -> list[Found] | None:
        """One attempt; `unchecked`: bytes are verified here, and None says that some are damaged."""
        found: list[Found] = []
        typical = 0
        with self._whole(), _Leases(self._pipeline, ask, unchecked=unchecked) as leases:
            for start, keys in windows[:_UNDER_WAY]:
                leases.begin(start, keys)
            for number, (start, keys) in enumerate(windows):
                answer = leases.next()
                blocks = len(set(answer.at))
                goes_on = ask.each or blocks == len(keys)
                if blocks:
                    typical = self._typical[ask.ns] = max(typical, sum(answer.sizes) // blocks)
                if goes_on and number + _UNDER_WAY < len(windows):
                    leases.begin(*windows[number + _UNDER_WAY])
                copies, sound = places.of(answer, start), True
                if unchecked:
                    sound = _verified(answer, self._views(answer), copies)
                else:
                    _copied(self._views(answer), copies)
                leases.release(answer.lease)
                if not sound:
                    return None
                found += found_of(answer, keys, copies)
                if not goes_on:
                    break
        return found

    def _views(self, answer: wire.Leased) -> list[memoryview]:
        try:
            return [
                self._regions[region].view(Span(region, offset, nbytes))
                for region, offset, nbytes in zip(answer.regions, answer.offsets, answer.sizes, strict=True)
            ]
        except (KeyError, ValueError, TierUnavailable) as error:
            raise ProtocolError(f"{self._pipeline.address}: a lease of memory that is not shared: {error}") from error

    def release(self, lease: int) -> None:
        """End a hold.

        Raises:
            Interrupted: it had ended before.
        """
        until = time.monotonic() + _RELEASE_SECONDS
        with self._whole():
            self._pipeline.call(Opcode.RELEASE, wire.Release([lease]), wire.Done, until)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A conversation that is left in the middle would leave holds behind, or memory that is still being read."""
        try:
            yield
        except _IN_STEP:
            # Whoever raised it has brought the rest to an end.
            raise
        except BaseException:
            self._pipeline.close()
            raise

    # ---- writing

    def takes(self, blocks: Sequence[Block]) -> bool:
        """Whether these blocks can be put through the staging region: every one fits into a slot of it.

        What is no block is not: over the socket it is refused before anything is under way.
        """
        views = [memoryview(block.data) for block in blocks]
        sizes = [view.nbytes for view in views]
        widths = {len(key) for block in blocks for key in (block.key, block.parent) if key is not None}
        named = STORE_KEY_BYTES <= min(widths) <= max(widths) <= LONGEST_KEY
        return named and 0 < min(sizes) <= max(sizes) <= self._slot_bytes and all(view.c_contiguous for view in views)

    def put(self, ns: str, blocks: Sequence[Block], deadline: float) -> list[PutOutcome]:
        """Store blocks, slot by slot."""
        staging = self._staging
        if staging is None:
            raise ProtocolError(f"{self._pipeline.address}: no staging region")
        outcomes: list[PutOutcome] = []
        with self._whole(), _Stages(self._pipeline, self._slots, outcomes) as stages:
            for some in requests(blocks, self._pipeline.welcome.limits.keys, self._slot_bytes):
                views = [memoryview(block.data).cast("B") for block in some]
                slot = self._slot(stages, deadline)
                offsets = _offsets(slot, views)
                places = zip(offsets, views, strict=True)
                _copied(views, [staging.view(Span(0, offset, view.nbytes)) for offset, view in places])
                head = wire.Stage(offsets=offsets, **put_head(ns, some, deadline))
                stages.begin(head, slot, len(some), deadline)
        return outcomes

    def _slot(self, stages: "_Stages", deadline: float) -> int:
        """A free slot; where none is, one of the call's own stages is finished first."""
        while True:
            with suppress(queue.Empty):
                return self._slots.get(timeout=0 if stages.under_way else max(0.0, deadline - time.monotonic()))
            if not stages.under_way:
                raise _NoSlot(f"{self._pipeline.address}: other puts took all of the time")
            stages.finish()


class _NoSlot(DeadlineExceeded):
    """Others had all of the staging region: nothing was asked for, and nothing is under way."""


# What a call may end with and leave the connection to others: it waits for its answers, and holds nothing then.
_IN_STEP = (Refused, FormatMismatch, _NoSlot)


class _Stages:
    """The stages of one put, whose answers come in the order in which they were sent."""

    def __init__(self, pipeline: Pipeline, slots: "queue.SimpleQueue[int]", outcomes: list[PutOutcome]) -> None:
        self._pipeline = pipeline
        self._slots = slots
        self._outcomes = outcomes
        self._turns: deque[tuple[Turn, int, int]] = deque()

    @property
    def under_way(self) -> int:
        """How many are not finished."""
        return len(self._turns)

    def begin(self, head: wire.Stage, slot: int, count: int, deadline: float) -> None:
        """Have `count` blocks in a slot stored."""
        self._turns.append((self._pipeline.begin(Opcode.STAGE, head, (), deadline), slot, count))

    def finish(self) -> None:
        """Wait for the oldest; its slot is free then, stored or refused."""
        turn, slot, count = self._turns.popleft()
        try:
            answer = self._pipeline.finish(turn, lambda incoming: incoming.head(wire.Outcomes))
        except Refused:
            self._slots.put(slot)
            raise
        self._slots.put(slot)
        self._outcomes += outcomes_of(answer, count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for everything, unless the connection is given up anyway."""
        if kind is not None and not issubclass(kind, _IN_STEP):
            return
        refused: Refused | None = None
        while self._turns:
            try:
                self.finish()
            except Refused as why:
                refused = refused or why
        if kind is None and refused is not None:
            raise refused


class _Leases:
    """The leases and releases of one read, whose answers come in the order in which they were sent."""

    def __init__(self, pipeline: Pipeline, ask: Ask, *, unchecked: bool) -> None:
        self._pipeline = pipeline
        self._read = ask
        self._unchecked = unchecked
        self._held = 0
        self._turns: deque[tuple[Turn, type[wire.Leased | wire.Done]]] = deque()

    def begin(self, start: int, keys: Sequence[bytes]) -> None:
        """Ask for the blocks of some keys, the first of which is the `start`-th."""
        self._send(Opcode.LEASE, self._read.lease(start, keys, unchecked=self._unchecked), wire.Leased)

    def release(self, lease: int) -> None:
        """Let go. The answer, which is waited for later, says that the hold lasted until then."""
        self._held = 0
        if lease:
            self._send(Opcode.RELEASE, wire.Release([lease]), wire.Done)

    def _send(self, opcode: Opcode, message: msgspec.Struct, kind: type[wire.Leased | wire.Done]) -> None:
        self._turns.append((self._pipeline.begin(opcode, message, (), self._read.deadline), kind))

    def _take(self) -> wire.Leased | wire.Done:
        turn, kind = self._turns.popleft()
        return self._pipeline.finish(turn, lambda incoming: incoming.head(kind))

    def next(self) -> wire.Leased:
        """The next lease."""
        while True:
            answer = self._take()
            if isinstance(answer, wire.Leased):
                self._held = answer.lease
                return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of what is not wanted any more, and wait for everything, unless the connection is given up anyway."""
        if kind is not None and not issubclass(kind, _IN_STEP):
            return
        self.release(self._held)
        while self._turns:
            try:
                answer = self._take()
            except Refused:
                if kind is None:
                    raise
            else:
                if isinstance(answer, wire.Leased):
                    self.release(answer.lease)


def _windows(
    keys: Sequence[bytes], block_bytes: int, widest: int, limits: wire.Limits
) -> Iterator[tuple[int, Sequence[bytes]]]:
    """Consecutive keys, with the place of the first: a few blocks, so that copying begins soon, then many."""
    most = min(widest, limits.batch_bytes)
    start, nbytes = 0, min(_FIRST_BYTES, most)
    while start < len(keys):
        count = min(max(1, nbytes // block_bytes), limits.keys) if block_bytes else _OPAQUE_BLOCKS
        yield start, keys[start : start + count]
        start, nbytes = start + count, most


def _offsets(slot: int, views: Sequence[memoryview]) -> list[int]:
    offsets = [slot]
    for view in views[:-1]:
        offsets.append(offsets[-1] + view.nbytes)
    return offsets


def _copied(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    """Copy each; without the GIL, which slices of memoryviews would keep."""
    for source, target in zip(sources, targets, strict=True):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _verified(answer: wire.Leased, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> bool:
    """Copy each, in the same pass as its checksum; whether all are what the service says that they are."""
    heads, checksums = guards_of(answer)
    found = copy_checksums(heads, list(sources), list(targets), [source.nbytes for source in sources])
    return b"".join(found) == checksums
