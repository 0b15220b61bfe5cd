"""Attention over a device pool: the implementation that its device, its layout and this machine call for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.gpu import kernels
from kvtier.gpu.coded import CodedAttention
from kvtier.gpu.cpu_attention import CpuAttention
from kvtier.gpu.grouped import GroupedAttention
from kvtier.gpu.latent import LatentAttention
from kvtier.gpu.paged import PagedAttention
from kvtier.gpu.storage import DevicePool, GroupMemory
from kvtier.layout import GroupKind

__all__ = ["AttentionConfig", "CpuAttention", "PagedAttention", "make_attention", "make_paged_attention"]


class AttentionConfig(Protocol):
    """What attention has to know of a model."""

    @property
    def heads(self) -> int:
        """Query heads."""
        ...

    @property
    def windows(self) -> Sequence[int | None]:
        """Per layer, how many tokens up to its own one a token attends to, None for all; empty: None in every layer."""
        ...

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied by before their softmax."""
        ...


@dataclass(frozen=True, slots=True)
class _OfGroup:
    """What attention has to know of some layers of a model."""

    heads: int
    windows: Sequence[int | None]
    softmax_scale: float


def make_attention(pool: DevicePool, config: AttentionConfig) -> PagedAttention | LatentAttention | GroupedAttention:
    """What attends over a model's pool: to keys and values, or to latents; layer group by layer group.

    Args:
        pool: in the model's layout.
        config: of the model.

    Raises:
        FormatMismatch: the pool has no arithmetic, or is of another model.
    """
    if pool.windowed is None:
        return _over(pool, config)
    groups = [memory.group for memory in pool.memories]
    windows = [[config.windows[layer] for layer in group.layers] for group in groups]
    full, windowed = (
        _over(memory, _OfGroup(config.heads, own, config.softmax_scale))
        for memory, own in zip(pool.memories, windows, strict=True)
    )
    return GroupedAttention(groups, full, windowed)


def _over(memory: GroupMemory, config: AttentionConfig) -> PagedAttention | LatentAttention:
    if memory.device.type == "cuda" and kernels.available():
        # Triton is optional and takes seconds to import.
        from kvtier.gpu.triton_attention import make_triton_attention  # noqa: PLC0415

        return make_triton_attention(memory, config)
    if memory.group.kind is GroupKind.MLA:
        return LatentAttention(memory, config.heads, config.softmax_scale)
    return make_paged_attention(memory, config.heads, config.windows)


def make_paged_attention(pool: GroupMemory, num_heads: int, windows: Sequence[int | None] = ()) -> PagedAttention:
    """The fastest `PagedAttention` for a GQA pool. Raises what its constructor does."""
    if pool.coded is not None:
        return CodedAttention(pool, num_heads, windows)
    return (CpuAttention if CpuAttention.runs(pool) else PagedAttention)(pool, num_heads, windows)
