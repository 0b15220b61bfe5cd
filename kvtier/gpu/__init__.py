"""Device memory: block pool, block tables, paged attention, copies. The same code on CUDA and on CPU memory.

pool -> table                         who holds which block, under which name: pure bookkeeping, no torch
mixed                                 the same where some layers keep a sliding window only
storage                               the tensors that the blocks are rows of
batches, masks -> attention, latent   plan once per step, run once per layer; K and V, or MLA's latents
coded                                 the same over K and V that the pool keeps coded
copies                                blocks to and from host memory, in the background
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtier.gpu.pool import BlockPool
from kvtier.gpu.table import BlockCopy, BlockTable

if TYPE_CHECKING:
    from kvtier.gpu.attention import PagedAttention as PagedAttention
    from kvtier.gpu.copies import BlockMove as BlockMove
    from kvtier.gpu.copies import CopyEngine as CopyEngine
    from kvtier.gpu.copies import CopyTicket as CopyTicket
    from kvtier.gpu.copies import Direction as Direction
    from kvtier.gpu.latent import LatentAttention as LatentAttention
    from kvtier.gpu.storage import DevicePool as DevicePool

__all__ = [
    "BlockCopy",
    "BlockMove",
    "BlockPool",
    "BlockTable",
    "CopyEngine",
    "CopyTicket",
    "DevicePool",
    "Direction",
    "LatentAttention",
    "PagedAttention",
]

_LAZY = {
    "BlockMove": "kvtier.gpu.copies",
    "CopyEngine": "kvtier.gpu.copies",
    "CopyTicket": "kvtier.gpu.copies",
    "DevicePool": "kvtier.gpu.storage",
    "Direction": "kvtier.gpu.copies",
    "LatentAttention": "kvtier.gpu.latent",
    "PagedAttention": "kvtier.gpu.attention",
}


def __getattr__(name: str) -> Any:
    # The scheduler's process keeps books of blocks without importing torch.
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
