"""PrefixLayer: transformers' growing layer, which may begin with a restored prefix."""

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvtier.errors import RequestError

__all__ = ["PrefixLayer"]


class PrefixLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, [rows, heads, slots, width] each, which grow as `DynamicLayer`'s do.

    Everything but its beginning is inherited: mask sizes, crop, reordering, repeating, offloading.

    Attributes:
        untouched: it holds a restored prefix that no forward has used yet.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.untouched = False
        self._slots = 0

    def restore(self, keys: torch.Tensor, values: torch.Tensor, slots: int) -> None:
        """Begin with a prefix.

        Args:
            keys: [rows, heads, restored slots, width]; they become the layer's own.
            values: likewise.
            slots: of the whole prompt, which the first forward must not go beyond.
        """
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self.untouched, self._slots = True, slots

    def states(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values, or None where nothing is cached."""
        if self.keys is None or self.values is None or not self.get_seq_length():
            return None
        return self.keys, self.values

    def reset(self) -> None:
        """Forget everything, the restored prefix too."""
        super().reset()
        self.untouched = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states [rows, heads, new slots, width]; returns all of them.

        Raises:
            RequestError: the restored prefix is not one of these states: the whole prompt was fed once more, or the
                model has moved to another dtype or device since.
        """
        restored = self.states() if self.untouched else None
        if restored is not None:
            self._begin(restored, (key_states, value_states))
        states: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return states

    def _begin(self, prefix: tuple[torch.Tensor, torch.Tensor], first: tuple[torch.Tensor, torch.Tensor]) -> None:
        rows, held, new = len(first[0]), self.get_seq_length(), first[0].shape[-2]
        if held + new > self._slots:
            raise RequestError(
                f"{new} tokens after a restored prefix of {held}, in a cache for a prompt of {self._slots}: feed what "
                "follows the prefix, input_ids[:, cache.get_seq_length():]"
            )
        for restored, states in zip(prefix, first, strict=True):
            if _kind(restored) != _kind(states) or rows % len(restored):
                raise RequestError(
                    f"states {tuple(states.shape)} of {states.dtype} on {states.device} after a restored prefix "
                    f"{tuple(restored.shape)} of {restored.dtype} on {restored.device}: make the cache from the "
                    "model and the batch that it is used with"
                )
        # Generation repeats a prompt for its beams and samples only after the cache was handed over.
        repeats = rows // len(prefix[0])
        if repeats > 1:
            self.batch_repeat_interleave(repeats)
        self.untouched = False


def _kind(states: torch.Tensor) -> tuple[int, int, torch.dtype, torch.device]:
    """Heads, width, dtype, device."""
    return states.shape[1], states.shape[3], states.dtype, states.device
