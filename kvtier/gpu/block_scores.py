"""What choices of blocks go by, in torch or by kernels: the attention that blocks got, and bounds of their keys."""

from typing import Protocol

import torch
from torch import Tensor

from kvtier.gpu import kernels
from kvtier.gpu.storage import DevicePool

__all__ = ["BlockScores", "TorchScores", "make_block_scores"]


class BlockScores(Protocol):
    """Over the keys of one pool."""

    def mass(self, layer: int, q: Tensor, blocks: Tensor, stop: int) -> Tensor:
        """Causal attention weights of a sequence's latest queries, summed over each block.

        Args:
            layer: whose keys.
            q: [kv_heads, group, T, head_dim], the queries of tokens `stop - T` to `stop - 1`.
            blocks: int64 [N], the sequence's table; it holds `stop` tokens.
            stop: tokens.

        Returns:
            float32 [kv_heads, N].
        """
        ...

    def bounds(self, layer: int, blocks: Tensor) -> Tensor:
        """Least and greatest of each key element of full blocks int64 [n]: a float [n, 2, kv_heads, head_dim]."""
        ...


class TorchScores:
    """`BlockScores` on any device. Takes memory for all weights of a call.

    Args:
        pool: GQA.
    """

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool

    def mass(self, layer: int, q: Tensor, blocks: Tensor, stop: int) -> Tensor:
        """See `BlockScores.mass`."""
        queries, size = q.float(), self._pool.layout.block_size
        keys = self._pool.tensor[blocks, layer, 0].transpose(0, 1).flatten(1, 2)[:, :stop].float()
        scores = torch.einsum("hgtd,hkd->hgtk", queries, keys) * q.shape[-1] ** -0.5
        rows = queries.shape[2]
        hidden = torch.ones(rows, stop, dtype=torch.bool, device=q.device).triu(stop - rows + 1)
        weights = torch.softmax(scores.masked_fill_(hidden, float("-inf")), dim=-1).sum((1, 2))
        padded = torch.nn.functional.pad(weights, (0, len(blocks) * size - stop))
        return padded.view(len(padded), -1, size).sum(2)

    def bounds(self, layer: int, blocks: Tensor) -> Tensor:
        """See `BlockScores.bounds`."""
        keys = self._pool.tensor[blocks, layer, 0]
        return torch.stack((keys.amin(2), keys.amax(2)), 1)


def make_block_scores(pool: DevicePool) -> BlockScores:
    """By kernels wherever attention over the pool is by kernels: on CUDA, where Triton is installed."""
    if pool.device.type == "cuda" and kernels.available():
        # Triton is optional and takes seconds to import.
        from kvtier.gpu.triton_scores import TritonScores  # noqa: PLC0415

        return TritonScores(pool)
    return TorchScores(pool)
