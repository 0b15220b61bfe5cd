"""Products with bfloat16 weights on AMX tiles: one copy of the weights, packed, for any number of rows.

Measured beside oneDNN's packed product (one thread, 576x576 to 49152x576): 1.1 to 1.9 times faster at 1 to 32 rows,
where oneDNN spends 20 us a call on top of reading the weights; at 512 rows between 0.75 and 1.5 times, run by run.
"""

import torch
from torch import Tensor

from kvtier.engine.models.arena import Arena
from kvtier.errors import ConfigError
from kvtier.native.products import GRAIN, products

__all__ = ["TileLinear"]

_arena = Arena()


class TileLinear:
    """x [T, in] -> x @ weight.T [T, out], in bfloat16, summed in float32.

    Args:
        weight: [out, in], bfloat16 in CPU memory; both multiples of 32. Ask `runs` first.

    Raises:
        ConfigError: this machine has no such kernel.
    """

    __slots__ = ("_inputs", "_outputs", "_packed", "_packed_at", "_product")

    def __init__(self, weight: Tensor) -> None:
        found = products()
        if found is None:
            raise ConfigError("no AMX kernels here: kvtier.native._products was not built, or the processor has no AMX")
        self._product = found.product
        self._outputs, self._inputs = weight.shape
        panels, steps = self._outputs // 32, self._inputs // 32
        # [panel, tile, output, step, pair, 2] -> [panel, step, tile, pair, output, 2]
        tiles = weight.reshape(panels, 2, 16, steps, 16, 2)
        self._packed = _arena.empty((panels, steps, 2, 16, 16, 2), torch.bfloat16)
        self._packed.copy_(tiles.permute(0, 3, 1, 4, 2, 5))
        self._packed_at = self._packed.data_ptr()

    @staticmethod
    def runs(weight: Tensor) -> bool:
        """Whether this machine has the kernel, and the kernel takes `weight`."""
        whole = not any(size % GRAIN for size in weight.shape)
        return weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and whole and products() is not None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], contiguous."""
        if x.dtype is not torch.bfloat16 or x.dim() != 2 or x.shape[1] != self._inputs:
            raise ValueError(f"{x.dtype} {list(x.shape)}: expected bfloat16 [T, {self._inputs}]")
        if x.stride(1) != 1:
            x = x.contiguous()
        count = x.shape[0]
        out = x.new_empty((count, self._outputs))
        self._product(
            x.data_ptr(), self._packed_at, out.data_ptr(), count, x.stride(0), self._inputs, self._outputs,
            torch.get_num_threads(),
        )  # fmt: skip
        return out
