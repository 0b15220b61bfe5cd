"""Prompts and sequences as callers give them: rows of token ids, padded on the left."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from kvtier.errors import RequestError

__all__ = ["Prompt", "Tokens", "token_rows"]

Tokens = Tensor | Sequence[Sequence[int]]
"""Token ids, [rows, tokens], or rows of different lengths."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A batch of prompts in as many slots each, the last ones of which are tokens.

    Args:
        rows: ids of all slots, padding included, int64 [slots] each.
        padding: slots of padding at the beginning of each row.
    """

    rows: tuple[NDArray[np.int64], ...]
    padding: tuple[int, ...]

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor | None, model: PreTrainedModel) -> "Prompt":
        """Read what `generate` is about to get.

        Raises:
            RequestError: no ids [rows, slots], padding elsewhere than on the left, or none named where some is found.
        """
        for name, given in (("input_ids", input_ids), ("attention_mask", attention_mask)):
            if given is not None and not isinstance(given, Tensor):
                raise RequestError(
                    f"{name} is a {type(given).__name__}: expected a tensor [rows, tokens]; of what a tokenizer "
                    f'returned, that is ["{name}"]'
                )
        if input_ids.ndim != 2 or not input_ids.numel():
            raise RequestError(f"input_ids of shape {tuple(input_ids.shape)}: expected token ids [rows, tokens]")
        rows = token_rows(input_ids)
        if attention_mask is None:
            _check_unpadded(input_ids, model)
            attention_mask = torch.ones_like(input_ids)
        if attention_mask.shape != input_ids.shape:
            raise RequestError(
                f"attention_mask of shape {tuple(attention_mask.shape)}: expected that of input_ids, "
                f"{tuple(input_ids.shape)}"
            )
        mask = attention_mask.cpu() != 0
        if bool((mask[:, :-1] & ~mask[:, 1:]).any()) or not bool(mask[:, -1].all()):
            raise RequestError(
                "attention_mask has zeros after ones, or only zeros in a row: expected padding on the left"
            )
        return cls(tuple(rows), tuple((~mask).sum(1).tolist()))

    @property
    def slots(self) -> int:
        """Of each row."""
        return len(self.rows[0])

    def tokens(self, row: int) -> NDArray[np.int64]:
        """A row without its padding."""
        return self.rows[row][self.padding[row] :]


def token_rows(tokens: Tokens) -> list[NDArray[np.int64]]:
    """Each row's ids, int64.

    Raises:
        RequestError: they are no rows of integers.
    """
    rows = [np.asarray(row) for row in (tokens.tolist() if isinstance(tokens, Tensor) else tokens)]
    for row in rows:
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
            raise RequestError(
                f"a row of shape {row.shape} and type {row.dtype}: expected token ids [rows, tokens]; of what "
                "generate returned as a dictionary, those are its sequences"
            )
    return [row.astype(np.int64) for row in rows]


def _check_unpadded(input_ids: Tensor, model: PreTrainedModel) -> None:
    """Without a mask, generation takes one from the padding tokens that it finds: the cache would not know of it."""
    generation = model.generation_config if model.can_generate() else None
    pad, ends = (None, None) if generation is None else (generation.pad_token_id, generation.eos_token_id)
    # Where padding is an end of sequence, too, generation takes every token for one.
    ambiguous = pad in ends if isinstance(ends, list) else pad == ends
    if pad is not None and not ambiguous and bool((input_ids == pad).any()):
        raise RequestError(
            f"input_ids contain the padding token {pad}: pass the attention_mask that generation gets, with "
            "ones for all that is a token"
        )
