"""Geometry: what one page of an SGLang host pool is, and where its bytes lie.

    layer_first          [2, layers, tokens, heads, dim]            2 x layers ranges a page
    page_first           [2, tokens, layers, heads, dim]            K, V
    page_first_direct    [2, pages, layers, page, heads, dim]       K, V
    page_head            [2, pages, heads, page, layers, dim]       K, V, or K, V of each slice of the heads

MLA has no leading 2, one range for each pair of K and V, and no heads. A page is one block of one part; where heads are
split, so that ranks of another TP size can read them, of one part per slice. The bytes of a part are all its K, then
all its V, as in SGLang's flat pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, cast

import torch

from kvtier.connector.ranges import Part
from kvtier.errors import ConfigError, FormatMismatch
from kvtier.keys import Namespace, store_keys
from kvtier.layout import DTYPE_BYTES, GroupKind, LayerGroup, Layout

__all__ = ["Geometry", "HeadPool", "HostPool", "LatentPool", "Rank", "geometry_of"]

_SCHEME = "sglang.sha256.1"
_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


class Rank(Protocol):
    """What SGLang says of one of its ranks (`HiCacheStorageConfig`), as far as it matters here."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    dcp_size: int
    is_mla_model: bool
    model_name: str | None
    tp_lcm_size: int | None
    should_split_heads: bool


class HostPool(Protocol):
    """SGLang's host cache of one rank, as far as it matters here."""

    layout: str
    page_size: int
    dtype: torch.dtype
    layer_num: int
    start_layer: int

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and bytes of the ranges of the pages at these token slots (int64 [pages * page_size])."""
        ...


class HeadPool(HostPool, Protocol):
    """One that keeps K and V per head."""

    head_num: int
    head_dim: int
    v_head_dim: int

    def get_split_heads_page_buffer_meta(self, indices: torch.Tensor, split_factor: int) -> tuple[list[int], list[int]]:
        """The same for slices of the heads, page by page."""
        ...


class LatentPool(HostPool, Protocol):
    """One that keeps latents."""

    kv_cache_dim: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the pages of one rank are. Made by `geometry_of`.

    Args:
        pool: whose pages.
        layout: of a page, as kvtier names it: opaque, but its size and all that sets it apart.
        namespace: what must match for a page to be reused, beside its hash.
        shards: of each part of a page, in order.
        planes: 2 for K and V, 1 for latents.
    """

    pool: HostPool
    layout: Layout
    namespace: Namespace
    shards: range
    planes: int

    @property
    def page_bytes(self) -> int:
        """Of a page of this rank."""
        return self.layout.block_bytes() * len(self.shards)

    def keys(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Store keys of all parts of the pages with these hashes, page by page."""
        columns = [store_keys(hashes, self.namespace.mask(0, shard)) for shard in self.shards]
        return list(chain.from_iterable(zip(*columns, strict=True)))

    def in_pool(self, indices: torch.Tensor) -> list[Part]:
        """Where the parts of the pages at these token slots lie.

        Args:
            indices: int64 [pages * page_size], each page's in order.

        Raises:
            FormatMismatch: these are no whole pages.
        """
        if indices.numel() % self.pool.page_size:
            raise FormatMismatch(
                f"{indices.numel()} token slots: expected whole pages of {self.pool.page_size}, each page's in order"
            )
        if len(self.shards) > 1:
            split = cast("HeadPool", self.pool).get_split_heads_page_buffer_meta
            ranges = list(zip(*split(indices, len(self.shards)), strict=True))
        else:
            ranges = list(zip(*self.pool.get_page_buffer_meta(indices), strict=True))
        parts = indices.numel() // self.pool.page_size * len(self.shards)
        each = len(ranges) // max(parts, 1)
        return [self._plane_by_plane(ranges[at * each : (at + 1) * each]) for at in range(parts)]

    def _plane_by_plane(self, ranges: list[tuple[int, int]]) -> Part:
        return [one for plane in range(self.planes) for one in ranges[plane :: self.planes]]

    def in_flat(self, address: int) -> list[Part]:
        """Where the parts of a flat page lie that begins at an address."""
        plane = self.page_bytes // self.planes
        piece = plane // len(self.shards)
        return [
            [(address + at * plane + shard * piece, piece) for at in range(self.planes)]
            for shard in range(len(self.shards))
        ]


def geometry_of(pool: HostPool, rank: Rank, salt: str = "") -> Geometry:
    """Describe a rank's pages.

    K and V are each rank's own: another TP size is another namespace, unless SGLang splits heads for a common multiple
    (`tp_lcm_size`). Latents are the same in all ranks: one record serves them all, whatever their number. Stages of a
    pipeline, and ranks that share a page's tokens among them, have their own pages always.

    Args:
        pool: that SGLang registered.
        rank: whose it is.
        salt: see `Settings`.

    Raises:
        ConfigError: a pool, or a way to spread it over ranks, that cannot be stored here.
    """
    if rank.dcp_size > 1:
        raise ConfigError(
            f"dcp_size = {rank.dcp_size}: pages that ranks share token by token are not stored; set it to 1"
        )
    if not rank.model_name and not salt:
        raise ConfigError("SGLang names no model, and pages of two must not be mixed up: set salt in the extra config")
    if pool.layout not in _LAYOUTS:
        raise ConfigError(f"host layout {pool.layout!r}: expected one of {', '.join(_LAYOUTS)}")
    split = (rank.tp_lcm_size or rank.tp_size) // rank.tp_size if rank.should_split_heads else 1
    try:
        group = _latents(pool, rank) if rank.is_mla_model else _heads(cast("HeadPool", pool), rank, split)
        replicas = 1 if rank.is_mla_model else rank.tp_size
        layout = Layout(pool.page_size, (group,), shards=replicas * split * rank.attn_cp_size)
        namespace = Namespace(rank.model_name or "", layout.fingerprint, salt=salt, scheme=_SCHEME)
        tp_rank = 0 if rank.is_mla_model else rank.tp_rank
        first = (rank.attn_cp_rank * replicas + tp_rank) * split
        geometry = Geometry(pool, layout, namespace, range(first, first + split), 1 if rank.is_mla_model else 2)
        page = geometry.in_pool(torch.arange(pool.page_size))
    except (AttributeError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(
            f"host pool {type(pool).__name__} in layout {pool.layout!r} cannot be stored: {error}; expected K and V "
            "per head, or latents"
        ) from error
    nbytes = sum(size for part in page for _, size in part)
    if nbytes != geometry.page_bytes:
        raise ConfigError(
            f"host pool {type(pool).__name__} has pages of {nbytes} bytes: expected {geometry.page_bytes} by its "
            "shape; it holds what kvtier does not know of"
        )
    return geometry


def _latents(pool: HostPool, rank: Rank) -> LayerGroup:
    width = cast("LatentPool", pool).kv_cache_dim
    return LayerGroup(GroupKind.MLA, _layers(pool), 1, 1, width, dtype=_dtype(pool), order=_order(pool, rank))


def _heads(pool: HeadPool, rank: Rank, split: int) -> LayerGroup:
    if pool.head_num % split:
        raise ConfigError(f"{pool.head_num} KV heads per rank: tp_lcm_size = {rank.tp_lcm_size} does not divide them")
    heads, order = pool.head_num // split, _order(pool, rank)
    if pool.head_dim == pool.v_head_dim:
        return LayerGroup(GroupKind.GQA, _layers(pool), 2, heads, pool.head_dim, dtype=_dtype(pool), order=order)
    # K and V of different widths: nobody looks into an opaque row.
    row = heads * (pool.head_dim + pool.v_head_dim)
    order += f"/k{pool.head_dim}v{pool.v_head_dim}"
    return LayerGroup(GroupKind.MLA, _layers(pool), 1, 1, row, dtype=_dtype(pool), order=order)


def _layers(pool: HostPool) -> tuple[int, ...]:
    return tuple(range(pool.start_layer, pool.start_layer + pool.layer_num))


def _dtype(pool: HostPool) -> str:
    name = str(pool.dtype).removeprefix("torch.")
    # Other bytes are bytes; their name is in the order.
    return name if name in DTYPE_BYTES or pool.dtype.itemsize > 1 else "int8"


def _order(pool: HostPool, rank: Rank) -> str:
    name = str(pool.dtype).removeprefix("torch.")
    return f"opaque:sglang/{pool.layout}/{name}/pp{rank.pp_rank}of{rank.pp_size}"
