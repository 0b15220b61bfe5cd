"""Sparse: which of its blocks a request's output attends to, where that is not all of them."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from kvtier.errors import RequestError

__all__ = ["Sparse", "SparseKind"]

SparseKind = Literal["streaming", "h2o", "quest"]


@dataclass(frozen=True, slots=True)
class Sparse:
    """Validated on construction. The prompt attends to all of itself; only tokens of the output choose.

    Args:
        kind: `streaming` attends to the first and the latest blocks (StreamingLLM, arXiv:2309.17453), `h2o` gives up
            the blocks of least attention so far, for each KV head (H2O, arXiv:2306.14048), `quest` gives up nothing and
            takes the blocks of highest expected score anew for each token and query head (Quest, arXiv:2406.10774).
        share: of the sequence's blocks that are attended to, 0..1.
        sink: leading blocks that always are among them.
        recent: latest blocks that always are.

    Raises:
        RequestError: a value is out of range.
    """

    kind: SparseKind
    share: float = 0.25
    sink: int = 1
    recent: int = 2

    def __post_init__(self) -> None:
        if self.kind not in get_args(SparseKind):
            raise RequestError(f"sparse kind {self.kind!r}: expected one of {', '.join(get_args(SparseKind))}")
        if isinstance(self.share, bool) or not isinstance(self.share, (int, float)) or not 0 < self.share <= 1:
            raise RequestError(f"sparse share={self.share!r}: expected a number above 0 and at most 1")
        for name, low in (("sink", 0), ("recent", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise RequestError(f"sparse {name}={value!r}: expected an integer, at least {low}")

    def budget(self, blocks: int) -> int:
        """How many of a sequence's `blocks` are attended to."""
        return min(blocks, max(math.ceil(self.share * blocks), self.sink + self.recent))
