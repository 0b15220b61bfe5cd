"""RemoteTier: blocks on the other side of a network, shared with whoever writes there, over any backend.

put     reserve (what is there?) -> write (each record whole, under its own name) -> commit (this process sees it)
get     acquire (envelopes) -> read (straight into the caller's memory; seal and checksum)

The other side keeps to its own capacity and drops what it likes, when it likes: a block that is there and then gone
is a plain miss. Leases bind this process: it removes nothing that it leases, and others may. Closure is lazy: a block
below one that is gone stays until its own turn, unreachable for `acquire`.

Who notices what, so that nothing is waited for twice:

server is          noticed by                                          then
unreachable        the backend, per address: connecting fails          `TierUnavailable` at once, no attempt for a
                                                                       pause that doubles; one call per pause tries
hanging            the call that waits: TIMEOUT, connection dropped    the store's breaker skips the whole tier
full               the reply to a write                                FULL without sending a byte, for a second
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvtier.errors import ConfigError, TierError
from kvtier.hints import Hint
from kvtier.keys import STORE_KEY_BYTES
from kvtier.metrics import Metrics
from kvtier.remote.backend import Backend, BackendStats
from kvtier.remote.batches import Movers
from kvtier.remote.counting import Counts
from kvtier.remote.envelope import record_name, unpack
from kvtier.remote.negative import Absent
from kvtier.remote.reading import Reader
from kvtier.remote.state import State
from kvtier.remote.writing import Writer
from kvtier.tiers import BlockRef, Done, Handle, Owner, Reservation, Status, Ticket, TierCaps, namespaces_in

__all__ = ["RemoteOptions", "RemoteTier"]

# A clear of very many records takes long; a call that makes no progress ends sooner.
_CLEAR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """How a remote tier works.

    Args:
        timeout: seconds for one exchange of few bytes with the other side.
        slowest: bytes per second that it is given time for beyond that.
        threads: that move bytes, at most.
        absent_ttl: seconds for which a block that was not there is not asked for again; 0: always asked.
        capacity_bytes: what the other side holds, where it does not say itself; 0: unknown.
        largest: bytes of one block that it takes, at most.
        share: bytes of a batch that are worth a thread of their own; fewer threads are less work per byte.
        probe: seconds that a look-up may take before the tier counts as one that gives no answer.
    """

    timeout: float = 2.0
    slowest: float = 16 << 20
    threads: int = 4
    absent_ttl: float = 0.5
    capacity_bytes: int = 0
    largest: int = 256 << 20
    share: int = 16 << 20
    probe: float = 0.05

    def __post_init__(self) -> None:
        positive = {
            "timeout": self.timeout,
            "slowest": self.slowest,
            "largest": self.largest,
            "share": self.share,
            "probe": self.probe,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ConfigError(f"{name} = {value}: expected more than 0")
        if not 1 <= self.threads <= 256:
            raise ConfigError(f"threads = {self.threads}: expected 1 to 256")
        if not (self.absent_ttl >= 0 and self.capacity_bytes >= 0):
            raise ConfigError(
                f"absent_ttl = {self.absent_ttl}, capacity_bytes = {self.capacity_bytes}: expected 0 or more"
            )


class RemoteTier:
    """Implements `kvtier.tiers.Tier` over a backend.

    Look-ups, reservations and removals run in the caller's thread and take one round trip, or end by their limit;
    bytes move in the tier's own threads. Every call is over by its deadline or `RemoteOptions.timeout`, whichever
    comes first.

    Args:
        backend: the other side; closed with the tier.
        options: see `RemoteOptions`.
        metrics: where to count.
        name: the tier's name in metrics and errors.
    """

    def __init__(
        self,
        backend: Backend,
        options: RemoteOptions | None = None,
        *,
        metrics: Metrics | None = None,
        name: str = "remote",
    ) -> None:
        options = options or RemoteOptions()
        self.name = name
        self.caps = TierCaps(
            variable_size=True,
            durable=backend.durable,
            shared=True,
            run=backend.run,
            remote=True,
            probe=options.probe,
            listing=True,
        )
        self._options = options
        self._backend = backend
        movers = Movers(f"kvtier-{name}", options.threads, options.timeout, options.slowest, options.share)
        self._state = State(backend, Counts(metrics or Metrics(), name), movers, Absent(options.absent_ttl))
        self._reader = Reader(self._state)
        self._writer = Writer(self._state, options.largest)
        self._latest = BackendStats(0, 0, options.capacity_bytes)

    # ---- readers

    def contains(self, keys: Sequence[bytes], deadline: float | None = None, *, exact: bool = False) -> Ticket:
        """See `Tier.contains`. Says nothing of bytes: a damaged record is there."""
        return self._reader.contains(keys, deadline, exact=exact)

    def acquire(
        self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None, *, exact: bool = False
    ) -> Ticket:
        """See `Tier.acquire`. Verifies the envelopes; `read` verifies the bytes."""
        return self._reader.acquire(keys, owner, deadline, exact=exact)

    def read(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """See `Tier.read`. When the ticket is done, nobody writes to the buffers any more."""
        return self._reader.read(items, deadline)

    def release(self, handles: Sequence[Handle]) -> None:
        """See `Tier.release`. After `close`, which ended all leases, nothing happens."""
        self._reader.release(handles)

    def hint(self, keys: Sequence[bytes], hints: Sequence[Hint]) -> None:
        """See `Tier.hint`. What leaves is the other side's choice: nothing is done with hints."""

    # ---- writers

    def reserve(
        self,
        refs: Sequence[BlockRef],
        sizes: Sequence[int],
        fmts: Sequence[str],
        owner: Owner,
        hints: Sequence[Hint] | None = None,
    ) -> list[Reservation]:
        """See `Tier.reserve`. Reserves no room on the other side: `write` says whether it had any.

        Raises:
            FormatMismatch: a size, format or key that no record can have.
        """
        return self._writer.reserve(refs, sizes, fmts, owner)

    def write(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        """See `Tier.write`. The buffers must stay as they are until the ticket is done."""
        return self._writer.write(items, deadline)

    def commit(self, handles: Sequence[Handle]) -> None:
        """See `Tier.commit`. Takes no round trip."""
        self._writer.commit(handles)

    def abort(self, handles: Sequence[Handle]) -> None:
        """See `Tier.abort`. What was written is removed soon."""
        self._writer.abort(handles)

    def release_owner(self, owner: Owner) -> None:
        """See `Tier.release_owner`."""
        with self._state.lock:
            leases, reservations = self._state.holds.of_owner(owner)
            ended = self._state.holds.end_leases(leases)
        self._state.removals.add(ended)
        self._writer.abort(reservations)

    # ---- removal

    def remove(self, keys: Sequence[bytes]) -> Ticket:
        """See `Tier.remove`. Descendants become unreachable for `acquire` now, and leave when the other side likes.

        A record that this process leases goes once it does not; where the other side fails then, it stays out of sight
        for this process and is removed when the other side can.
        """
        self._state.require_open()
        names = [record_name(key, exact=exact) for key in keys for exact in (True, False)]
        gone = self._remove(names)
        statuses = [Status.OK if any(pair) else Status.MISS for pair in zip(gone[::2], gone[1::2], strict=True)]
        return self._state.completions.finish(Ticket(), statuses)

    def _remove(self, names: Sequence[bytes]) -> list[bool]:
        """Remove records, leased ones as soon as they are not; which of them this process saw, and were there."""
        holds, lock = self._state.holds, self._state.lock
        with lock:
            wanted = [name for name in dict.fromkeys(names) if not holds.being_written(name)]
            seen = {name for name in wanted if not holds.is_doomed(name)}
            free = holds.doom(wanted)
        spared: Iterable[bytes] = seen.intersection(free)
        try:
            answers = self._backend.remove(free, self._state.movers.limit(None)) if free else []
            spared = free
        finally:
            with lock:
                holds.spare(spared)
        there = seen.difference(free) | {name for name, was in zip(free, answers, strict=True) if was and name in seen}
        return [name in there for name in names]

    def clear(self, ns: int | Collection[int] | None = None) -> Ticket:
        """See `Tier.clear`: all records under this backend's prefix, whoever wrote them. Reservations stay.

        Of namespaces: asks every record which one it is in. What is written meanwhile may stay.
        """
        self._state.require_open()
        wanted = namespaces_in(ns)
        for names in self._names(wanted):
            self._remove(names)
        return self._state.completions.finish(Ticket(), [Status.OK])

    def listed(self, ns: int) -> Iterator[list[bytes]]:
        """See `ListingTier.listed`. Asks every record which namespace it is in; whoever wrote it."""
        self._state.require_open()
        for names in self._names({ns}):
            yield [name[:STORE_KEY_BYTES] for name in names]

    def _names(self, spaces: Collection[int] | None) -> Iterator[list[bytes]]:
        """All records of these namespaces (None: of all), in batches."""
        for names in self._backend.names(self._state.movers.limit(None) + _CLEAR_SECONDS):
            if spaces is None:
                yield names
                continue
            heads = self._backend.heads(names, self._state.movers.limit(None))
            envelopes = zip(names, map(unpack, names, [head or b"" for head in heads]), strict=True)
            yield [name for name, envelope in envelopes if envelope is not None and envelope.ref.ns in spaces]

    # ---- the whole

    def poll(self) -> list[Done]:
        """See `Tier.poll`."""
        return self._state.completions.poll()

    def stats(self) -> dict[str, int]:
        """Of the other side, whoever wrote there, as it last said: blocks, bytes, capacity_bytes (0: nobody knows).

        Of this process: leases, reservations.
        """
        self._state.require_open()
        self._state.removals.settle(self._options.timeout)
        with suppress(TierError):
            self._latest = self._backend.stats(self._state.movers.limit(None))
        latest, capacity = self._latest, self._latest.capacity_bytes or self._options.capacity_bytes
        self._state.counts.occupied(latest.bytes, capacity)
        with self._state.lock:
            leases, reservations = len(self._state.holds.leases), len(self._state.holds.reservations)
        return {
            "blocks": latest.blocks,
            "bytes": latest.bytes,
            "capacity_bytes": capacity,
            "leases": leases,
            "reservations": reservations,
        }

    def flush(self) -> None:
        """See `Tier.flush`: what is committed is on the other side; how safe it is there is set up there."""
        self._state.require_open()
        self._state.removals.retry()
        self._state.removals.settle(self._options.timeout)

    def close(self) -> None:
        """See `Tier.close`. Ends all holds; waits as long as the limit of what is under way."""
        with self._state.lock:
            if self._state.holds.closed:
                return
            self._state.holds.closed = True
        self._state.movers.close()
        self._state.removals.close()
        self._backend.close()
