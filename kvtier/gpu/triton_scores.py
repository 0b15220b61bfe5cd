"""`BlockScores` by kernels (`kvtier.gpu.kernels.block_mass`): keys are read where they lie, no weight is stored."""

import torch
from torch import Tensor

from kvtier.gpu.kernels.block_mass import block_mass, key_bounds
from kvtier.gpu.kernels.rows import raw_rows
from kvtier.gpu.storage import DevicePool

__all__ = ["TritonScores"]


class TritonScores:
    """Over a pool on CUDA, or, slowly, on a CPU under Triton's interpreter.

    Args:
        pool: GQA.
    """

    def __init__(self, pool: DevicePool) -> None:
        self._keys = [raw_rows(planes[:, 0]) for planes in pool.tensor.unbind(1)]
        self._size = pool.layout.block_size

    def mass(self, layer: int, q: Tensor, blocks: Tensor, stop: int) -> Tensor:
        """See `BlockScores.mass`."""
        queries = q.permute(2, 0, 1, 3).flatten(1, 2)[None]
        lengths = torch.full((1,), stop, dtype=torch.int32, device=q.device)
        return block_mass(queries, self._keys[layer], blocks.int()[None], lengths, scale=q.shape[-1] ** -0.5)[0]

    def bounds(self, layer: int, blocks: Tensor) -> Tensor:
        """See `BlockScores.bounds`."""
        ids = blocks.int()
        return torch.stack(key_bounds(self._keys[layer], ids, torch.full_like(ids, self._size)), 1)
