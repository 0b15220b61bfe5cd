"""Ahead: the KV of requests that wait for device blocks comes into host meanwhile."""

from kvtier.connector.parts import Parts
from kvtier.hooks import RequestView
from kvtier.store import Prefetch, TieredStore

__all__ = ["Ahead"]

# What is wanted now shares its threads with these.
_AT_ONCE = 2


class Ahead:
    """Prefetches for waiting requests, few at a time. For use from one thread.

    Args:
        store: does it.
        parts: of a block.
        block_size: tokens per block.
    """

    def __init__(self, store: TieredStore, parts: Parts, block_size: int) -> None:
        self._store = store
        self._parts = parts
        self._block_size = block_size
        self._asked: dict[str, Prefetch | None] = {}

    def prefetch(self, request: RequestView) -> None:
        """See `SchedulerHook.prefetch`: one try per request."""
        if request.id in self._asked:
            return
        if sum(prefetch is not None and not prefetch.done() for prefetch in self._asked.values()) >= _AT_ONCE:
            return
        usable = min(len(request.chain), (request.num_tokens - 1) // self._block_size)
        keys, parts = self._parts.keys(request.chain[:usable]), len(self._parts)
        below = True
        # A remote tier is asked by the prefetch itself, which nobody waits for.
        if not self._store.has_remote:
            found = self._store.match(keys, parts=parts, lossy=request.lossy).tiers
            below = any(tier != self._store.host.name for tier in found)
            keys = keys[: len(found) * parts]
        self._asked[request.id] = self._store.prefetch(keys, f"{request.id}/ahead", parts=parts) if below else None

    def end(self, request_id: str) -> None:
        """The request waits no more."""
        prefetch = self._asked.pop(request_id, None)
        if prefetch is not None:
            prefetch.cancel()
