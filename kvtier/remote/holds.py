"""What this process holds on the other side's records: leases, reservations, and names that it does not see."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from kvtier.errors import LeaseError, TierUnavailable
from kvtier.formats import fidelity
from kvtier.remote.envelope import Envelope
from kvtier.tiers import Handle, Owner

__all__ = ["Holds", "Rank", "RemoteHandle", "rank_of"]

Rank: TypeAlias = tuple[bool, int]
"""Whether a record is exact, and its fidelity."""


class RemoteHandle(Handle):
    """A hold on one record.

    name: of the record. head: its envelope; of a reservation, b"" until it is completely written. fresh: of a
    reservation: nothing was there. rank, twin (the lossy record that an exact one makes superfluous), moves (writes
    under way), superseded (a better one was committed meanwhile): of reservations.
    """

    __slots__ = ("fresh", "head", "moves", "name", "rank", "superseded", "twin")

    def __init__(self, name: bytes, record: Envelope, owner: Owner, head: bytes = b"") -> None:
        super().__init__(record.ref, record.nbytes, record.fmt, owner)
        self.checksum = record.checksum
        self.name = name
        self.head = head
        self.fresh = True
        self.rank = rank_of(record.ref.exact, record.fmt)
        self.twin: bytes | None = None
        self.moves = 0
        self.superseded = False


def rank_of(exact: bool, fmt: str) -> Rank:  # noqa: FBT001
    """A record is replaced only by one of higher rank."""
    return exact, fidelity(fmt)


class Holds:
    """Not thread-safe: the tier's lock covers it.

    Attributes:
        leases, reservations: live handles.
        closed: the tier is; nothing is held any more.

    Invariants:
        1. What is doomed is invisible to this process, and is removed once nobody leases it.
        2. A key that is being written is invisible until `commit`, unless an older record of it is there.
    """

    def __init__(self) -> None:
        self.closed = False
        self.leases: set[RemoteHandle] = set()
        self.reservations: set[RemoteHandle] = set()
        self._leased: Counter[bytes] = Counter()
        self._doomed: set[bytes] = set()
        self._pending: dict[bytes, list[RemoteHandle]] = {}

    def require_open(self) -> None:
        """Raise `TierUnavailable` if the tier is closed."""
        if self.closed:
            raise TierUnavailable("this remote tier is closed: open another one")

    def hides(self, name: bytes) -> bool:
        """Whether this process must not see a record: doomed, or not committed yet."""
        if name in self._doomed:
            return True
        pending = self._pending.get(name[:-1])
        return pending is not None and any(handle.name == name and handle.fresh for handle in pending)

    # ---- leases

    def lease(self, handles: Sequence[RemoteHandle]) -> None:
        """Begin a reader's leases."""
        self.leases.update(handles)
        self.hold(handles)

    def end_leases(self, handles: Sequence[RemoteHandle]) -> list[bytes]:
        """End leases; returns the doomed records that nobody leases any more: remove them."""
        self.leases.difference_update(handles)
        return self.unhold(handles)

    def hold(self, handles: Iterable[RemoteHandle]) -> None:
        """Keep leased records until `unhold`, even if the lease ends meanwhile."""
        self._leased.update(handle.name for handle in handles)

    def unhold(self, handles: Iterable[RemoteHandle]) -> list[bytes]:
        """Undo `hold`; returns the doomed records that nobody leases any more: remove them."""
        ended: list[bytes] = []
        for handle in handles:
            self._leased[handle.name] -= 1
            if not self._leased[handle.name]:
                del self._leased[handle.name]
                if handle.name in self._doomed:
                    ended.append(handle.name)
        return ended

    # ---- records that go

    def doom(self, names: Iterable[bytes]) -> list[bytes]:
        """Hide records for good; returns those that nobody leases: remove them now."""
        wanted = list(names)
        self._doomed.update(wanted)
        return [name for name in wanted if name not in self._leased]

    def is_doomed(self, name: bytes) -> bool:
        """Whether it is to go, and nobody has written it again since."""
        return name in self._doomed

    def spare(self, names: Iterable[bytes]) -> None:
        """They are removed, or written again."""
        self._doomed.difference_update(names)

    def being_written(self, name: bytes) -> bool:
        """Whether this process is about to commit such a record."""
        return any(handle.name == name for handle in self._pending.get(name[:-1], ()))

    # ---- handles

    def require(self, handles: Sequence[Handle], *, leased: bool) -> list[RemoteHandle]:
        """The handles, if they are live, distinct, and leases or reservations as asked.

        Raises:
            LeaseError: one is not.
        """
        live = self.leases if leased else self.reservations
        kind = "lease" if leased else "reservation"
        good = [handle for handle in handles if isinstance(handle, RemoteHandle) and handle in live]
        if len(good) < len(handles):
            bad = next(handle for handle in handles if handle not in live)
            raise LeaseError(
                f"handle of block {bad.ref.key.hex()} (owner {bad.owner!r}) is no live {kind} of this tier: "
                "it ended before, or was never one"
            )
        if len(set(good)) < len(good):
            raise LeaseError(f"the same {kind} twice in a batch of {len(handles)}: each may be used once")
        return good

    def promised(self, key: bytes, rank: Rank) -> bool:
        """Whether a record of this rank or a higher one is being written."""
        return any(handle.rank >= rank for handle in self._pending.get(key, ()))

    def reserve(self, handle: RemoteHandle) -> None:
        """Begin a reservation."""
        self.reservations.add(handle)
        self._pending.setdefault(handle.ref.key, []).append(handle)

    def end_reservation(self, handle: RemoteHandle) -> None:
        """It was committed or aborted."""
        self.reservations.discard(handle)
        pending = self._pending[handle.ref.key]
        pending.remove(handle)
        if not pending:
            del self._pending[handle.ref.key]

    def commit(self, handle: RemoteHandle) -> list[bytes]:
        """Make a written reservation visible; returns what it leaves superfluous."""
        self.end_reservation(handle)
        if handle.superseded:
            return [handle.name]
        self._doomed.discard(handle.name)
        for other in self._pending.get(handle.ref.key, ()):
            # Of one name there is one record: what was written last.
            other.superseded = other.superseded or (other.rank < handle.rank and other.name != handle.name)
        return [] if handle.twin is None else [handle.twin]

    def of_owner(self, owner: Owner) -> tuple[list[RemoteHandle], list[RemoteHandle]]:
        """Leases and reservations of an owner."""
        return (
            [handle for handle in self.leases if handle.owner == owner],
            [handle for handle in self.reservations if handle.owner == owner],
        )
