"""Admission: which blocks are worth writing to a tier that wears out."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvtier.errors import CapacityError
from kvtier.hints import Hint
from kvtier.policies.ghosts import GhostList

__all__ = ["AdmissionPolicy", "AlwaysAdmit", "BudgetedAdmission", "SecondTouch", "Weighed", "WriteMeter"]

_DAY = 86_400.0
_REMEMBERED = 1 << 18
_MOST_DAYS = 2


class WriteMeter(NamedTuple):
    """Bytes written that run ahead of a budget, which accrues evenly; nobody saves up what he does not write.

    per_day: the budget in bytes. ahead: bytes at the time `since`, in seconds.
    """

    per_day: float
    ahead: float = 0.0
    since: float = 0.0

    def at(self, now: float) -> "WriteMeter":
        """The meter after nothing was written up to `now`.

        A clock that was set back starts anew from there. More than two days' budget is never owed, so that a budget
        that was lowered, or that somebody did not keep to, stops nobody for longer.
        """
        accrued = self.per_day * max(now - self.since, 0.0) / _DAY
        return WriteMeter(self.per_day, max(min(self.ahead, _MOST_DAYS * self.per_day) - accrued, 0.0), now)

    def charged(self, nbytes: float, now: float) -> "WriteMeter":
        """The meter after so many bytes were written at `now`."""
        meter = self.at(now)
        return meter._replace(ahead=meter.ahead + nbytes)


class AdmissionPolicy(Protocol):
    """Decides per block whether a lower tier may be given it. Not thread-safe: its caller takes turns."""

    def admit(self, keys: Sequence[bytes], nbytes: Sequence[int], hints: Sequence[Hint]) -> list[bool]:
        """One verdict per block, which is touched by being asked about. What is admitted counts as written."""
        ...


class AlwaysAdmit:
    """Everything is written."""

    def admit(self, keys: Sequence[bytes], nbytes: Sequence[int], hints: Sequence[Hint]) -> list[bool]:
        """See `AdmissionPolicy.admit`."""
        return [True] * len(keys)


class SecondTouch:
    """A block is written at its second touch; at the first where `reuse` is likely, never where it is none.

    Writes a quarter to a half of the bytes, and gives up as much of the lower tier's hits in chats, almost none in
    agent sessions.

    Args:
        capacity: keys seen once that are remembered; the oldest is forgotten first. About 200 bytes each.

    Raises:
        CapacityError: no key.
    """

    def __init__(self, capacity: int = _REMEMBERED) -> None:
        if capacity < 1:
            raise CapacityError(f"second touch that remembers {capacity} keys: expected at least one")
        self._seen = GhostList(capacity)

    def admit(self, keys: Sequence[bytes], nbytes: Sequence[int], hints: Sequence[Hint]) -> list[bool]:
        """See `AdmissionPolicy.admit`."""
        return [self._admit(key, hint) for key, hint in zip(keys, hints, strict=True)]

    def _admit(self, key: bytes, hint: Hint) -> bool:
        if hint.reuse == "none":
            return False
        if self._seen.discard(key) or hint.reuse == "likely":
            return True
        self._seen.add(key)
        return False


class Weighed(NamedTuple):
    """What a budget says of a batch, one verdict per block.

    worth: it is to be written wherever that costs nothing. paid: the budget has the bytes for it as well.
    """

    worth: list[bool]
    paid: list[bool]


class BudgetedAdmission:
    """Writes at the first touch while a daily budget lasts, and asks a policy while it runs ahead of time.

    The budget accrues evenly. Writes may run ahead of it by an hour's share before the policy decides, and by a whole
    day's before no bytes at all are admitted; so no 24 hours see more than twice the budget, and on average a day sees
    no more than the budget. What has no reuse is written only if the policy says so. A block of 0 bytes costs nothing,
    however far ahead the others are.

    With `ahead`, others write against the same budget: what they are about to write, and so cannot be known here, may
    come on top, and is made up for.

    Args:
        bytes_per_day: the budget.
        clock: seconds.
        policy: what is asked while the budget runs ahead, about every block, so that it knows what came before;
            second touch by default.
        strict: the policy also decides while the budget lasts.
        ahead: by how many bytes those written, here and elsewhere, run ahead of the budget, and those admitted here
            that are still to be written with them; asked once per batch. None: what is admitted counts as written.

    Raises:
        CapacityError: no byte.
    """

    def __init__(
        self,
        bytes_per_day: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        policy: AdmissionPolicy | None = None,
        strict: bool = False,
        ahead: Callable[[], float] | None = None,
    ) -> None:
        if bytes_per_day < 1:
            raise CapacityError(f"write budget of {bytes_per_day} bytes per day: expected at least one")
        self._budget = bytes_per_day
        self._clock = clock
        self._policy = SecondTouch() if policy is None else policy
        self._strict = strict
        self._counted = ahead
        self._meter = WriteMeter(bytes_per_day, 0.0 if ahead is None else ahead(), clock())
        self.written = 0

    @property
    def ahead_bytes(self) -> float:
        """By how much the bytes written run ahead of the budget that has accrued, as far as the last batch knew."""
        return self._meter.at(self._clock()).ahead

    @property
    def tight(self) -> bool:
        """Whether the bytes written run so far ahead that the policy decides."""
        return self.ahead_bytes > self._budget / 24

    def admit(self, keys: Sequence[bytes], nbytes: Sequence[int], hints: Sequence[Hint]) -> list[bool]:
        """See `AdmissionPolicy.admit`."""
        return self.weigh(keys, nbytes, hints).paid

    def weigh(self, keys: Sequence[bytes], nbytes: Sequence[int], hints: Sequence[Hint]) -> Weighed:
        """`admit`, which also tells what lacks nothing but the bytes. What is paid counts as written."""
        now = self._clock()
        ahead = self._meter.at(now).ahead if self._counted is None else self._counted()
        weighed = Weighed([], [])
        for size, hint, asked in zip(nbytes, hints, self._policy.admit(keys, nbytes, hints), strict=True):
            loose = not self._strict and ahead <= self._budget / 24 and hint.reuse != "none"
            worth = loose or asked
            paid = worth and (not size or ahead + size <= self._budget)
            if paid:
                ahead += size
                self.written += size
            weighed.worth.append(worth)
            weighed.paid.append(paid)
        self._meter = WriteMeter(self._budget, ahead, now)
        return weighed
