"""Prefixes: blocks of plain token sequences, read and written by their caller's own thread.

For host engines that run one prompt at a time and have no scheduler that could go on meanwhile:

    hold    the longest leading run of a chain that some tier has, leased; `fetch` brings it into host, verified
    raw     one block's bytes, where they lie in host or, from another format, decoded
    put     the blocks that are not there yet
"""

import os
from collections.abc import Sequence
from itertools import count
from types import TracebackType
from typing import Self

from kvtier import formats
from kvtier.connector.parts import Parts
from kvtier.errors import FormatMismatch
from kvtier.keys import Namespace, namespace_index
from kvtier.layout import Layout
from kvtier.store import Lease, PutResult, TieredStore

__all__ = ["HeldPrefix", "Prefixes"]

_RAW = "raw"
_numbers = count()


class HeldPrefix:
    """A leased leading run of a chain's blocks, for use from one thread. A context: its end ends the lease.

    Args:
        store: whose blocks they are.
        layout: of the blocks.
        lease: the hold; ends with this.
    """

    def __init__(self, store: TieredStore, layout: Layout, lease: Lease) -> None:
        self._store = store
        self._layout = layout
        self._lease = lease
        self._found_in = lease.tiers()

    def __len__(self) -> int:
        """Blocks that were found."""
        return len(self._found_in)

    def is_exact(self, blocks: int) -> bool:
        """Whether so many leading blocks are all exact."""
        return self._lease.is_exact(0, blocks)

    def fetch(self, blocks: int, deadline: float | None = None) -> int:
        """Bring so many leading blocks into host; returns how many of them are there, verified."""
        if not blocks:
            return 0
        return self._store.fetch(self._lease, 0, blocks, deadline=deadline).result()

    def raw(self, index: int) -> memoryview | None:
        """Raw bytes of a block that was fetched, read-only, valid until `close`; None: it cannot be decoded, a miss."""
        (_, handle) = self._lease.part(index, index + 1)[0]
        data = self._store.host.buffer(handle)[: handle.nbytes]
        if handle.fmt != _RAW:
            decoded = memoryview(bytearray(self._layout.block_bytes()))
            try:
                formats.get(handle.fmt).decode(data, self._layout, decoded)
            except FormatMismatch:
                self._store.metrics.dropped_blocks.labels(self._store.host.name, "undecodable").inc()
                return None
            data = decoded.toreadonly()
        self._store.metrics.loaded_bytes.labels(self._found_in[index]).inc(handle.nbytes)
        return data

    def close(self) -> None:
        """End the lease. Idempotent."""
        self._store.release(self._lease)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Prefixes:
    """The blocks of one namespace in a store. Thread-safe; its methods wait, no longer than the store's deadlines.

    Args:
        store: stays the caller's.
        namespace: of the blocks.
        layout: of the blocks, of one part.

    Raises:
        FormatMismatch: blocks of several parts.
        ConfigError: a tier's format cannot take this layout.
    """

    def __init__(self, store: TieredStore, namespace: Namespace, layout: Layout) -> None:
        if layout.parts != 1:
            raise FormatMismatch(f"blocks of {layout.parts} parts: expected one layer group and one shard")
        self._store = store
        self._layout = layout
        self._parts = Parts(namespace)
        store.register(namespace_index(namespace.digest), layout)

    def hold(self, chain: Sequence[bytes], *, lossy: bool | None = None, deadline: float | None = None) -> HeldPrefix:
        """Lease the longest leading run of a chain. What fails or is late in a tier is not found there.

        Args:
            chain: chain keys, from the first block on.
            lossy: whether lossy blocks will do; None: as the store's options say.
            deadline: `time.monotonic()` seconds; None: the store's own.
        """
        owner = f"prefixes.{os.getpid()}.{next(_numbers)}"
        lease = self._store.acquire(self._parts.keys(chain), owner, lossy=lossy, deadline=deadline).result()
        return HeldPrefix(self._store, self._layout, lease)

    def known(self, chain: Sequence[bytes], *, exact: bool) -> int:
        """Leading blocks of a chain that need not be put: see `TieredStore.wanted`."""
        return self._store.wanted(self._parts.keys(chain), exact=exact)

    def put(self, chain: Sequence[bytes], start: int, blocks: Sequence[memoryview], *, exact: bool) -> PutResult:
        """Store raw blocks `start`, `start + 1`, ... of a chain; the buffers are the caller's again when it returns.

        Args:
            chain: chain keys, from the first block on.
            start: position of the first of `blocks`.
            blocks: raw bytes of each.
            exact: whether they, and all KV that they were computed from, are lossless.

        Raises:
            FormatMismatch: a block has another size than the layout says.
        """
        refs = self._parts.refs(chain, start, start + len(blocks), exact=exact)
        return self._store.put(list(zip(refs, blocks, strict=True))).result()
