"""A cache service with both ports, in this process: REST by uvicorn in a thread, the data port, a Unix socket."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rest_world import RunningRest

from kvtier.client import Block
from kvtier.config import ServiceSettings, TieringSettings
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.service.cache import LOCAL, Cache, Tokens
from kvtier.service.data import DataServer
from kvtier.testing.blocks import chain_refs, content
from kvtier.tiers import block_checksum

LAYOUT = Layout(4, (LayerGroup(GroupKind.GQA, (0,), 2, 1, 32),))
BYTES = LAYOUT.block_bytes()


class Service:
    """Both ports over one cache."""

    def __init__(self, cache: Cache, tokens: Tokens, settings: ServiceSettings) -> None:
        self.cache = cache
        self.data = DataServer(cache, tokens, settings)
        self.data.start()
        assert self.data.address is not None
        self.data_address = "{}:{}".format(*self.data.address)
        self.socket = settings.socket
        self.rest = RunningRest(cache, tokens, settings.model_copy(update={"data_port": self.data.address[1]}))
        self.url = self.rest.url

    def forget(self) -> None:
        """All namespaces, and their blocks."""
        for info in self.cache.namespaces(LOCAL):
            self.cache.drop_namespace(LOCAL, info.spec.name)

    def damage(self, key: bytes) -> None:
        """Flip a bit of a record that a peer put, in host memory, so that the service itself does not notice."""
        tenant = self.cache._tenants["default"]
        host = tenant.store.host
        for info in self.cache.namespaces(LOCAL):
            stored = tenant.space(info.spec.name).keys([key])
            for handle in host.acquire(stored, "vandal").wait(30).handles:
                span, extent = host.span(handle), handle.extent
                data = host._slab.region.array[span.offset : span.offset + span.nbytes]
                data[span.nbytes // 2] ^= 1
                extent.checksum = block_checksum(handle.ref, handle.fmt, data.tobytes())
                host.release([handle])

    def value(self, name: str, **labels: str) -> float:
        """A sample of the cache's metrics."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = self.cache.metrics_text().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith(name) and all(one in line for one in wanted)
        )

    def stop(self) -> None:
        self.rest.stop()
        self.data.close()


@contextmanager
def serving(
    path: Path, *, host: str = "4MiB", nvme: bool = False, tokens: Path | None = None, **settings: Any
) -> Iterator[Service]:
    """A service with small limits."""
    sized: dict[str, Any] = {"max_block": "1MiB", "max_batch": "4MiB", "inflight_bytes": "16MiB", "data_port": 0}
    below = {}
    if nvme:
        below["nvme"] = {"path": path / "blocks", "capacity": "16MiB", "segment_size": "4MiB", "min_free": 0}
    sized |= {"state": path / "state", "socket": path / "data.sock"}
    chosen = ServiceSettings(**{**sized, "tokens": tokens, **settings})
    cache = Cache.open(chosen, TieringSettings(host={"capacity": host}, **below))
    try:
        service = Service(cache, Tokens.open(tokens), chosen)
        try:
            yield service
        finally:
            service.stop()
    finally:
        cache.close()


def blocks(count: int, *, seed: int = 0, nbytes: int = BYTES) -> list[Block]:
    """A chain of blocks, from depth 0 on; their bytes follow from their keys."""
    return [
        Block(ref.key * 2, bytes(content(ref, nbytes)), 0, None if ref.parent is None else ref.parent * 2, ref.depth)
        for ref in chain_refs(count, seed=seed)
    ]
