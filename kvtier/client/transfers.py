"""Blocks over one data port connection: what is asked for, where it goes, and how columns become results."""

import time
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash

from kvtier.client.decoding import check_digest
from kvtier.client.pipeline import Incoming, Pipeline
from kvtier.client.results import Block, Found, PutOutcome
from kvtier.errors import FormatMismatch
from kvtier.hints import Hint
from kvtier.keys import STORE_KEY_BYTES
from kvtier.native.checksum import HEAD_BYTES
from kvtier.wire import messages as wire
from kvtier.wire.frames import Opcode, WireError
from kvtier.wire.packing import pack_keys, unpack_keys, unpack_runs

__all__ = [
    "Ask",
    "Places",
    "asked_of",
    "found_of",
    "get_blocks",
    "get_unchecked",
    "guards_of",
    "outcomes_of",
    "put_blocks",
    "put_head",
    "remaining",
    "requests",
]

_NO_PARENT = bytes(STORE_KEY_BYTES)
_DIGEST_BYTES = 16

Items: TypeAlias = wire.Got | wire.Leased


class Ask(NamedTuple):
    """What is to be read: of blocks of one chain, all parts (None) or some; see `DataClient.get_many`."""

    ns: str
    keys: Sequence[bytes]
    parts: Sequence[int] | None
    lossy: bool
    each: bool
    depth: int
    deadline: float

    def head(self, start: int, keys: Sequence[bytes], *, digests: bool = False, unchecked: bool = False) -> wire.Get:
        """A request for some of the keys, the first of which is the `start`-th."""
        return wire.Get(digests=digests, **self._common(start, keys, unchecked=unchecked))

    def lease(self, start: int, keys: Sequence[bytes], *, unchecked: bool) -> wire.Lease:
        """Likewise, where they are to be leased."""
        return wire.Lease(**self._common(start, keys, unchecked=unchecked))

    def _common(self, start: int, keys: Sequence[bytes], *, unchecked: bool) -> dict[str, Any]:
        return {
            "ns": self.ns,
            "keys": pack_keys(keys),
            "parts": None if self.parts is None else list(self.parts),
            "lossy": self.lossy,
            "each": self.each,
            "depth": self.depth + start,
            "timeout": remaining(self.deadline),
            "unchecked": unchecked,
        }


class Places:
    """Where the bytes of items go: the caller's buffers, or memory that is made for them.

    Args:
        ask: what is read.
        into: one buffer per part of each key, key by key; None: none are given.

    Raises:
        FormatMismatch: not as many buffers as items, or one cannot be written.
    """

    def __init__(self, ask: Ask, into: Sequence[memoryview] | None) -> None:
        self._parts = ask.parts
        self._into = None if into is None else [memoryview(buffer).cast("B") for buffer in into]
        self._width = 0
        if self._into is not None and ask.keys:
            self._width, rest = divmod(len(self._into), len(ask.keys))
            if rest or not self._width or (ask.parts is not None and self._width != len(ask.parts)):
                raise FormatMismatch(
                    f"{len(self._into)} buffers for {len(ask.keys)} keys: expected one for every part of every key"
                )
            if any(buffer.readonly for buffer in self._into):
                raise FormatMismatch("a buffer is read-only: expected writable ones")

    def of(self, answer: Items, first: int) -> list[memoryview]:
        """A buffer for each item of an answer to the keys from the `first`-th on.

        Raises:
            FormatMismatch: a buffer is too short, or the namespace has other parts.
        """
        if self._into is None:
            memory, views, offset = np.empty(sum(answer.sizes), np.uint8).data, [], 0
            for nbytes in answer.sizes:
                views.append(memory[offset : offset + nbytes])
                offset += nbytes
            return views
        return [
            self._given(first + at, part, nbytes)
            for at, part, nbytes in zip(answer.at, answer.parts, answer.sizes, strict=True)
        ]

    def _given(self, at: int, part: int, nbytes: int) -> memoryview:
        place = part if self._parts is None else self._parts.index(part)
        if self._into is None or place >= self._width:
            raise FormatMismatch(f"part {part} of a block: there are buffers for {self._width}; give one per part")
        buffer = self._into[at * self._width + place]
        if buffer.nbytes < nbytes:
            raise FormatMismatch(f"a buffer of {buffer.nbytes} bytes for a block of {nbytes}: give longer ones")
        return buffer[:nbytes]


def remaining(deadline: float) -> float:
    """Seconds to tell the service, which takes none that are not above 0."""
    return max(0.001, deadline - time.monotonic())


def found_of(answer: Items, keys: Sequence[bytes], views: Sequence[memoryview], digests: bytes = b"") -> list[Found]:
    """The items of an answer.

    Args:
        answer: its columns.
        keys: that were asked for.
        views: bytes of each item.
        digests: column of them; empty: they were not asked for.

    Raises:
        WireError: the columns do not fit together.
    """
    count = len(answer.sizes)
    columns = (answer.at, answer.parts, answer.exact, answer.depths, views)
    packed = (answer.parents, digests)
    if any(len(column) != count for column in columns) or any(len(column) not in (0, 16 * count) for column in packed):
        raise WireError(f"an answer of {count} items whose columns have other lengths")
    if sum(run for _, run in answer.tiers) != count or not all(0 <= at < len(keys) for at in answer.at):
        raise WireError(f"an answer of {count} items with other tiers, or keys that were not asked for")
    parents = unpack_keys(answer.parents, STORE_KEY_BYTES) if answer.parents else repeat(_NO_PARENT, count)
    return [
        Found(
            keys[at],
            part,
            None if parent == _NO_PARENT else parent,
            depth,
            exact,
            tier,
            digests[_DIGEST_BYTES * number : _DIGEST_BYTES * (number + 1)],
            view,
        )
        for number, (at, part, parent, depth, exact, tier, view) in enumerate(
            zip(
                answer.at,
                answer.parts,
                parents,
                answer.depths,
                answer.exact,
                unpack_runs(answer.tiers),
                views,
                strict=True,
            )
        )
    ]


def guards_of(answer: Items) -> tuple[list[bytes], bytes]:
    """What the hash of each unchecked item begins with, and the hashes that they should have, in one piece.

    Raises:
        WireError: the columns do not fit together.
    """
    count = len(answer.sizes)
    if len(answer.heads) != HEAD_BYTES * count or len(answer.checksums) != _DIGEST_BYTES * count:
        raise WireError(f"{count} unchecked items whose heads or checksums have other lengths")
    return [answer.heads[at : at + HEAD_BYTES] for at in range(0, len(answer.heads), HEAD_BYTES)], answer.checksums


def get_blocks(pipeline: Pipeline, ask: Ask, into: Sequence[memoryview] | None, *, verify: bool) -> list[Found]:
    """Read blocks over the socket, which the service has checked; `verify`: and compare them with their digests."""
    found = _received(pipeline, ask, Places(ask, into), digests=verify) or []
    if verify:
        for item in found:
            check_digest(item.key, item.data, item.digest)
    return found


def get_unchecked(pipeline: Pipeline, ask: Ask, into: Sequence[memoryview] | None) -> list[Found] | None:
    """Read blocks at which the service has not looked, and check them as they come; None: some are damaged.

    Raises:
        Conflict: they lie encoded, and are to be read checked.
    """
    return _received(pipeline, ask, Places(ask, into), unchecked=True)


def _received(
    pipeline: Pipeline, ask: Ask, places: Places, *, digests: bool = False, unchecked: bool = False
) -> list[Found] | None:
    most = pipeline.welcome.limits.keys
    found: list[Found] = []
    for start in range(0, len(ask.keys), most):
        keys = ask.keys[start : start + most]
        head = ask.head(start, keys, digests=digests, unchecked=unchecked)
        receiver = _Receiver(places, keys, start, unchecked=unchecked)
        got = pipeline.finish(pipeline.begin(Opcode.GET, head, (), ask.deadline), receiver.take)
        if not receiver.sound:
            return None
        found += got
        if not ask.each and len({item.key for item in got}) < len(set(keys)):
            break
    return found


class _Receiver:
    """Receives the answers to one `Get`, each item into its place; `sound`: no unchecked one was damaged."""

    def __init__(self, places: Places, keys: Sequence[bytes], first: int, *, unchecked: bool) -> None:
        self.sound = True
        self._places = places
        self._keys = keys
        self._first = first
        self._unchecked = unchecked

    def take(self, incoming: Incoming) -> list[Found]:
        found: list[Found] = []
        while incoming.more:
            got = incoming.head(wire.Got)
            if sum(got.sizes) != incoming.unread or min(got.sizes, default=1) < 1:
                raise WireError(f"a body of {incoming.unread} bytes for items of {sum(got.sizes)}")
            views = self._places.of(got, self._first)
            heads, checksums = guards_of(got) if self._unchecked else ([], b"")
            self.sound &= b"".join(incoming.body(*views, heads=heads)) == checksums
            found += found_of(got, self._keys, views, got.digests)
        return found


# ---- putting


def put_blocks(
    pipeline: Pipeline, ns: str, blocks: Sequence[Block], deadline: float, *, verify: bool
) -> list[PutOutcome]:
    """Store blocks over the socket, as many requests as the service's limits need, without waiting in between."""
    limits = pipeline.welcome.limits
    turns = []
    for some in requests(blocks, limits.keys, limits.batch_bytes):
        views = [memoryview(block.data).cast("B") for block in some]
        digests = b"".join([xxhash.xxh3_128_digest(view) for view in views]) if verify else b""
        head = wire.Put(digests=digests, **put_head(ns, some, deadline))
        turns.append((pipeline.begin(Opcode.PUT, head, views, deadline), len(some)))
    outcomes: list[PutOutcome] = []
    try:
        while turns:
            turn, count = turns.pop(0)
            answer = pipeline.finish(turn, lambda incoming: incoming.head(wire.Outcomes))
            outcomes += outcomes_of(answer, count)
    finally:
        for turn, _ in turns:
            pipeline.abandon(turn)
    return outcomes


def put_head(ns: str, blocks: Sequence[Block], deadline: float) -> dict[str, Any]:
    """The fields of a `Put` or `Stage` of blocks with one hint."""
    parents = [block.parent or _NO_PARENT for block in blocks]
    hint = blocks[0].hint
    return {
        "ns": ns,
        "keys": pack_keys([block.key for block in blocks]),
        "sizes": [memoryview(block.data).nbytes for block in blocks],
        "parts": [block.part for block in blocks],
        "depths": [block.depth for block in blocks],
        "parents": pack_keys(parents) if any(block.parent is not None for block in blocks) else b"",
        "exact": [block.exact for block in blocks],
        "hint": None if hint is None else asked_of(hint),
        "timeout": remaining(deadline),
    }


def asked_of(hint: Hint) -> wire.Asked:
    """A hint as it is sent."""
    return wire.Asked(hint.priority, hint.priority_ttl, hint.ttl, hint.reuse, hint.session)


def outcomes_of(answer: wire.Outcomes, count: int) -> list[PutOutcome]:
    """What became of so many blocks.

    Raises:
        WireError: the answer is about another number of them.
    """
    if sum(run for _, run in answer.outcomes) != count:
        raise WireError(f"outcomes {answer.outcomes[:8]} of {count} blocks")
    return [PutOutcome(name) for name in unpack_runs(answer.outcomes)]


def requests(blocks: Sequence[Block], most_keys: int, most_bytes: int) -> Iterator[Sequence[Block]]:
    """Consecutive blocks with one hint, within the limits; the parts of one block apart only if they exceed these."""
    sizes = [memoryview(block.data).nbytes for block in blocks]
    start = safe = nbytes = 0
    key = hint = None
    for at, block in enumerate(blocks):
        if block.key != key:
            safe, key = at, block.key
        if at == start:
            hint = block.hint
        # Twice, where what is left after a cut before the block is too much with this part of it.
        while (other := block.hint is not hint and block.hint != hint) or (
            at > start and (at - start >= most_keys or nbytes + sizes[at] > most_bytes)
        ):
            cut = at if other or safe <= start else safe
            yield blocks[start:cut]
            start, nbytes, hint = cut, sum(sizes[cut:at]), blocks[cut].hint
        nbytes += sizes[at]
    if start < len(blocks):
        yield blocks[start:]
