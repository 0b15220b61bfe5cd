"""How long the engine would need to compute KV, from the prefills that it runs anyway."""

from typing import NamedTuple

__all__ = ["PrefillMeter", "PrefillShape"]


class PrefillShape(NamedTuple):
    """How the work of a prefill grows with depth: w(m, n) = (n - m) + curvature * (n^2 - m^2) for tokens [m, n).

    The unit is a token at depth 0. curvature: attention's share, a / 2P with P active parameters and
    a = layers * heads * (query and value width of a head); 0 where it is unknown.
    """

    curvature: float = 0.0

    def work(self, start: int, stop: int) -> float:
        """Of tokens [start, stop) of one sequence, in tokens at depth 0."""
        return stop - start + self.curvature * (stop * stop - start * start)


class PrefillMeter:
    """Measured prefill speed: work over time, both fading exponentially, so that long prefills count for more.

    Args:
        shape: of the model.
        weight: of the latest prefill, 0..1.
    """

    def __init__(self, shape: PrefillShape | None = None, weight: float = 0.2) -> None:
        self.shape = shape or PrefillShape()
        self._weight = weight
        self._work = self._seconds = 0.0

    def observe(self, tokens: int, seconds: float, attended: int = 0) -> None:
        """A step of nothing but prefill took so long. Of no tokens or no time: ignored.

        attended: the tokens that each of `tokens` attends to, summed: (stop^2 - start^2) / 2 for each sequence.
        """
        if tokens > 0 and seconds > 0:
            work = tokens + 2 * self.shape.curvature * attended
            keep = 1 - self._weight
            self._work = keep * self._work + self._weight * work
            self._seconds = keep * self._seconds + self._weight * seconds

    @property
    def tokens_per_second(self) -> float | None:
        """At depth 0; None until a prefill was measured."""
        return self._work / self._seconds if self._seconds else None

    def seconds(self, start: int, stop: int) -> float | None:
        """Expected time to compute tokens [start, stop) of one sequence; None until a prefill was measured."""
        rate = self.tokens_per_second
        return None if rate is None else self.shape.work(start, stop) / rate
