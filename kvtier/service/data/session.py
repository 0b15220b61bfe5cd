"""Session: what one connection has, and loses when it ends."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from kvtier.config import ServiceSettings
from kvtier.cpu.region import MemoryRegion, round_up
from kvtier.service.cache import Cache, Caller, Places, Reading, ServiceError, Tokens
from kvtier.service.data.buffers import BufferPool
from kvtier.wire.packing import PackedKeys, unpack_keys

__all__ = ["Port", "Session"]

_K = TypeVar("_K", bound=Sequence[bytes])
# A token that was revoked opens nothing any more after this time, also on connections that are open.
_TRUST_SECONDS = 1.0
# What a lease of a few bytes takes, beside them.
_MOST_LEASES = 4096
# How often a staging region is filled before its pages are made huge, which may take as long as filling it ten times.
_FILLED = 16
_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Port:
    """What all connections share."""

    cache: Cache
    tokens: Tokens
    settings: ServiceSettings
    buffers: BufferPool
    places: Places


class Session:
    """One connection's caller and what it holds. Used by the connection's thread alone.

    Args:
        port: see `Port`.
        secret: the caller's token.
        owner: names the connection to the cache.
        local: whether it came over the Unix socket.

    Raises:
        ServiceError: unauthorized; busy: its tenant has as many connections as it may.
    """

    def __init__(self, port: Port, secret: str, owner: str, *, local: bool) -> None:
        self.port = port
        self.cache = port.cache
        self.owner = owner
        self.local = local
        self.shared = False
        # Bytes of a block of each namespace that was read lately: how much to read at a time where no layout says it.
        self.typical: dict[str, int] = {}
        self.staging: MemoryRegion | None = None
        self._staged = 0
        self._secret = secret
        self._caller = port.tokens.caller(secret or None)
        self._trusted_until = time.monotonic() + _TRUST_SECONDS
        self._leases: dict[int, Reading] = {}
        self._named = 0
        self._held = ExitStack()
        self._held.enter_context(port.places.taken(self._caller.tenant))

    @property
    def caller(self) -> Caller:
        """Who calls.

        Raises:
            ServiceError: unauthorized: the token was revoked, or has expired.
        """
        now = time.monotonic()
        if now >= self._trusted_until:
            self._caller = self.port.tokens.caller(self._secret or None)
            self._trusted_until = now + _TRUST_SECONDS
        return self._caller

    @property
    def known(self) -> Caller:
        """Who called last, whatever became of the token since."""
        return self._caller

    def deadline(self, timeout: float | None) -> float:
        """When a call that may take so many seconds is over."""
        longest = self.port.settings.request_timeout
        if timeout is not None and not timeout > 0:
            raise ServiceError("invalid", f"timeout {timeout}: expected seconds, above 0")
        return time.monotonic() + (longest if timeout is None else min(timeout, longest))

    def keys(self, packed: bytes, width: int) -> list[bytes]:
        """Keys as they came, no more than one call may have.

        Raises:
            ServiceError: too_large.
            WireError: they are none.
        """
        return self._few(unpack_keys(packed, width))

    def packed_keys(self, packed: bytes, width: int) -> PackedKeys:
        """The same for who looks at few of them."""
        return self._few(PackedKeys(packed, width))

    def _few(self, keys: _K) -> _K:
        most = self.port.settings.max_batch_keys
        if len(keys) > most:
            raise ServiceError("too_large", f"{len(keys)} keys in one call: at most {most}; split it")
        return keys

    @property
    def holds(self) -> bool:
        """Whether bytes may be touched that are held for it."""
        return bool(self._leases)

    @property
    def may_share(self) -> bool:
        """Whether it may map the tenant's memory: on this machine, and not restricted to some of its namespaces."""
        return self.local and self.caller.namespaces is None

    # ---- leases

    def keep(self, reading: Reading) -> int:
        """Hold a reading until it is released by this number, or the connection ends.

        Raises:
            ServiceError: busy: the connection holds as many as it may.
        """
        if len(self._leases) >= _MOST_LEASES:
            raise ServiceError(
                "busy",
                f"this connection holds {_MOST_LEASES} leases: release some, or lease more blocks at a time",
                retry_after=_RETRY_SECONDS,
            )
        self._named += 1
        self._leases[self._named] = reading
        return self._named

    def release(self, lease: int) -> None:
        """End a lease.

        Raises:
            ServiceError: invalid: there is none of this number.
        """
        reading = self._leases.pop(lease, None)
        if reading is None:
            raise ServiceError("invalid", f"lease {lease}: this connection holds none of that number")
        reading.close()

    def require_shared(self) -> None:
        """Refuse what only connections with shared memory can do.

        Raises:
            ServiceError: invalid.
        """
        if not self.shared:
            raise ServiceError("invalid", "this connection shares no memory: send a share first")

    # ---- staging

    def stage(self, nbytes: int) -> MemoryRegion:
        """The connection's staging region, made once.

        Raises:
            ServiceError: invalid, too_large or busy.
        """
        if self.staging is not None:
            raise ServiceError("invalid", "this connection has a staging region: open another connection for another")
        most = self.port.settings.max_batch
        if not 0 < nbytes <= most:
            raise ServiceError("too_large", f"a staging region of {nbytes} bytes: expected 1 to {most}")
        size = round_up(nbytes)
        self._held.enter_context(self.port.buffers.charged(self.caller.tenant, size))
        self.staging = MemoryRegion(size, name="staging", writable=True)
        self._held.callback(self.staging.close)
        return self.staging

    def staged(self, offset: int, nbytes: int) -> None:
        """A range of the staging region was filled; one that is filled again and again is worth huge pages."""
        if self.staging is not None:
            self._staged += nbytes
            if self._staged > _FILLED * self.staging.nbytes:
                self.staging.expect(offset, nbytes)

    def close(self, log: Callable[[str], object]) -> None:
        """Let go of everything that the connection held."""
        if self._leases:
            log(f"{len(self._leases)} leases end with it")
        for lease in list(self._leases):
            self.release(lease)
        self.cache.release_owner(self.owner)
        self._held.close()
