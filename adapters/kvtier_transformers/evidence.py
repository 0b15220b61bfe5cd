"""Evidence that cached KV is that of the tokens it is to be stored under.

What a decoder's first layer caches of a token depends on that token and its position alone. It is computed once more
for the tokens that the caller names, and compared: a cache that was fed another prompt than its own, cropped and fed
anew, filled twice by `generate`, or masked otherwise than it was told, is found out before anything is stored. It costs
the first layer's projections of these tokens.
"""

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvtier.errors import RequestError

__all__ = ["check_tokens"]

# Fed at a time: masks grow with it.
_PIECE = 2048
# Of the norm of a token's states; products that are rounded to tf32 differ by a tenth of it.
_TOLERANCE = 1e-2


class _ComputedError(Exception):
    """Ends a forward as soon as its first layer has states: keys, values."""


class _FirstLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Poses as a layer of so many slots, and takes nothing."""

    def __init__(self, slots: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = slots

    def get_seq_length(self) -> int:
        return self._slots

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise _ComputedError(key_states, value_states)


def check_tokens(
    model: PreTrainedModel, argument: str, cached: tuple[Tensor, Tensor], tokens: NDArray[np.int64], row: int
) -> None:
    """Compare the first layer's states of one row with what the model makes of these tokens.

    Args:
        model: whose states they are.
        argument: by which it takes a cache.
        cached: keys and values of the first layer, [heads, tokens, width] each, without padding.
        tokens: int64 [tokens], what they are said to be of.
        row: of the cache, for the message.

    Raises:
        RequestError: a slot holds something else.
    """
    vocabulary = len(cast("Tensor", model.get_input_embeddings().weight))
    if tokens.size and int(tokens.max()) >= vocabulary:
        raise RequestError(f"token id {int(tokens.max())} in row {row}: expected less than {vocabulary}")
    for start in range(0, len(tokens), _PIECE):
        piece = tokens[start : start + _PIECE]
        own = _first_states(model, argument, start, piece)
        there = [states[:, start : start + len(piece)] for states in cached]
        alike = _alike(own[0], there[0]) & _alike(own[1], there[1])
        if not bool(alike.all()):
            slot = int(alike.int().argmin())
            raise RequestError(
                f"row {row} of the cache does not hold the KV of token {piece[slot]} as token {start + slot} of its "
                "sequence: name the tokens that the model was fed, in a cache made for their prompt and padding"
            )


def _first_states(model: PreTrainedModel, argument: str, start: int, tokens: NDArray[np.int64]) -> tuple[Tensor, ...]:
    """What the first layer would cache of tokens from a position on, [heads, tokens, width] each."""
    ids = torch.from_numpy(tokens).to(model.device)[None]
    layers = model.config.num_hidden_layers
    try:
        with torch.no_grad():
            model(
                input_ids=ids, use_cache=True, **{argument: Cache(layers=[_FirstLayer(start) for _ in range(layers)])}
            )
    except _ComputedError as computed:
        return tuple(states[0] for states in computed.args)
    raise AssertionError("a forward that the first layer did not end: cached_shape admits no such model")


def _alike(own: Tensor, cached: Tensor) -> Tensor:
    """Which tokens' states are the same but for rounding, bool [tokens]."""
    tolerance = max(4 * torch.finfo(own.dtype).eps, _TOLERANCE)
    own, cached = own.float(), cached.to(own.device).float()
    difference, size = ((states.square().sum((0, 2))).sqrt() for states in (own - cached, own))
    return difference <= tolerance * size
