"""Hints: what a caller knows of a block's future. They order evictions and admissions, never correctness.

A wrong hint costs a refetch or a recomputation, never data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvtier.errors import RequestError

__all__ = ["NO_HINT", "PRIORITY_SECONDS", "Hint", "RequestHints", "Reuse"]

Reuse: TypeAlias = Literal["unknown", "none", "likely"]
_REUSES = ("unknown", "none", "likely")

PRIORITY_SECONDS = 600.0
"""How long a priority holds without renewal: a dead high-priority block must not fill the cache."""


def _check(*, priority: float, priority_ttl: float, ttl: float | None) -> None:
    if not priority > 0:
        raise RequestError(f"priority {priority}: expected a weight above 0; 1 is ordinary, 4 ages four times slower")
    if not priority_ttl > 0 or (ttl is not None and not ttl >= 0):
        raise RequestError(f"priority_ttl {priority_ttl} s, ttl {ttl} s: expected seconds, above 0 and at least 0")


@dataclass(frozen=True, slots=True)
class Hint:
    """What is known of one block.

    Args:
        priority: weight of its age: a block of priority 4 counts as four times younger than it is. inf is strict.
        priority_ttl: seconds after which the priority is 1 again, unless a use or a hint renews it.
        ttl: seconds after its last use when the block is of no more use; None: unknown.
        reuse: `none`: will not be used again; `likely`: worth writing at the first touch.
        session: conversation that the block belongs to.
    """

    priority: float = 1.0
    priority_ttl: float = PRIORITY_SECONDS
    ttl: float | None = None
    reuse: Reuse = "unknown"
    session: str | None = None

    def __post_init__(self) -> None:
        _check(priority=self.priority, priority_ttl=self.priority_ttl, ttl=self.ttl)
        if self.reuse not in _REUSES:
            raise RequestError(f"reuse {self.reuse!r}: expected one of {', '.join(_REUSES)}")


NO_HINT = Hint()


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What is known of a request's blocks, which are told apart by depth (0: the first block of the prompt).

    Args:
        priority, priority_ttl, ttl, session: see `Hint`; they hold for all blocks of the request.
        reuse: one value for all blocks, or one per block from depth 0 on (`unknown` beyond its end).
        dead_from_depth: blocks from this depth on have `reuse = none`; those before are often everybody's.
        end_of_session: no further turn follows: what belongs to the session alone has `reuse = none`.
    """

    priority: float = 1.0
    priority_ttl: float = PRIORITY_SECONDS
    ttl: float | None = None
    reuse: Reuse | Sequence[Reuse] = "unknown"
    dead_from_depth: int | None = None
    session: str | None = None
    end_of_session: bool = False

    def __post_init__(self) -> None:
        _check(priority=self.priority, priority_ttl=self.priority_ttl, ttl=self.ttl)
        unknown = {self.reuse} - set(_REUSES) if isinstance(self.reuse, str) else set(self.reuse) - set(_REUSES)
        if unknown:
            raise RequestError(f"reuse {sorted(unknown)}: expected {', '.join(_REUSES)}")
        if self.dead_from_depth is not None and self.dead_from_depth < 0:
            raise RequestError(f"dead_from_depth {self.dead_from_depth}: expected a depth, 0 or more")
        if self.end_of_session and self.session is None:
            raise RequestError("end_of_session without session: name the session that ends")

    def at(self, depth: int) -> Hint:
        """The hint of the block at `depth`."""
        return Hint(self.priority, self.priority_ttl, self.ttl, self._reuse(depth), self.session)

    def _reuse(self, depth: int) -> Reuse:
        if depth >= (math.inf if self.dead_from_depth is None else self.dead_from_depth):
            return "none"
        if isinstance(self.reuse, str):
            return self.reuse
        return self.reuse[depth] if depth < len(self.reuse) else "unknown"
