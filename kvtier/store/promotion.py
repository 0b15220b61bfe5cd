"""The way up: blocks of lower tiers are copied into host, once each, however many requests want them."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.errors import FormatMismatch, LeaseError
from kvtier.metrics import Metrics
from kvtier.store.inflight import InFlight
from kvtier.store.lanes import Steps
from kvtier.store.lease import Lease
from kvtier.store.placement import Placement
from kvtier.store.port import Port
from kvtier.store.recoding import Recoder, Target
from kvtier.tiers import OWN_WORK, AddressableTier, Full, Handle, Status, Tier, expired

__all__ = ["Promoter"]

_OWNER = OWN_WORK + "promote"
# Records of one batch: between batches an operation can end, and others get their turn.
_BATCH = 64
_BATCH_BYTES = 32 << 20


class _Move(NamedTuple):
    """One record on its way: from where, into which reservation, and as what."""

    source: Handle
    slot: Handle
    target: Target


class Promoter:
    """Fetches leased blocks into host.

    Args:
        ports: host first.
        host: where they go.
        inflight: what is being written into host.
        recoder, placement, metrics: the store's.
    """

    def __init__(
        self,
        ports: Sequence[Port],
        host: AddressableTier,
        inflight: InFlight,
        recoder: Recoder,
        placement: Placement,
        metrics: Metrics,
    ) -> None:
        self._gate = ports[0]
        self._ports = {id(port.tier): port for port in ports}
        self._host = host
        self._inflight = inflight
        self._recoder = recoder
        self._placement = placement
        self._metrics = metrics

    def in_host(self, lease: Lease, start: int, stop: int) -> int:
        """How many leading ones of blocks [start, stop) are leased in host in every part."""
        held = lease.part(start, stop)
        away = next((at for at, (tier, _) in enumerate(held) if tier is not self._host), len(held))
        return away // lease.parts

    def away(self, lease: Lease) -> int:
        """How many blocks of a lease are not in host in every part."""
        return sum(name != self._host.name for name in lease.tiers())

    def steps(self, lease: Lease, start: int, stop: int, deadline: float | None) -> Steps[bool]:
        """Bring blocks [start, stop) into host; returns False where host had no space for one."""
        at, end = start * lease.parts, stop * lease.parts
        queued = self._queue(lease.blocks[at:end])
        try:
            while run := self._batch(lease.blocks[at : min(at + _BATCH, end)]):
                tier = run[0][0]
                if tier is not self._host:
                    port, sources = self._ports[id(tier)], [handle for _, handle in run]
                    yield port.loads
                    full = self._promote(port, lease, at, sources, deadline)
                    self._dequeue(queued, port, sum(source.nbytes for source in sources))
                    if any(where is not self._host for where, _ in lease.blocks[at : at + len(run)]):
                        return not full
                at += len(run)
        finally:
            for port, nbytes in queued.items():
                port.reads.ended(nbytes)
        return True

    def _queue(self, blocks: Sequence[tuple[Tier, Handle]]) -> Counter[Port]:
        """Bytes that will be read from each tier, and from now on count as its queue."""
        queued: Counter[Port] = Counter()
        for tier, handle in blocks:
            if tier is not self._host:
                queued[self._ports[id(tier)]] += handle.nbytes
        for port, nbytes in queued.items():
            port.reads.started(nbytes)
        return queued

    @staticmethod
    def _dequeue(queued: Counter[Port], port: Port, nbytes: int) -> None:
        done = min(nbytes, queued[port])
        queued[port] -= done
        port.reads.ended(done)

    @staticmethod
    def _batch(blocks: Sequence[tuple[Tier, Handle]]) -> list[tuple[Tier, Handle]]:
        """The leading blocks that lie in one tier, up to the bytes of one batch."""
        batch: list[tuple[Tier, Handle]] = []
        nbytes = 0
        for tier, handle in blocks:
            nbytes += handle.nbytes
            if batch and (tier is not batch[0][0] or nbytes > _BATCH_BYTES):
                break
            batch.append((tier, handle))
        return batch

    def _promote(self, port: Port, lease: Lease, at: int, sources: list[Handle], deadline: float | None) -> bool:
        """Copy what nobody else copies, wait for the others, and move the lease; returns whether host was full."""
        while True:
            full, mine = self._copy(port, lease, at, sources, deadline)
            arrived = self._move_lease(port, lease, at, sources)
            at, sources = at + arrived, sources[arrived:]
            # Another one's block that did not come: that one was late, or its owner is gone, and this one is neither.
            if full or not sources or mine[arrived] or not lease.blocks or expired(deadline):
                return full
            if sources[0].ref.key in lease.deleted:
                return full

    def _copy(
        self, port: Port, lease: Lease, at: int, sources: Sequence[Handle], deadline: float | None
    ) -> tuple[bool, list[bool]]:
        """One round of it: whether host was full, and which of them were this one's to copy."""
        refs = [source.ref for source in sources]
        claim = self._inflight.claim(refs)
        own = [place for place, mine in enumerate(claim.mine) if mine]
        full = False
        try:
            # Once claimed: from now on a deletion finds it in flight.
            kept = next((place for place, ref in enumerate(refs) if ref.key in lease.deleted), len(refs))
            moving = [(sources[place], (at + place) % lease.parts) for place in own if place < kept]
            if moving:
                full = port.attempt("promote", lambda: self._copy_held(port, lease, moving, deadline), False)
        finally:
            self._gate.take_back(self._inflight.finish([refs[place] for place in own]))
        if claim.theirs:
            self._metrics.joined.labels("load").inc(len(claim.theirs))
            self._inflight.wait(claim.theirs, deadline)
        return full, claim.mine

    def _move_lease(self, port: Port, lease: Lease, at: int, sources: Sequence[Handle]) -> int:
        """Hold what has arrived in host instead; how many leading ones have."""
        # Without a deadline: what has arrived is there, and its memory needs no disk.
        arrived = self._gate.acquire([source.ref.key for source in sources], _OWNER, exact=lease.exact)
        ended: list[Handle] = []
        unused: list[Handle] = []
        for place, (old, new) in enumerate(zip(sources, arrived, strict=False)):
            if lease.swap(at + place, old, self._host, new):
                ended.append(old)
            else:
                unused.append(new)
        port.release(ended)
        self._gate.release(unused)
        return len(arrived)

    def _copy_held(
        self, port: Port, lease: Lease, moving: Sequence[tuple[Handle, int]], deadline: float | None
    ) -> bool:
        """`_copy_up`, of which nothing is left to do where the lease has ended meanwhile: that is no failure."""
        try:
            return self._copy_up(port, moving, lease.parts, deadline)
        except LeaseError:
            if lease.blocks:
                raise
            return False

    def _copy_up(self, port: Port, moving: Sequence[tuple[Handle, int]], parts: int, deadline: float | None) -> bool:
        targets: list[tuple[Handle, Target]] = []
        for source, part in moving:
            target = self._recoder.up(source, self._host, part, parts)
            if target is None:
                # Stored by another version or under another configuration: nobody here can read it.
                port.fell_back("unreadable_format")
                break
            targets.append((source, target))
        results = self._host.reserve(
            [target.ref for _, target in targets],
            [target.nbytes for _, target in targets],
            [target.fmt for _, target in targets],
            _OWNER,
        )
        moves = [
            _Move(source, slot, target)
            for (source, target), slot in zip(targets, results, strict=True)
            if isinstance(slot, Handle)
        ]
        try:
            good = self._fill(port, moves, deadline)
            arrived = moves[:good]
            self._host.seal([move.slot for move in arrived], [_checksum(move) for move in arrived])
            self._host.commit([move.slot for move in arrived])
        finally:
            # What was committed is no reservation any more; the rest (a bad block and its descendants) goes.
            self._host.abort([move.slot for move in moves])
            self._placement.arrived(len(moves))
        return any(isinstance(slot, Full) for slot in results)

    def _fill(self, port: Port, moves: Sequence[_Move], deadline: float | None) -> int:
        """Read into the reservations, through staging where bytes have to be decoded; how many leading ones arrived."""
        done = 0
        while done < len(moves):
            count = self._fitting(port, moves[done:])
            good = self._read(port, moves[done : done + count], deadline)
            done += good
            if good < count:
                break
        return done

    def _fitting(self, port: Port, moves: Sequence[_Move]) -> int:
        """How many leading moves go at a time: as many as staging holds encoded."""
        total = 0
        for at, move in enumerate(moves):
            total += _staged(move, port.tier)
            if at and total > port.staging.limit:
                return at
        return len(moves)

    def _read(self, port: Port, moves: Sequence[_Move], deadline: float | None) -> int:
        with port.staging.take(sum(_staged(move, port.tier) for move in moves)) as staging:
            items: list[tuple[Handle, memoryview]] = []
            offset = 0
            for move in moves:
                size = _staged(move, port.tier)
                items.append((move.source, staging[offset : offset + size] if size else self._host.buffer(move.slot)))
                offset += size
            good = _leading(port.read(items, deadline))
            for at, (move, (source, data)) in enumerate(zip(moves[:good], items, strict=False)):
                if not self._decoded(port, move, data[: source.nbytes]):
                    return at
        return good

    def _decoded(self, port: Port, move: _Move, data: memoryview) -> bool:
        target = move.target
        if target.codec is None:
            return True
        out = self._host.buffer(move.slot)[: target.nbytes]
        try:
            target.codec.decode(data, self._recoder.layout(target.ref.ns), out, target.group)
        except FormatMismatch:
            # Its checksum was right, and yet it is no encoding of a block: damage, counted as such.
            self._metrics.corrupt_blocks.labels(port.name).inc()
            return False
        return True


def _checksum(move: _Move) -> bytes:
    """What is copied as it is keeps its checksum, so that it guards the bytes all the way from the first put."""
    same = move.target.codec is None and move.slot.fmt == move.source.fmt and move.slot.ref[:2] == move.source.ref[:2]
    return move.source.checksum if same else b""


def _leading(statuses: Sequence[Status]) -> int:
    return next((at for at, status in enumerate(statuses) if status is not Status.OK), len(statuses))


def _staged(move: _Move, tier: Tier) -> int:
    if move.target.codec is None:
        return 0
    return -(-move.source.nbytes // tier.caps.align) * tier.caps.align
