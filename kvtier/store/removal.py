"""A removal from several tiers: each of them is asked, and at the end it is told which kept something."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from kvtier.errors import BlocksRemain, KVTierError, TierTimeout
from kvtier.store.port import Port

__all__ = ["Removal"]

_T = TypeVar("_T")


class Removal:
    """One call of `delete` or `clear`.

    Args:
        writing: names of the tiers that still write what is to go: it may arrive whatever they answer now.
    """

    def __init__(self, writing: Iterable[str] = ()) -> None:
        self._kept: dict[str, KVTierError] = {
            name: TierTimeout("what was on its way there did not arrive in time") for name in writing
        }

    def of(self, port: Port, work: Callable[[], _T], otherwise: _T) -> _T:
        """What one tier answers; `otherwise` where it fails, so that the others are asked, too."""
        try:
            return work()
        except KVTierError as error:
            self._kept[port.name] = error
        return otherwise

    def finish(self) -> None:
        """All tiers were asked.

        Raises:
            BlocksRemain: some failed.
        """
        if self._kept:
            late = any(isinstance(error, TierTimeout) for error in self._kept.values())
            raise BlocksRemain({name: str(error) for name, error in self._kept.items()}, late=late)
