"""Pins and prefetches of one tenant, by the ids that callers know them by."""

import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtier.service.cache.errors import ServiceError
from kvtier.service.cache.records import PinInfo, PrefetchInfo
from kvtier.store import Prefetch

__all__ = ["Pins", "Prefetches"]

_ID_BYTES = 8
_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Pin:
    space: str
    owner: str
    until: float
    info: PinInfo


class Pins:
    """Thread-safe.

    Args:
        most: at a time.
        clock: monotonic seconds.
        unpin: told the owner of a pin that ends before its time.
    """

    def __init__(self, most: int, clock: Callable[[], float], unpin: Callable[[str], object]) -> None:
        self._most = most
        self._clock = clock
        self._unpin = unpin
        self._lock = threading.Lock()
        self._pins: dict[str, _Pin] = {}

    def add(self, space: str, ttl: float, pin: Callable[[str], int]) -> PinInfo:
        """Make a pin; `pin` is told the owner to pin for, and returns how many blocks are pinned.

        Raises:
            ServiceError: quota_exceeded; unknown_block where there is nothing to pin.
        """
        pin_id = secrets.token_hex(_ID_BYTES)
        owner = f"pin.{pin_id}"
        info = PinInfo(pin_id, 0, time.time() + ttl)
        with self._lock:
            self._expire()
            if len(self._pins) >= self._most:
                raise ServiceError("quota_exceeded", f"{len(self._pins)} pins: at most {self._most}; end some")
            # Its place is taken before the blocks are.
            self._pins[pin_id] = _Pin(space, owner, self._clock() + ttl, info)
        blocks = 0
        try:
            blocks = pin(owner)
        finally:
            with self._lock:
                if blocks:
                    info = info._replace(blocks=blocks)
                    self._pins[pin_id] = _Pin(space, owner, self._clock() + ttl, info)
                else:
                    self._pins.pop(pin_id, None)
        if not blocks:
            raise ServiceError("unknown_block", "none of the leading blocks is in host: put or prefetch them first")
        return info

    def remove(self, pin_id: str, sees: Callable[[str], bool]) -> None:
        """End a pin of a namespace that the caller sees.

        Raises:
            ServiceError: unknown_pin.
        """
        with self._lock:
            self._expire()
            pin = self._pins.get(pin_id)
            if pin is None or not sees(pin.space):
                raise ServiceError("unknown_pin", "no pin of this id: it ended, or never was")
            del self._pins[pin_id]
        self._unpin(pin.owner)

    def _expire(self) -> None:
        # The store ends what it holds for them by itself.
        now = self._clock()
        for pin_id in [pin_id for pin_id, pin in self._pins.items() if pin.until <= now]:
            del self._pins[pin_id]

    @property
    def count(self) -> int:
        """Pins that are not over."""
        with self._lock:
            self._expire()
            return len(self._pins)


class Prefetches:
    """The latest prefetches. Thread-safe.

    Args:
        most: that are remembered.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, Prefetch]] = {}

    def add(self, space: str, start: Callable[[str], Prefetch]) -> PrefetchInfo:
        """Start one; `start` is told its owner.

        Raises:
            ServiceError: busy: as many as may be are running.
        """
        prefetch_id = secrets.token_hex(_ID_BYTES)
        with self._lock:
            if len(self._known) >= self._most:
                over = next((one for one, (_, prefetch) in self._known.items() if prefetch.done()), None)
                if over is None:
                    raise ServiceError(
                        "busy",
                        f"{len(self._known)} prefetches are running: at most {self._most}",
                        retry_after=_RETRY_SECONDS,
                    )
                del self._known[over]
            prefetch = start(f"prefetch.{prefetch_id}")
            self._known[prefetch_id] = (space, prefetch)
        return _info(prefetch_id, prefetch)

    def info(self, prefetch_id: str, sees: Callable[[str], bool]) -> PrefetchInfo:
        """How far one is, of a namespace that the caller sees.

        Raises:
            ServiceError: unknown_prefetch.
        """
        return _info(prefetch_id, self._get(prefetch_id, sees))

    def cancel(self, prefetch_id: str, sees: Callable[[str], bool]) -> PrefetchInfo:
        """Stop and forget one, of a namespace that the caller sees; what has arrived stays.

        Raises:
            ServiceError: unknown_prefetch.
        """
        prefetch = self._get(prefetch_id, sees)
        with self._lock:
            self._known.pop(prefetch_id, None)
        prefetch.cancel()
        return _info(prefetch_id, prefetch)

    def _get(self, prefetch_id: str, sees: Callable[[str], bool]) -> Prefetch:
        with self._lock:
            space, prefetch = self._known.get(prefetch_id, ("", None))
        if prefetch is None or not sees(space):
            raise ServiceError("unknown_prefetch", "no prefetch of this id: it was cancelled, long ago, or never")
        return prefetch

    @property
    def running(self) -> int:
        """Those that are not over."""
        with self._lock:
            known: Iterable[tuple[str, Prefetch]] = list(self._known.values())
        return sum(not prefetch.done() for _, prefetch in known)


def _info(prefetch_id: str, prefetch: Prefetch) -> PrefetchInfo:
    if not prefetch.done():
        return PrefetchInfo(prefetch_id, "running", 0)
    blocks, deferred = prefetch.result()
    return PrefetchInfo(prefetch_id, deferred or "done", blocks)
