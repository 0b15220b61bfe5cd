"""Memory for bodies on their way in: taken from a pool, bounded, used again."""

from collections import Counter, defaultdict

from kvtier.service.cache.errors import ServiceError

__all__ = ["Buffer", "BufferPool"]

_LEAST = 1 << 10
_KEPT = 64 << 20
_RETRY_SECONDS = 1.0


class Buffer:
    """Memory of a body.

    Args:
        pool: gets it back.
        owner: on whose account it is.
        memory: all of it.
        nbytes: what of it is used.
    """

    __slots__ = ("_memory", "_owner", "_pool", "view")

    def __init__(self, pool: "BufferPool", owner: str, memory: bytearray, nbytes: int) -> None:
        self._pool = pool
        self._owner = owner
        self._memory = memory
        self.view = memoryview(memory)[:nbytes]

    def release(self) -> None:
        """Give it back; nothing may use it any more. Once."""
        self._pool.put_back(self._owner, self._memory)


class BufferPool:
    """Hands out memory, in sizes of powers of two; keeps some of what comes back. For one event loop.

    Args:
        limit: bytes that one owner may have at a time; a tenant, so that nobody makes another one wait.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used: Counter[str] = Counter()
        self._kept = 0
        self._free: dict[int, list[bytearray]] = defaultdict(list)

    def take(self, owner: str, nbytes: int) -> Buffer:
        """Memory for `nbytes` bytes, of any content.

        Raises:
            ServiceError: busy: the limit is reached.
        """
        size = max(_LEAST, 1 << (nbytes - 1).bit_length())
        # One is always let out: the limit may be no power of two.
        used = self.used[owner]
        if used and used + size > self.limit:
            raise ServiceError(
                "busy",
                f"bodies of {used} bytes are on their way in, {size} more do not fit into the {self.limit} that "
                "may be: try again",
                retry_after=_RETRY_SECONDS,
            )
        self.used[owner] += size
        free = self._free[size]
        if free:
            self._kept -= size
            return Buffer(self, owner, free.pop(), nbytes)
        return Buffer(self, owner, bytearray(size), nbytes)

    def put_back(self, owner: str, memory: bytearray) -> None:
        """See `Buffer.release`."""
        self.used[owner] -= len(memory)
        if self._kept + len(memory) <= _KEPT:
            self._kept += len(memory)
            self._free[len(memory)].append(memory)
