"""Ranges: blocks between a store and memory of a host engine in which each lies in several pieces, in calls that wait.

For engines that keep a host cache themselves, want tiers below it, and call from threads of their own; for those that
submit jobs and poll, `Exchange` has the threads. A block is its parts, and a part is a list of (address, bytes):

    part    [K of all layers][V of all layers]      or one range per layer, or one in all: the list says it
    save    ranges -> host, one copy -> the lower tiers, at the pace at which those take it
    load    lower tier -> host (verified) -> ranges, one copy

The store's host tier is staging. A call goes in pieces that are a small share of it, so that one piece is read from the
disk while another is copied. What is late or hangs below touches the store's memory, never the engine's: a part
that did not arrive is left as it was, and no address is used after the call that it was given to.

Blocks are stored as leaves (depth -1), also where the engine would tell their parents: host keeps chains closed, and
one that is longer than the staging memory could not pass through it.
"""

import ctypes
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from time import monotonic
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import CapacityError, ConfigError, FormatMismatch, LeaseError
from kvtier.native.checksum import Bytes
from kvtier.native.copying import copy_runs
from kvtier.native.vectored import addresses
from kvtier.store import Lease, Received, TieredStore
from kvtier.tiers import BlockRef

__all__ = ["Part", "RangeTransfers"]

Part: TypeAlias = Sequence[tuple[int, int]]
"""Where one part of one block lies: address and bytes of each piece, in the order in which the part stores them."""

_RAW = "raw"
_PIECE_BYTES = 16 << 20
# Of host, for one piece: two calls load, each a piece ahead, one saves, a quarter waits for lower tiers.
_PIECES_IN_HOST = 8


class _Fetch(NamedTuple):
    """A piece on its way into host: the lease that holds it, and how many of its blocks arrive."""

    lease: Lease
    arrived: "Future[int]"


class RangeTransfers:
    """Blocks in and out of ranges of memory. Thread-safe; every call waits, and ends by the store's deadlines.

    Keys and parts are block-major, as in `TieredStore`; those of one call are of one chain, parents first.

    Args:
        store: stays the caller's; its host tier holds several blocks.
        ns: namespace of all blocks.
        part_bytes: of each part.
        parts: per block.
        exact: whether what is saved is exact (see `BlockRef`).

    Raises:
        CapacityError: host is too small to be staging.
        ConfigError: host keeps blocks in another format than raw, or a tier keeps several in one object.
    """

    def __init__(self, store: TieredStore, ns: int, part_bytes: int, parts: int = 1, *, exact: bool = True) -> None:
        fmt = store.options.formats.get(store.host.name, _RAW)
        if fmt != _RAW:
            raise ConfigError(f"tiering.host.format = {fmt!r}: blocks that lie in ranges are staged raw; set it to raw")
        runs = next((tier.name for tier in store.lower if tier.caps.run > 1), None)
        if runs is not None:
            raise ConfigError(
                f"tier {runs} keeps several blocks of a chain in one object, and what lies in ranges is stored without "
                "its place in a chain; say run=1 in tiering.remote.options"
            )
        # As host allots it.
        align = store.host.caps.align
        block_bytes = -(-part_bytes // align) * align * parts
        capacity = store.host.stats()["capacity_bytes"]
        if capacity < _PIECES_IN_HOST * block_bytes:
            raise CapacityError(
                f"tiering.host.capacity = {capacity} bytes: as staging for blocks of {block_bytes} bytes it needs "
                f"{_PIECES_IN_HOST * block_bytes} at least"
            )
        self._store = store
        self._ns = ns
        self._part_bytes = part_bytes
        self._parts = parts
        self._exact = exact
        self._piece = max(min(_PIECE_BYTES, capacity // _PIECES_IN_HOST) // block_bytes, 1)
        self._owners = count()
        self._stuck_at = self._stuck_until = 0.0
        self._saving = threading.Lock()

    def present(self, keys: Sequence[bytes]) -> int:
        """Leading blocks that some tier has. A hint: no lease, no recency."""
        return len(self._store.find(keys, parts=self._parts).result().tiers)

    def known(self, keys: Sequence[bytes]) -> int:
        """Leading blocks that need no saving; for them this is a use, which renews their recency."""
        known = self._store.wanted(keys, exact=self._exact, parts=self._parts)
        self._store.renew(keys[: known * self._parts])
        return known

    def load(self, keys: Sequence[bytes], targets: Sequence[Part]) -> int:
        """Fill the ranges with the longest leading run of blocks that arrives, verified.

        Returns:
            How many blocks arrived. The ranges of all others are as they were.

        Raises:
            FormatMismatch: a part has other bytes than the store keeps, or the numbers do not fit.
        """
        self._check(keys, targets)
        blocks = len(keys) // self._parts
        done = stop = 0
        ahead = self._fetch(keys, 0)
        try:
            while done == stop < blocks:
                stop = min(done + self._piece, blocks)
                # Read while the piece before is copied.
                fetch, ahead = ahead, self._fetch(keys, stop)
                done += self._land(fetch, targets[done * self._parts : stop * self._parts])
        finally:
            self._store.release(ahead.lease)
        return done

    def save(self, keys: Sequence[bytes], sources: Sequence[Part]) -> int:
        """Store blocks that are not `known`, parents first, no faster than the lower tiers take them.

        Returns:
            How many leading blocks host has taken, or some tier had. A lower tier that does not get on ends it, and for
            a while nobody waits for it again.

        Raises:
            FormatMismatch: see `load`.
        """
        self._check(keys, sources)
        blocks = len(keys) // self._parts
        # One after the other, so that what waits below is what is counted.
        with self._saving:
            done = self.known(keys)
            while done < blocks:
                at, end = done * self._parts, min(done + self._piece, blocks) * self._parts
                if not self._gets_on(max(self._store.options.writeback_bytes - (end - at) * self._part_bytes, 0)):
                    self._drop("lower_tiers_stuck", blocks - done)
                    break
                good = self._put_patiently(keys[at:end], sources[at:end])
                done += good
                if good * self._parts < end - at:
                    break
        return done

    def settle(self) -> bool:
        """Wait until lower tiers have taken or refused what was saved; False: one does not get on, as in `save`."""
        with self._saving:
            return self._gets_on(0)

    # ---- in pieces

    def _check(self, keys: Sequence[object], parts: Sequence[Part]) -> None:
        if len(keys) != len(parts) or len(keys) % self._parts:
            raise FormatMismatch(
                f"{len(keys)} keys and {len(parts)} parts, {self._parts} parts per block: expected one of each"
            )
        for part in parts:
            nbytes = sum(size for _, size in part)
            if nbytes != self._part_bytes:
                raise FormatMismatch(f"{nbytes} bytes in {len(part)} ranges: expected {self._part_bytes}")

    def _fetch(self, keys: Sequence[bytes], start: int) -> _Fetch:
        """Lease the piece that begins at a block and have it brought into host."""
        piece = keys[start * self._parts : (start + self._piece) * self._parts]
        owner = f"ranges.{next(self._owners)}"
        lease = self._store.acquire(piece, owner, parts=self._parts).result()
        return _Fetch(lease, self._store.fetch(lease, 0, len(lease)))

    def _land(self, fetch: _Fetch, targets: Sequence[Part]) -> int:
        """Copy what arrived, and end the lease."""
        try:
            good = fetch.arrived.result()
            buffers = [self._store.host.buffer(handle) for _, handle in fetch.lease.part(0, good)]
            ours, theirs, sizes = _runs(addresses(list[Bytes](buffers)), targets[: len(buffers)])
            copy_runs(theirs, ours, sizes)
        except LeaseError:
            # The store was closed meanwhile.
            return 0
        finally:
            self._store.release(fetch.lease)
        return good

    def _gets_on(self, most: int) -> bool:
        """Wait until no more than `most` bytes wait for lower tiers; False: those do not get on."""
        store = self._store
        if store.waiting_bytes <= most:
            return True
        start, before = monotonic(), self._written()
        if start < self._stuck_until and before == self._stuck_at:
            return False
        store.settle()
        # What is dropped makes room, too.
        in_vain = monotonic() - start >= store.options.load_deadline and self._written() == before
        gets_on = store.waiting_bytes <= most and not in_vain
        if not gets_on:
            self._stuck_at, self._stuck_until = self._written(), monotonic() + store.options.breaker_pause
        return gets_on

    def _written(self) -> float:
        """Bytes that lower tiers have taken so far."""
        return sum(self._store.metrics.value("written_bytes_total", tier=tier.name) for tier in self._store.lower)

    def _put_patiently(self, keys: Sequence[bytes], sources: Sequence[Part]) -> int:
        """How many leading blocks host took. What waits for lower tiers is leased, and makes room once they have it."""
        good = self._put(keys, sources)
        at = good * self._parts
        if at < len(keys) and self._gets_on(0):
            good += self._put(keys[at:], sources[at:])
        return good

    def _put(self, keys: Sequence[bytes], sources: Sequence[Part]) -> int:
        if all(len(part) == 1 for part in sources):
            # Copied and checksummed in one pass.
            return self._stored(keys, [_bytes_at(*part[0]) for part in sources], ())
        rooms = self._store.private.room([self._part_bytes] * len(keys))
        if not rooms:
            self._drop("no_room", len(keys) // self._parts)
            return 0
        try:
            buffers = [self._store.host.buffer(room)[: self._part_bytes] for room in rooms]
            ours, theirs, sizes = _runs(addresses(list[Bytes](buffers)), sources)
            copy_runs(ours, theirs, sizes)
            return self._stored(keys, buffers, [Received(room) for room in rooms])
        except LeaseError:
            # The store was closed meanwhile.
            return 0
        finally:
            self._store.private.give_up(rooms)

    def _stored(self, keys: Sequence[bytes], buffers: Sequence[memoryview], owned: Sequence[Received]) -> int:
        items = [
            (BlockRef(key, self._ns, -1, None, self._exact), data) for key, data in zip(keys, buffers, strict=True)
        ]
        outcomes = self._store.put_each(items, parts=self._parts, owned=owned).result()
        return next((at for at, outcome in enumerate(outcomes) if outcome == "dropped"), len(outcomes))

    def _drop(self, reason: str, blocks: int) -> None:
        self._store.metrics.dropped_blocks.labels(self._store.host.name, reason).inc(blocks)


def _bytes_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _runs(
    addresses: Sequence[int], parts: Sequence[Part]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Where each range lies in the store's memory and in the engine's, and its bytes; int64 [ranges] each."""
    ours: list[int] = []
    for address, part in zip(addresses, parts, strict=True):
        for _, nbytes in part:
            ours.append(address)
            address += nbytes  # noqa: PLW2901
    theirs = np.array([place for part in parts for place, _ in part], np.int64)
    sizes = np.array([nbytes for part in parts for _, nbytes in part], np.int64)
    return np.array(ours, np.int64), theirs, sizes
