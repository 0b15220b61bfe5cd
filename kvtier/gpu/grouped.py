"""GroupedAttention: each layer attends over the memory of its layer group, through the group's own block tables."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kvtier.gpu.batches import AttentionSpan
from kvtier.layout import LayerGroup

__all__ = ["GroupedAttention", "GroupedSpan"]


class GroupedSpan(AttentionSpan, Protocol):
    """An `AttentionSpan` of a model of which only some layers have a window."""

    @property
    def windowed_ids(self) -> Sequence[int]:
        """The sequence's blocks in the windowed layers' memory; in the place of those behind the window, any."""
        ...


class _OfGroup(Protocol):
    def plan(self, spans: Sequence[AttentionSpan]) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class _Span(NamedTuple):
    block_ids: Sequence[int]
    start: int
    stop: int


class GroupedAttention:
    """Attention of one model over two layer groups. Implements `kvtier.engine.models.base.Attention`.

    Args:
        groups: layers without a window, then those with one.
        full: attention over the memory of the first ones, which it counts from 0.
        windowed: of the second ones, likewise.
    """

    def __init__(self, groups: Sequence[LayerGroup], full: _OfGroup, windowed: _OfGroup) -> None:
        self._full, self._windowed = full, windowed
        self._layers = {
            layer: (attention, at)
            for group, attention in zip(groups, (full, windowed), strict=True)
            for at, layer in enumerate(group.layers)
        }

    def plan(self, spans: Sequence[GroupedSpan]) -> None:
        """Prepare a step. The flat batch has the spans' new tokens, one span after the other.

        Raises:
            CapacityError: a span without new tokens, or whose blocks do not hold them, or are not of the pool.
        """
        self._full.plan(spans)
        self._windowed.plan([_Span(span.windowed_ids, span.start, span.stop) for span in spans])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `PagedAttention`; `layer`: of the model."""
        attention, at = self._layers[layer]
        return attention(at, q, k, v)
