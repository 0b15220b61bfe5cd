"""From what a service says to results: digests that are compared, namespaces and layouts."""

from collections.abc import Mapping
from typing import Any

import xxhash

from kvtier.client.errors import WrongDigest
from kvtier.layout import GroupKind, LayerGroup, Layout

__all__ = ["check_digest", "layout_of"]


def check_digest(key: bytes, data: memoryview, digest: bytes) -> None:
    """Compare bytes with what was stored.

    Raises:
        WrongDigest: they differ.
    """
    found = xxhash.xxh3_128_digest(data)
    if found != digest:
        raise WrongDigest(
            f"block {key.hex()}: {data.nbytes} bytes arrived with xxh3-128={found.hex()}, and were stored with "
            f"{digest.hex()}: look for damage between here and the service"
        )


def layout_of(told: Mapping[str, Any]) -> Layout:
    """A layout from its JSON object."""
    groups = [
        LayerGroup(**{**group, "kind": GroupKind(group["kind"]), "layers": tuple(group["layers"])})
        for group in told["groups"]
    ]
    return Layout(told["block_size"], tuple(groups), told["shards"])
