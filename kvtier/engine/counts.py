"""TokenCounts: how often a sequence has had each token, for the penalties."""

from collections import Counter
from collections.abc import Sequence

__all__ = ["TokenCounts"]


class TokenCounts:
    """How often a sequence's output has each token, and which tokens it has at all; follows the sequence as it grows.

    Args:
        prompt: what comes before the output.
    """

    __slots__ = ("_counted", "output", "present")

    def __init__(self, prompt: Sequence[int]) -> None:
        self.output: Counter[int] = Counter()
        self.present = dict.fromkeys(prompt)
        self._counted = len(prompt)

    def follow(self, tokens: Sequence[int]) -> None:
        """Count what the sequence `tokens`, prompt included, has beyond the last call."""
        fresh = tokens[self._counted :]
        self.output.update(fresh)
        self.present.update(dict.fromkeys(fresh))
        self._counted = len(tokens)
