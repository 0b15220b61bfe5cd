"""Putting: raw blocks into host, encoded as host keeps them, all parts of a block or none."""

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.errors import FormatMismatch
from kvtier.hints import NO_HINT, Hint
from kvtier.keys import STORE_KEY_BYTES, namespace_digest
from kvtier.metrics import Metrics
from kvtier.store.gateway import GatewayTier
from kvtier.store.inflight import InFlight
from kvtier.store.placement import Placed, Placement
from kvtier.store.port import Port
from kvtier.store.recoding import Recoder, Target
from kvtier.store.results import PutOutcome
from kvtier.tiers import OWN_WORK, BlockRef, Full, Handle, Reservation, Status, checksum_head, expired

__all__ = ["Item", "Putter", "Received"]

_OWNER = OWN_WORK + "put"
_DEEPEST = (1 << 31) - 1


class Received(NamedTuple):
    """Bytes that came straight into host memory.

    handle: the reservation that they lie in (`PrivateObjects.room`). head, checksum: xxh3_128(head + bytes), where they
    were hashed on the way; it is the record's if the head is.
    """

    handle: Handle
    head: bytes = b""
    checksum: bytes = b""


class Item(NamedTuple):
    """One part of one block to be put: its bytes are raw.

    owned: the memory in host that they lie in, which it takes over.
    """

    ref: BlockRef
    data: memoryview
    target: Target
    hint: Hint
    owned: Received | None = None


class Putter:
    """Stores blocks in host and hands them to whoever places them below.

    Args:
        host, gate: the host tier and its port.
        inflight: what is being written into host.
        recoder, placement, metrics: the store's.
    """

    def __init__(
        self,
        gate: Port,
        host: GatewayTier,
        inflight: InFlight,
        recoder: Recoder,
        placement: Placement,
        metrics: Metrics,
    ) -> None:
        self._gate = gate
        self._host = host
        self._inflight = inflight
        self._recoder = recoder
        self._placement = placement
        self._metrics = metrics

    def items(
        self,
        raw: Sequence[tuple[BlockRef, memoryview]],
        hints: Sequence[Hint] | None,
        parts: int,
        owned: Sequence[Received | None] = (),
    ) -> list[Item]:
        """Check a batch, before anything changes.

        Raises:
            FormatMismatch: a block has another size than its layout says or no proper name, or the numbers do not fit.
        """
        count = len(raw)
        hinted, memory = [NO_HINT] * count if hints is None else hints, owned or [None] * count
        if parts < 1 or count % parts or not len(hinted) == len(memory) == count:
            raise FormatMismatch(
                f"{count} items, {len(hinted)} hints, {len(memory)} with memory, {parts} parts per block: "
                "expected whole blocks and one of each per item"
            )
        for ns in {ref.ns for ref, _ in raw}:
            _check_namespace(ns)
        checked = []
        for at, ((ref, data), hint, mine) in enumerate(zip(raw, hinted, memory, strict=True)):
            _check_ref(ref)
            self._recoder.check(ref, data.nbytes, at % parts, parts)
            target = self._recoder.of_raw(self._host, ref, data.nbytes, at % parts, parts)
            checked.append(Item(ref, data, target, hint, mine))
        return checked

    def put(self, items: Sequence[Item], parts: int, deadline: float | None = None) -> list[PutOutcome]:
        """Store what is not there or on its way; runs in the thread of puts. Returns what became of each block.

        At the deadline nothing is begun any more; what has begun is finished.
        """
        if expired(deadline):
            self._gate.drop("late", len(items))
            return self._counted(["dropped"] * (len(items) // parts))
        refs = [item.target.ref for item in items]
        mine = self._inflight.claim(refs).mine
        claimed = [item for item, own in zip(items, mine, strict=True) if own]
        try:
            done = self._gate.attempt("put", lambda: self._store(items, claimed, parts), None)
            stored, bad = done or (set(), {item.ref.key for item in claimed})
        finally:
            self._gate.take_back(self._inflight.finish([item.target.ref for item in claimed]))
        if self._placement.watches_puts:
            good = [Placed(item.ref, item.data.nbytes, item.hint) for item in items if item.ref.key not in bad]
            self._placement.stored(good)
        self._placement.arrived(len(claimed))
        return self._counted(_outcomes(items, parts, stored, bad))

    def _counted(self, outcomes: list[PutOutcome]) -> list[PutOutcome]:
        for outcome in set(outcomes):
            self._metrics.put_blocks.labels(outcome).inc(outcomes.count(outcome))
        if "joined" in outcomes:
            self._metrics.joined.labels("put").inc(outcomes.count("joined"))
        return outcomes

    def _store(self, batch: Sequence[Item], items: Sequence[Item], parts: int) -> tuple[set[bytes], set[bytes]]:
        """Store those `items` of a batch that nobody else does: keys that were stored, and keys that were dropped."""
        slots = self._reserve(items)
        handles = left = [slot for slot in slots if isinstance(slot, Handle)]
        try:
            bad = {item.ref.key for item, slot in zip(items, slots, strict=True) if isinstance(slot, Full)}
            _spread(batch, parts, bad)
            bad |= self._fill(items, slots, bad)
            _spread(batch, parts, bad)
            good = [handle for handle in handles if handle.ref.key not in bad] if bad else handles
            self._host.commit(good)
            left = [handle for handle in handles if handle.ref.key in bad] if bad else []
        finally:
            if left:
                # What was committed is no reservation any more.
                self._host.abort(left)
        return {handle.ref.key for handle in good}, bad

    def _reserve(self, items: Sequence[Item]) -> list[Reservation]:
        targets, hints = [item.target for item in items], [item.hint for item in items]
        refs = [target.ref for target in targets]
        sizes, fmts = [target.nbytes for target in targets], [target.fmt for target in targets]
        there = [item.owned.handle for item in items if item.owned is not None and item.target.codec is None]
        if [handle.nbytes for handle in there] == sizes and [handle.fmt for handle in there] == fmts:
            # The bytes are to stay as they are: they stay where they are.
            return self._host.rename(there, refs, _OWNER, hints)
        return self._host.reserve(refs, sizes, fmts, _OWNER, hints)

    def _fill(self, items: Sequence[Item], slots: Sequence[Reservation], skip: set[bytes]) -> set[bytes]:
        """Write or encode into the reservations; returns the keys that could not be."""
        plain: list[tuple[Handle, memoryview]] = []
        moved: list[tuple[Handle, Received]] = []
        encoded: list[Handle] = []
        bad: set[bytes] = set()
        for item, slot in zip(items, slots, strict=True):
            if not isinstance(slot, Handle) or item.ref.key in skip:
                continue
            if item.owned is not None and item.owned.handle is slot:
                moved.append((slot, item.owned))
            elif item.target.codec is None:
                plain.append((slot, item.data))
            elif self._encode(item, slot):
                encoded.append(slot)
            else:
                bad.add(item.ref.key)
        statuses = self._host.write(plain).wait().statuses if plain else ()
        if moved or encoded:
            sums = [owned.checksum if owned.head == checksum_head(slot.ref, slot.fmt) else b"" for slot, owned in moved]
            self._host.seal([*encoded, *(slot for slot, _ in moved)], [*([b""] * len(encoded)), *sums])
        return bad | {
            slot.ref.key for (slot, _), status in zip(plain, statuses, strict=True) if status is not Status.OK
        }

    def _encode(self, item: Item, slot: Handle) -> bool:
        target = item.target
        if target.codec is None:
            return False
        try:
            out = self._host.buffer(slot)[: target.nbytes]
            target.codec.encode(item.data, self._recoder.layout(item.ref.ns), out, target.group)
        except FormatMismatch:
            self._gate.drop("unencodable", 1)
            return False
        return True


def _outcomes(items: Sequence[Item], parts: int, stored: set[bytes], bad: set[bytes]) -> list[PutOutcome]:
    """What became of each block; one key twice in a batch is stored once."""
    if len(stored) == len(items) and not bad:
        return ["stored"] * (len(items) // parts)
    outcomes: list[PutOutcome] = []
    left = set(stored)
    for at in range(0, len(items), parts):
        keys = {item.ref.key for item in items[at : at + parts]}
        outcomes.append("dropped" if keys & bad else "stored" if keys & left else "joined")
        left -= keys
    return outcomes


def _check_ref(ref: BlockRef) -> None:
    # One bad name would cost all that are written to a disk together with it.
    key, _, depth, parent, _ = ref
    if not _is_key(key) or not (parent is None or _is_key(parent)):
        raise FormatMismatch(f"key {key!r}, parent {parent!r}: expected {STORE_KEY_BYTES} bytes each")
    if not -1 <= depth <= _DEEPEST:
        raise FormatMismatch(f"block {key.hex()} at depth {depth}: expected -1 (unknown) to {_DEEPEST}")


def _is_key(key: object) -> bool:
    return isinstance(key, bytes) and len(key) == STORE_KEY_BYTES


def _check_namespace(ns: int) -> None:
    try:
        namespace_digest(ns)
    except IndexError:
        raise FormatMismatch(f"namespace {ns}: expected an index that kvtier.keys.namespace_index gave out") from None


def _spread(items: Sequence[Item], parts: int, bad: set[bytes]) -> None:
    """Add what falls with the bad keys: the other parts of their blocks, and the descendants in the batch."""
    for at in range(0, len(items) if bad else 0, parts):
        block = items[at : at + parts]
        if any(item.ref.key in bad or item.ref.parent in bad for item in block):
            bad.update(item.ref.key for item in block)
