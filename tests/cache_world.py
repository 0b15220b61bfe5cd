"""A cache service without its ports: small tiers, callers, and blocks whose bytes tell whose they are."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.config import Config, load_config
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.service.cache import LOCAL, BlockPut, Cache, Caller, NamespaceSpec, PutOutcome, Scope

BLOCK = 4096
OWNER = "test"
OPAQUE = NamespaceSpec("blocks", None)
# Two groups of different shapes on two shards: four parts.
LAYOUT = Layout(
    4,
    (
        LayerGroup(GroupKind.GQA, (0, 1), planes=2, kv_heads=1, head_dim=32),
        LayerGroup(GroupKind.MLA, (2,), planes=1, kv_heads=1, head_dim=24, rope_dim=8),
    ),
    shards=2,
)
EVERYTHING = frozenset(Scope)


def config_of(
    tmp: Path | None = None,
    service: Mapping[str, Any] | None = None,
    *,
    host: Mapping[str, Any] | None = None,
    nvme: Mapping[str, Any] | None = None,
    **tiering: Any,
) -> Config:
    """Settings: 64 blocks of host, and with a directory, state and NVMe in it."""
    tiers: dict[str, Any] = {"host": {"capacity": 64 * BLOCK} | dict(host or {}), **tiering}
    chosen = dict(service or {})
    if tmp is not None:
        disk = {"path": tmp / "nvme", "capacity": "8MiB", "segment_size": "2MiB", "min_free": 0}
        tiers["nvme"] = disk | dict(nvme or {})
        chosen = {"state": tmp / "state"} | chosen
    return load_config({"tiering": tiers, "service": chosen}, environ={}, search=False).config


def open_cache(
    tmp: Path | None = None,
    service: Mapping[str, Any] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Cache:
    config = config_of(tmp, service, **options)
    return Cache.open(config.service, config.tiering, clock=clock)


def tenants_file(tmp: Path, **quotas: int) -> Path:
    """Quotas in blocks of host; as many bytes on NVMe as make a tier."""
    path = tmp / "tenants.toml"
    rows = (f'[{name}]\nhost = {blocks * BLOCK}\nnvme = "2MiB"\n' for name, blocks in quotas.items())
    path.write_text("\n".join(rows))
    return path


def caller(
    tenant: str = "default", scopes: frozenset[Scope] = EVERYTHING, namespaces: tuple[str, ...] | None = None
) -> Caller:
    return Caller(tenant, scopes, namespaces, f"token-{tenant}")


def chain(count: int, name: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{name}/{at}".encode()).digest() for at in range(count)]


def data(key: bytes, nbytes: int = BLOCK, tag: str = "") -> bytes:
    return hashlib.shake_128(key + tag.encode()).digest(nbytes)


def blocks(keys: Sequence[bytes], nbytes: int = BLOCK, tag: str = "", *, exact: bool = True) -> list[BlockPut]:
    """A chain from its first block on."""
    return [
        BlockPut(key, 0, keys[at - 1] if at else None, at, exact, memoryview(data(key, nbytes, tag)))
        for at, key in enumerate(keys)
    ]


def put(
    cache: Cache, keys: Sequence[bytes], who: Caller = LOCAL, ns: str = OPAQUE.name, tag: str = ""
) -> list[PutOutcome]:
    return cache.put(who, ns, blocks(keys, tag=tag)).result(10)


def read(
    cache: Cache, keys: Sequence[bytes], who: Caller = LOCAL, ns: str = OPAQUE.name, **options: Any
) -> list[bytes]:
    """The bytes of what is found."""
    with cache.read(who, ns, keys, owner=OWNER, **options).result(10) as reading:
        return [bytes(view) for view in reading.views]
