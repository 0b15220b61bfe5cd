"""Layout: what the bytes of one block mean, as data.

block  = block_size consecutive tokens
part   = (layer group, shard); a uniform model on one worker has one part
gqa    [layers, planes = 2 (K, V), kv_heads, block_size, head_dim]
mla    [layers, block_size, head_dim (latent) + rope_dim]
"""

import enum
import hashlib
import json
from dataclasses import asdict, dataclass
from math import prod
from typing import NamedTuple

from kvtier.errors import FormatMismatch

__all__ = ["DTYPE_BYTES", "GroupKind", "LayerGroup", "Layout", "Span"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


class GroupKind(enum.StrEnum):
    """How a layer group caches attention state."""

    GQA = "gqa"
    MLA = "mla"


class Span(NamedTuple):
    """Where bytes lie in a shared host region: region id, byte offset, byte length."""

    region: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one shape of KV.

    Args:
        kind: `gqa` (K and V per KV head) or `mla` (one latent row per token, no V).
        layers: model layer indices, in the order in which the block stores them.
        planes: 2 for gqa (K then V), 1 for mla.
        kv_heads: KV heads of one shard (1 for mla).
        head_dim: elements per head (mla: width of the latent).
        rope_dim: extra rope elements per token (mla only).
        dtype: element type, a key of `DTYPE_BYTES`.
        window: sliding window in tokens, None for full attention.
        order: axis order of the bytes, or `opaque:<engine>/<version>` for pages of a host engine that
            cannot be addressed by token.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    planes: int
    kv_heads: int
    head_dim: int
    rope_dim: int = 0
    dtype: str = "float32"
    window: int | None = None
    order: str = "lphtd"

    def __post_init__(self) -> None:
        expected = 2 if self.kind is GroupKind.GQA else 1
        if self.planes != expected:
            raise FormatMismatch(f"planes={self.planes} for kind {self.kind}: expected {expected}")
        if self.dtype not in DTYPE_BYTES:
            raise FormatMismatch(f"dtype {self.dtype!r}: expected one of {', '.join(DTYPE_BYTES)}")
        if not self.layers or min(self.kv_heads, self.head_dim) < 1 or self.rope_dim < 0:
            raise FormatMismatch(f"{self}: layers, kv_heads and head_dim must be at least 1")

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Logical shape of one block of this group, outermost axis first."""
        if self.kind is GroupKind.MLA:
            return (len(self.layers), block_size, self.head_dim + self.rope_dim)
        return (len(self.layers), self.planes, self.kv_heads, block_size, self.head_dim)


@dataclass(frozen=True, slots=True)
class Layout:
    """Block size, shard count and layer groups: what two users must agree on to exchange bytes.

    Invariants:
        1. `block_bytes(g)` is a function of the layout alone.
        2. Layouts differ if and only if their `fingerprint` does.
    """

    block_size: int
    groups: tuple[LayerGroup, ...]
    shards: int = 1

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.shards < 1 or not self.groups:
            raise FormatMismatch(f"{self}: block_size, shards and the number of groups must be at least 1")

    @property
    def parts(self) -> int:
        """Number of parts that make one block ready."""
        return len(self.groups) * self.shards

    def block_bytes(self, group: int = 0) -> int:
        """Bytes of one raw block of one shard of `groups[group]`."""
        chosen = self.groups[group]
        return prod(chosen.block_shape(self.block_size)) * DTYPE_BYTES[chosen.dtype]

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that name this layout on every machine and in every version."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"kvtier.layout.1\0" + text.encode()).digest()
