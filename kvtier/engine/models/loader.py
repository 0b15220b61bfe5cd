"""Loader: a checkpoint's tensors as parameters and products of one model, in one dtype, on one device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtier.engine.models.layers import GatedMlp
from kvtier.engine.models.linear import Linear, WeightFormat, linear
from kvtier.engine.models.weights import Weights
from kvtier.errors import ModelError

__all__ = ["Loader", "gated_mlp"]


class Loader:
    """Takes what a model asks for, and knows what it did not ask for.

    Args:
        weights: an open checkpoint.
        dtype: of parameters and activations.
        device: where they live.
        quantize: how products keep their weights.
    """

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device, quantize: WeightFormat) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._quantize: WeightFormat = quantize
        self._taken: set[str] = set()

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor, by its full name. Raises ModelError where it is missing or of another shape."""
        self._taken.add(name)
        return self._weights.take(name, shape, self._dtype, self._device)

    def product(
        self, names: Sequence[str], rows: Sequence[int], columns: int, *, bias: bool = False, exact: bool = False
    ) -> Linear:
        """The product with several matrices, results side by side: [T, columns] -> [T, sum of rows].

        Args:
            names: of the matrices, without `.weight` and `.bias`.
            rows: of each.
            columns: of all.
            bias: they have biases.
            exact: never quantised: what decides, rather than computes.
        """
        shapes = list(zip(names, rows, strict=True))
        weight = torch.cat([self.tensor(f"{name}.weight", count, columns) for name, count in shapes])
        shift = torch.cat([self.tensor(f"{name}.bias", count) for name, count in shapes]) if bias else None
        return linear(weight, shift, "auto" if exact else self._quantize)

    def check_biases(self) -> None:
        """Raises ModelError where the checkpoint has biases that nobody asked for: leaving them out would be wrong."""
        unused = sorted(name for name in self._weights if name.endswith(".bias") and name not in self._taken)
        if unused:
            raise ModelError(
                f"{self._weights.origin}: {len(unused)} biases that its config does not announce, {unused[0]} for one: "
                "config and weights are of different models"
            )


def gated_mlp(load: Loader, prefix: str, hidden: int, width: int) -> GatedMlp:
    """The MLP of `<prefix>gate_proj`, `<prefix>up_proj` and `<prefix>down_proj`, `width` wide inside."""
    names = [f"{prefix}gate_proj", f"{prefix}up_proj"]
    return GatedMlp(load.product(names, [width, width], hidden), load.product([f"{prefix}down_proj"], [hidden], width))
