"""Pages: one rank's pages in a `TieredStore`, by SGLang's hashes, in its host pool or in flat tensors.

Every call waits, and ends: what hangs is given up after `tiering.load_deadline`. Of each batch the leading run counts:
where a page is missing, damaged, late or not to be had, those after it are reported missing, too.
"""

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple, Self

import torch
from prometheus_client import Counter

from kvtier.connector.ranges import Part, RangeTransfers
from kvtier.errors import ConfigError, FormatMismatch
from kvtier.keys import namespace_index
from kvtier.store import TieredStore, open_store
from kvtier_sglang.geometry import Geometry
from kvtier_sglang.settings import Settings

__all__ = ["Moved", "PageStore"]

_HASH_BYTES = 32
_REMEMBERED = 4096


class Moved(NamedTuple):
    """One batch that was moved: its pages, and how fast they went, in 1e9 bytes per second."""

    pages: int
    speed: float


class PageStore:
    """The pages of one rank. Thread-safe.

    Args:
        store: becomes this one's, and is closed with it.
        geometry: what the pages are.
        writer: whether this rank stores what it is given; if not, another one stores the same.

    Raises:
        KVTierError: the tiers cannot hold such pages.
    """

    def __init__(self, store: TieredStore, geometry: Geometry, *, writer: bool = True) -> None:
        self.store = store
        self.geometry = geometry
        self._writer = writer
        self._parts = len(geometry.shards)
        self._ns = namespace_index(geometry.namespace.digest)
        store.register(self._ns, geometry.layout)
        # What SGLang computes on top of lossy pages it saves like any other.
        exact = not store.options.accept_lossy
        self._moves = RangeTransfers(store, self._ns, geometry.layout.block_bytes(), self._parts, exact=exact)
        self.loads: deque[Moved] = deque(maxlen=_REMEMBERED)
        self.saves: deque[Moved] = deque(maxlen=_REMEMBERED)
        self._counts = Counter(
            "kvtier_sglang_pages",
            "Pages that SGLang asked for or gave, by what became of them",
            ["operation", "outcome"],
            registry=store.metrics.registry,
        )

    @classmethod
    def open(cls, settings: Settings, geometry: Geometry, *, writer: bool = True) -> Self:
        """Open the tiers for the pages of one rank.

        Raises:
            KVTierError: a tier cannot be opened, or cannot hold such pages.
        """
        store = open_store(settings.tiering, block_bytes=geometry.layout.block_bytes(), layout=geometry.layout)
        if store is None:
            raise ConfigError("host is off: it is the staging memory of all other tiers; give it a capacity")
        try:
            return cls(store, geometry, writer=writer)
        except BaseException:
            store.close()
            raise

    # ---- the verbs

    def present(self, hashes: Sequence[str]) -> int:
        """How many leading pages are in some tier. Moves nothing."""
        named = self._named(hashes, "look")
        found = self._moves.present(self.geometry.keys(named))
        self._count("look", found, len(hashes), "hit", "miss")
        return found

    def load(self, hashes: Sequence[str], indices: torch.Tensor) -> list[bool]:
        """Fill pages of the host pool; which of them arrived, verified. Those that did not are as they were.

        Args:
            hashes: of a run of pages, in order.
            indices: int64 [pages * page_size], their token slots.

        Raises:
            FormatMismatch: these are no pages of the pool, or not as many as hashes.
        """
        return self._load(hashes, self._in_pool(hashes, indices))

    def load_flat(self, hashes: Sequence[str], targets: Sequence[torch.Tensor]) -> list[bool]:
        """Fill tensors of one page each, of any type and shape, as `load` does."""
        _check_count(hashes, len(targets))
        fitting = self._fitting(targets, "load")
        # Addresses of what is contiguous in host memory; the rest takes a detour.
        landing = [
            one if _addressable(one) else torch.empty(one.shape, dtype=one.dtype, device="cpu") for one in fitting
        ]
        arrived = self._load(hashes[: len(fitting)], self._flat(landing))
        for one, target, good in zip(landing, fitting, arrived, strict=True):
            if good and one is not target:
                target.copy_(one)
        return arrived + [False] * (len(hashes) - len(arrived))

    def save(self, hashes: Sequence[str], indices: torch.Tensor) -> list[bool]:
        """Store pages of the host pool; which of them are stored or were. Arguments and errors as in `load`."""
        return self._save(hashes, lambda: self._in_pool(hashes, indices))

    def save_flat(self, hashes: Sequence[str], values: Sequence[torch.Tensor]) -> list[bool]:
        """Store tensors of one page each, as `save` does."""
        _check_count(hashes, len(values))
        fitting = [one.detach().cpu().contiguous() for one in self._fitting(values, "save")]
        saved = self._save(hashes[: len(fitting)], lambda: self._flat(fitting))
        return saved + [False] * (len(hashes) - len(saved))

    def clear(self) -> None:
        """Remove all pages of this model, layout and salt, those of all ranks, from every tier.

        Raises:
            BlocksRemain: see `TieredStore.clear`.
        """
        self.store.clear(ns=self._ns)

    def close(self) -> None:
        """Write what waits and let go of the tiers. Idempotent; pages are missing from then on."""
        self.store.close()

    # ---- how

    def _load(self, hashes: Sequence[str], targets: Sequence[Part]) -> list[bool]:
        named = self._named(hashes, "load")
        start = perf_counter()
        good = self._moves.load(self.geometry.keys(named), targets[: len(named) * self._parts])
        self._moved(self.loads, good, start)
        self._count("load", good, len(hashes), "hit", "miss")
        return [at < good for at in range(len(hashes))]

    def _save(self, hashes: Sequence[str], sources: Callable[[], Sequence[Part]]) -> list[bool]:
        if not self._writer:
            self._count("save", len(hashes), len(hashes), "other_rank", "")
            return [True] * len(hashes)
        named = self._named(hashes, "save")
        start = perf_counter()
        good = self._moves.save(self.geometry.keys(named), sources()[: len(named) * self._parts])
        self._moved(self.saves, good, start)
        self._count("save", good, len(hashes), "stored", "dropped")
        return [at < good for at in range(len(hashes))]

    def _named(self, hashes: Sequence[str], operation: str) -> list[bytes]:
        """The leading hashes, as bytes; what is no SHA-256 in hex ends them, and is counted."""
        named: list[bytes] = []
        for text in hashes:
            digest = _digest(text)
            if digest is None:
                self._counts.labels(operation, "bad_hash").inc()
                break
            named.append(digest)
        return named

    def _fitting(self, tensors: Sequence[torch.Tensor], operation: str) -> Sequence[torch.Tensor]:
        """The leading ones that have the bytes of a page; one that has not is counted."""
        sizes = [one.numel() * one.element_size() for one in tensors]
        fitting = next((at for at, size in enumerate(sizes) if size != self.geometry.page_bytes), len(sizes))
        if fitting < len(sizes):
            self._counts.labels(operation, "wrong_size").inc()
        return tensors[:fitting]

    def _in_pool(self, hashes: Sequence[str], indices: torch.Tensor) -> list[Part]:
        parts = self.geometry.in_pool(indices)
        _check_count(hashes, len(parts) // self._parts)
        return parts

    def _flat(self, tensors: Sequence[torch.Tensor]) -> list[Part]:
        return [part for one in tensors for part in self.geometry.in_flat(one.data_ptr())]

    def _moved(self, log: deque[Moved], pages: int, start: float) -> None:
        if pages:
            log.append(Moved(pages, pages * self.geometry.page_bytes / 1e9 / (perf_counter() - start)))

    def _count(self, operation: str, good: int, asked: int, well: str, ill: str) -> None:
        if good:
            self._counts.labels(operation, well).inc(good)
        if asked > good:
            self._counts.labels(operation, ill).inc(asked - good)


def _digest(text: str) -> bytes | None:
    """A SHA-256 from its hex digits, and from nothing else."""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        return None
    # White space between digits is no error there.
    return digest if len(digest) == _HASH_BYTES and len(text) == 2 * _HASH_BYTES else None


def _check_count(hashes: Sequence[str], given: int) -> None:
    if given != len(hashes):
        raise FormatMismatch(f"{len(hashes)} hashes for {given} pages: expected one of each")


def _addressable(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()
