"""What this process holds: leases, reservations, and the pages that they keep from being reused."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from kvtier.errors import LeaseError, TierUnavailable
from kvtier.formats import fidelity
from kvtier.hints import Hint
from kvtier.nvme.extents import Extent
from kvtier.nvme.ledger import Record
from kvtier.tiers import BlockRef, Handle, Owner

__all__ = ["Holds", "NvmeHandle", "Rank", "record_rank"]


Rank: TypeAlias = tuple[bool, int]
"""Whether a record is exact, and its fidelity."""


class NvmeHandle(Handle):
    """A hold on extents.

    `checksum` of a reservation: empty until it is written. `moves`: writes under way. `hint`, `rank`: of reservations.
    """

    __slots__ = ("extents", "hint", "moves", "rank")

    def __init__(
        self,
        ref: BlockRef,
        nbytes: int,
        fmt: str,
        owner: Owner,
        extents: tuple[Extent, ...],
        *,
        checksum: bytes = b"",
        hint: Hint | None = None,
        rank: Rank = (False, 0),
    ) -> None:
        # Not through `super()`: this is made once per block of every batch.
        self.ref = ref
        self.nbytes = nbytes
        self.fmt = fmt
        self.owner = owner
        self.extents = extents
        self.checksum = checksum
        self.hint = hint
        self.rank = rank
        self.moves = 0

    @property
    def page(self) -> int:
        """The first page."""
        return self.extents[0].page


def record_rank(exact: bool, fmt: str) -> Rank:  # noqa: FBT001
    """A record is replaced only by one of higher rank."""
    return exact, fidelity(fmt)


class _Lease:
    """How often a record's pages are leased or read. `removed`: its last lease frees them."""

    __slots__ = ("count", "extents", "removed", "row")

    def __init__(self, extents: tuple[Extent, ...], row: int) -> None:
        self.count = 1
        self.extents = extents
        self.row = row
        self.removed = False


class Holds:
    """Not thread-safe: the tier's lock covers it.

    A record is named by its first page, which is unique among all that is not free.

    Attributes:
        leases, reservations: live handles.
        closed: the tier is; all holds have ended.
        pending: ranks of the reservations of each key, from before they have pages.

    Invariants:
        1. A page that is leased or doomed gets no new lease of a later record before it is neither.
        2. What is doomed has no lease and gets none: its record is being dropped by a transaction under way.
    """

    def __init__(self) -> None:
        self.closed = False
        self._pid = os.getpid()
        self.leases: set[NvmeHandle] = set()
        self.reservations: set[NvmeHandle] = set()
        self.pending: dict[bytes, list[Rank]] = {}
        self._by_page: dict[int, _Lease] = {}
        self._doomed: Counter[int] = Counter()

    def require_open(self) -> None:
        """Raise `TierUnavailable` if the tier is closed, or this is a child of `fork`, which has no threads of it."""
        if self.closed:
            raise TierUnavailable("this NVMe tier is closed: open another one")
        if os.getpid() != self._pid:
            raise TierUnavailable("this NVMe tier was opened before a fork: open one in a process that is spawned")

    # ---- leases

    def lease(self, handles: Sequence[NvmeHandle], rows: Sequence[int]) -> None:
        """Begin a reader's leases; `rows` are the records'."""
        self.leases.update(handles)
        by_page = self._by_page
        for handle, row in zip(handles, rows, strict=True):
            page = handle.extents[0][0]
            if page in by_page:
                by_page[page].count += 1
            else:
                by_page[page] = _Lease(handle.extents, row)

    def end_leases(self, handles: Iterable[NvmeHandle]) -> list[Extent]:
        """End leases; returns the pages of removed records that this frees."""
        self.leases.difference_update(handles)
        return self.unhold(handles)

    def hold(self, handles: Iterable[NvmeHandle]) -> None:
        """Keep leased pages until `unhold`, even if the lease ends meanwhile."""
        for handle in handles:
            self._by_page[handle.page].count += 1

    def unhold(self, handles: Iterable[NvmeHandle]) -> list[Extent]:
        """Undo `hold`; returns the pages of removed records that this frees."""
        freed: list[Extent] = []
        for handle in handles:
            page = handle.extents[0][0]
            lease = self._by_page[page]
            lease.count -= 1
            if not lease.count:
                del self._by_page[page]
                if lease.removed:
                    freed += lease.extents
        return freed

    def leased_rows(self) -> list[int]:
        """Rows of all leased records."""
        return [lease.row for lease in self._by_page.values()]

    # ---- records that go

    def is_doomed(self, record: Record) -> bool:
        """Whether the record is being dropped."""
        return record.page in self._doomed

    def doom(self, record: Record) -> bool:
        """Nobody may lease it from now on; False if somebody has."""
        if record.page in self._by_page:
            return False
        self._doomed[record.page] += 1
        return True

    def spare(self, pages: Collection[int]) -> None:
        """The transaction that dooms these is over."""
        for page in pages:
            self._doomed[page] -= 1
            if not self._doomed[page]:
                del self._doomed[page]

    def mark_removed(self, page: int, *, removed: bool) -> None:
        """A leased record is dropped from the index: its pages stay until its last lease ends."""
        if page in self._by_page:
            self._by_page[page].removed = removed

    # ---- handles

    def require(self, handles: Sequence[Handle], *, leased: bool) -> list[NvmeHandle]:
        """The handles, if they are live, distinct, and leases or reservations as asked.

        Raises:
            LeaseError: one is not.
        """
        live = self.leases if leased else self.reservations
        kind = "lease" if leased else "reservation"
        good = [handle for handle in handles if isinstance(handle, NvmeHandle) and handle in live]
        if len(good) < len(handles):
            bad = next(handle for handle in handles if handle not in live)
            raise LeaseError(
                f"handle of block {bad.ref.key.hex()} (owner {bad.owner!r}) is no live {kind} of this tier: "
                "it ended before, or was never one"
            )
        if len(set(good)) < len(good):
            raise LeaseError(f"the same {kind} twice in a batch of {len(handles)}: each may be used once")
        return good

    def promise(self, key: bytes, rank: Rank) -> bool:
        """A record of this rank is about to be written; False if one of no lower rank is already."""
        ranks = self.pending.get(key)
        if ranks is None:
            self.pending[key] = [rank]
        elif max(ranks) >= rank:
            return False
        else:
            ranks.append(rank)
        return True

    def break_promise(self, key: bytes, rank: Rank) -> None:
        """It was written, or will not be."""
        ranks = self.pending[key]
        if len(ranks) == 1:
            del self.pending[key]
        else:
            ranks.remove(rank)

    def end_reservations(self, handles: Iterable[NvmeHandle]) -> None:
        """They were committed or aborted."""
        self.reservations.difference_update(handles)
        for handle in handles:
            self.break_promise(handle.ref.key, handle.rank)

    def of_owner(self, owner: Owner) -> tuple[list[NvmeHandle], list[NvmeHandle]]:
        """Leases and reservations of an owner."""
        return (
            [handle for handle in self.leases if handle.owner == owner],
            [handle for handle in self.reservations if handle.owner == owner],
        )
