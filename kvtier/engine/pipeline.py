"""Pipeline: one step runs in a thread of its own while the next one is planned and the last one's output is written.

    engine's thread    plan 1 | plan 2 ------- | account for 1, plan 3 - | account for 2, plan 4 - |
    pipeline's thread         | run 1 -------- | run 2 ----------------- | run 3 ----------------- |

A step is started only once the one before it was accounted for, so that its inputs are known.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvtier.engine.outputs import Sampled
from kvtier.engine.plan import StepPlan
from kvtier.hooks import TransferResults

__all__ = ["Pipeline", "Ran"]


@dataclass(frozen=True, slots=True)
class Ran:
    """A step that was run.

    Args:
        plan: what it was to do.
        sampled: one for each of `plan.samples`.
        results: of the worker hook.
        seconds: that computing took.
    """

    plan: StepPlan
    sampled: list[Sampled]
    results: TransferResults
    seconds: float


class Pipeline:
    """Runs one step at a time.

    Args:
        run: runs a step; called in the pipeline's thread.
    """

    def __init__(self, run: Callable[[StepPlan], Ran]) -> None:
        self._run = run
        self._thread = ThreadPoolExecutor(1, "kvtier-steps")
        self._running: tuple[StepPlan, Future[Ran]] | None = None

    @property
    def busy(self) -> bool:
        """Whether a step is under way that computes or moves anything."""
        if self._running is None:
            return False
        transfers = self._running[0].transfers
        return bool(self._running[0].requests or transfers.loads or transfers.saves or transfers.evacuations)

    @property
    def plan(self) -> StepPlan | None:
        """The step under way."""
        return None if self._running is None else self._running[0]

    def wait(self) -> Ran | None:
        """The end of the step under way; None: there is none. Raises what it raised."""
        running, self._running = self._running, None
        return None if running is None else running[1].result()

    def start(self, plan: StepPlan) -> None:
        """Run a step; the one before it has ended."""
        self._running = plan, self._thread.submit(self._run, plan)
