"""Removals from several tiers: each of them is asked, and at the end it is told which kept something.

What is to go may be on its way from one tier to another meanwhile. Down: nothing of it is taken to a lower tier until
the end. Up: a load that began before ends up in host, and is removed there once no other can begin.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

from kvtier.errors import BlocksRemain, KVTierError, TierTimeout
from kvtier.store.inflight import InFlight
from kvtier.store.leasing import Leases
from kvtier.store.placement import Placement
from kvtier.store.port import Port
from kvtier.tiers import BlockRef, namespaces_in

__all__ = ["Remover"]

_T = TypeVar("_T")


class Remover:
    """Removes blocks from the tiers of one store. Thread-safe.

    Args:
        ports: host first.
        inflight: what is being written into host.
        leases, placement: the store's.
    """

    def __init__(self, ports: Sequence[Port], inflight: InFlight, leases: Leases, placement: Placement) -> None:
        self._ports = tuple(ports)
        self._inflight = inflight
        self._leases = leases
        self._placement = placement

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `TieredStore.delete`."""
        gone = frozenset(keys)

        def is_gone(ref: BlockRef) -> bool:
            return ref.key in gone

        self._inflight.delete(is_gone)
        with self._placement.refusing(is_gone, gone):
            removal = _Removal(self._placement.passed(gone))
            there = nowhere = [False] * len(keys)
            for port in self._ports:
                here = removal.of(port, partial(port.remove, keys), nowhere)
                there = [before or now for before, now in zip(there, here, strict=True)]
            self._arrived(is_gone)
            removal.of(self._ports[0], partial(self._ports[0].remove, keys), nowhere)
        removal.finish()
        return sum(there)

    def clear(self, tier_name: str | None, ns: int | Collection[int] | None) -> None:
        """See `TieredStore.clear`."""
        spaces, everywhere = namespaces_in(ns), tier_name is None

        def is_gone(ref: BlockRef) -> bool:
            return spaces is None or ref.ns in spaces

        with self._placement.refusing(is_gone) if everywhere else nullcontext():
            hanging = self._placement.settle()
            chosen = [port for port in self._ports if everywhere or port.name == tier_name]
            removal = _Removal(port.name for port in chosen if port.name in hanging)
            if self._ports[0] in chosen:
                self._inflight.delete(is_gone)
            for port in chosen:
                removal.of(port, partial(port.clear, ns), None)
            if everywhere and len(self._ports) > 1:
                self._arrived(is_gone)
                removal.of(self._ports[0], partial(self._ports[0].clear, ns), None)
        removal.finish()

    def _arrived(self, is_gone: Callable[[BlockRef], bool]) -> None:
        """No tier below has them any more: after this, what leases had of them there is in host, or never will be."""
        self._leases.delete(is_gone)
        self._inflight.delete(is_gone)


class _Removal:
    """One removal.

    Args:
        writing: names of the tiers that still write what is to go: it may arrive whatever they answer now.
    """

    def __init__(self, writing: Iterable[str]) -> None:
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
