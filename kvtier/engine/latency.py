"""StepModel: how long a step will take, learned from the steps that were run."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["LoadModel", "StepModel", "StepWork"]

# Steps are noisy and machines change: half of what was learned is forgotten within about 35 steps.
_KEEP = 0.98
# Below this weight a fit would follow single steps.
_LEAST_WEIGHT = 4.0
_UNITS = (1.0, 1.0, 1e-3, 1e-2)  # so that no feature's square outgrows the others by much
_RIDGE = 1e-9


class StepWork(NamedTuple):
    """What a step computes.

    decodes: requests of which it computes the last token, and drafts. context: tokens that those attend to, summed.
    prefill: tokens of prompts.
    """

    decodes: int
    context: int
    prefill: int


class StepModel:
    """seconds = a + b * decodes + c * context + d * prefill, no coefficient below 0.

    Least squares over exponentially fading steps, for use from one thread. Four numbers are few enough to be learned
    within a dozen steps, and what they leave out (attention inside long prefills) only makes chunks shorter.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._xx = [[0.0] * 4 for _ in range(4)]
        self._xy = [0.0] * 4
        self._fit: list[float] | None = None

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took so long. Of no work or no time: ignored."""
        if seconds <= 0 or not (work.decodes or work.prefill):
            return
        x = _features(work)
        self._weight = _KEEP * self._weight + 1
        for row, value in zip(self._xx, x, strict=True):
            row[:] = [_KEEP * old + value * other for old, other in zip(row, x, strict=True)]
        self._xy = [_KEEP * old + value * seconds for old, value in zip(self._xy, x, strict=True)]
        self._fit = None

    def seconds(self, work: StepWork) -> float | None:
        """Expected time of a step; None before enough steps were run."""
        fit = self._coefficients()
        return None if fit is None else sum(map(float.__mul__, fit, _features(work)))

    def prefill_limit(self, decodes: int, context: int, seconds: float) -> int | None:
        """Prompt tokens that fit into a step of these decodes within `seconds`; None: any number, as far as is known.

        May be negative, where the decodes alone take longer.
        """
        fit, alone = self._coefficients(), self.seconds(StepWork(decodes, context, 0))
        if fit is None or alone is None or not fit[3]:
            return None
        return int((seconds - alone) / (fit[3] * _UNITS[3]))

    def prefill_seconds(self, tokens: int) -> float:
        """What so many prompt tokens add to the steps that compute them; 0 before any were."""
        fit = self._coefficients()
        return 0.0 if fit is None else fit[3] * _UNITS[3] * tokens

    def _coefficients(self) -> list[float] | None:
        if self._fit is None and self._weight >= _LEAST_WEIGHT:
            self._fit = _non_negative(self._xx, self._xy)
        return self._fit


class LoadModel:
    """Seconds per token that is loaded, from those that were, fading like `StepModel`'s."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A load took so long. Of no tokens: ignored."""
        if tokens > 0 and seconds >= 0:
            self._tokens = _KEEP * self._tokens + tokens
            self._seconds = _KEEP * self._seconds + seconds

    def seconds(self, tokens: int) -> float:
        """Expected time of a load; 0 before any."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


def _features(work: StepWork) -> list[float]:
    return [value * unit for value, unit in zip((1, *work), _UNITS, strict=True)]


def _non_negative(xx: Sequence[Sequence[float]], xy: Sequence[float]) -> list[float]:
    """Least squares whose most negative coefficient is dropped until none is left."""
    kept = [at for at in range(len(xy)) if xx[at][at] > 0]
    while True:
        solved = _solve([[xx[row][column] for column in kept] for row in kept], [xy[row] for row in kept])
        worst = min(range(len(kept)), key=solved.__getitem__)
        if solved[worst] >= 0:
            break
        del kept[worst]
    fit = [0.0] * len(xy)
    for at, value in zip(kept, solved, strict=True):
        fit[at] = value
    return fit


def _solve(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Gauss with a ridge, so that features which always went together share what they explain."""
    size = len(target)
    rows = [
        [value + (_RIDGE * max(1.0, value) if at == column else 0.0) for column, value in enumerate(row)] + [goal]
        for at, (row, goal) in enumerate(zip(matrix, target, strict=True))
    ]
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(rows[row][at]))
        rows[at], rows[pivot] = rows[pivot], rows[at]
        head = rows[at][at]
        for row in rows[at + 1 :]:
            factor = row[at] / head
            row[at:] = [value - factor * above for value, above in zip(row[at:], rows[at][at:], strict=True)]
    solution = [0.0] * size
    for at in reversed(range(size)):
        known = sum(rows[at][column] * solution[column] for column in range(at + 1, size))
        solution[at] = (rows[at][size] - known) / rows[at][at]
    return solution
