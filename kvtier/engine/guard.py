"""GuardedHook: what a hook raises becomes a miss, a count and, once in a while, a line in the log."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from kvtier.hooks import (
    Completed,
    FinishReason,
    Match,
    Pending,
    RequestView,
    SchedulerHook,
    Step,
    TransferPlan,
    TransferResults,
)

__all__ = ["GuardedHook"]

_log = logging.getLogger(__name__)

_LOG_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Stray:
    """A request that the hook can no longer be trusted to report; `waits` are copies that may touch its blocks."""

    report: str  # the field of `Completed` that is to name it
    request_id: str
    waits: frozenset[int]


class GuardedHook:
    """Implements `SchedulerHook` over one that may raise.

    Invariants:
        1. No method raises an `Exception`.
        2. Each request that was `allocated` tokens to load, or swapped out, is reported by `completed`, and each one
           for which `finished` returned True is released, provided that the worker reports its copies.
        3. None of those reports comes while a copy that the worker was told of before may still touch the blocks.
        4. A step that was planned without the hook waits for all copies out of the device, since which of them it
           would overwrite is the hook's to know.
        5. A hook that may think of a device block what is not so is torn, for good: because a step was planned without
           it, or it was not to be told that a load is off. It saves what is computed, and neither loads nor evacuates.

    Args:
        hook: what the scheduler half of a connector is.
        clock: seconds, for the log.
    """

    def __init__(self, hook: SchedulerHook, clock: Callable[[], float] = time.monotonic) -> None:
        self._hook = hook
        self._clock = clock
        self._logged: dict[str, float] = {}
        self._loading: set[str] = set()
        self._swapping: set[str] = set()
        self._given_up: set[str] = set()  # live requests that the hook may be torn about: it offers them nothing
        self._held: Counter[str] = Counter()  # ended requests whose blocks the engine keeps for the hook
        self._saves: set[int] = set()  # jobs that the worker was told of, and has not reported
        self._others: set[int] = set()  # likewise; evacuations have left the device before their step writes
        self._torn = False
        self._refused: set[int] = set()  # loads and evacuations of a torn hook, which have failed
        self._strays: list[_Stray] = []
        self.errors = 0

    # ---- the protocol

    def match(self, request: RequestView, device_tokens: int) -> Match | Pending:
        """See `SchedulerHook.match`."""
        if self._torn or request.id in self._given_up:
            return Match(0)
        with self._guard("match", request.id):
            return self._hook.match(request, device_tokens)
        return Match(0)

    def allocated(
        self, request: RequestView, block_ids: Sequence[int], external_tokens: int, windowed_ids: Sequence[int] = ()
    ) -> None:
        """See `SchedulerHook.allocated`. Raised: what the request was to load counts as failed."""
        self._swapping.discard(request.id)
        if external_tokens:
            self._loading.add(request.id)
        with self._guard("allocated", request.id):
            self._hook.allocated(request, block_ids, external_tokens, **_windowed(windowed_ids))
            return
        self._give_up(request.id)

    def swap_out(
        self,
        request: RequestView,
        block_ids: Sequence[int],
        num_tokens: int,
        *,
        exact: bool,
        forced: bool,
        windowed_ids: Sequence[int] = (),
    ) -> bool:
        """See `SchedulerHook.swap_out`. Raised: nothing was kept."""
        if self._torn or request.id in self._given_up:
            return False
        with self._guard("swap_out", request.id):
            windowed = _windowed(windowed_ids)
            kept = self._hook.swap_out(request, block_ids, num_tokens, exact=exact, forced=forced, **windowed)
            if kept:
                self._swapping.add(request.id)
            return kept
        return False

    def prefetch(self, request: RequestView) -> None:
        """See `SchedulerHook.prefetch`."""
        with self._guard("prefetch", request.id):
            self._hook.prefetch(request)

    def plan(self, step: Step) -> TransferPlan:
        """See `SchedulerHook.plan`. Raised: nothing is moved, and nobody gets what was to be."""
        plan = TransferPlan(fences=frozenset(self._saves))
        with self._guard("plan"):
            plan = self._hook.plan(step)
            if self._torn:
                self._refused.update(plan.loads, plan.evacuations)
                plan = TransferPlan(saves=plan.saves, fences=plan.fences)
            self._saves.update(plan.saves)
            self._others.update(plan.loads, plan.evacuations)
            return plan
        self._tear()
        return plan

    def completed(self, results: TransferResults) -> Completed:
        """See `SchedulerHook.completed`. Raised: what was under way counts as lost."""
        results = replace(results, failed=results.failed | dict.fromkeys(self._refused, 0))
        self._refused.clear()
        ended = {*results.finished, *results.failed}
        self._saves -= ended
        self._others -= ended
        completed, failed = Completed(), True
        with self._guard("completed"):
            completed, failed = self._hook.completed(results), False
        if failed:
            self._give_up_all()
        return self._reported(completed)

    def observe_prefill(self, tokens: int, seconds: float, attended: int = 0) -> None:
        """See `SchedulerHook.observe_prefill`."""
        with self._guard("observe_prefill"):
            self._hook.observe_prefill(tokens, seconds, attended)

    def finished(self, request_id: str, reason: FinishReason) -> bool:
        """See `SchedulerHook.finished`. Raised: its blocks stay until no copy can touch them."""
        loading = request_id in self._loading
        self._loading.discard(request_id)
        self._swapping.discard(request_id)
        if reason != "preempt":
            self._given_up.discard(request_id)
        # A stray is the guard's to release from now on, whatever the hook thinks of it.
        stray = any(stray.request_id == request_id and stray.report == "loaded" for stray in self._strays)
        self._strays = [stray for stray in self._strays if stray.request_id != request_id or stray.report == "released"]
        held, failed = False, True
        with self._guard("finished", request_id):
            held, failed = self._hook.finished(request_id, reason), False
        if (failed and loading) or stray:
            held = True
            self._strays.append(_Stray("released", request_id, self._under_way()))
        self._held[request_id] += held
        if failed and loading:
            self._tear()
        return held

    @property
    def busy(self) -> bool:
        """See `SchedulerHook.busy`. A torn hook waits for copies of which nobody knows."""
        own = bool(self._strays or self._under_way() or self._loading or self._swapping or self._refused)
        if not self._torn:
            with self._guard("busy"):
                return self._hook.busy or own
        return own

    # ---- what the hook is not trusted with any more

    def _give_up(self, request_id: str) -> None:
        """The hook is to forget a request that goes on without it; who waits for its word gets the guard's."""
        waits, loading = self._under_way(), request_id in self._loading
        self._given_up.add(request_id)
        for waiting, report in ((self._loading, "loaded"), (self._swapping, "swapped")):
            if request_id in waiting:
                self._strays.append(_Stray(report, request_id, waits))
        self._loading.discard(request_id)
        self._swapping.discard(request_id)
        with self._guard("finished", request_id):
            self._hook.finished(request_id, "preempt")
            return
        if loading:
            self._tear()

    def _tear(self) -> None:
        if not self._torn:
            self._torn = True
            _log.error("the hook is torn: from now on it saves, and loads nothing")
        self._give_up_all()

    def _give_up_all(self) -> None:
        for request_id in (*self._loading, *self._swapping):
            self._give_up(request_id)
        stray = Counter(stray.request_id for stray in self._strays if stray.report == "released")
        for request_id, held in (self._held - stray).items():
            self._strays += [_Stray("released", request_id, self._under_way())] * held

    def _under_way(self) -> frozenset[int]:
        return frozenset(self._saves | self._others)

    def _reported(self, completed: Completed) -> Completed:
        """What the hook says of those that it still answers for, and what the guard says of the others."""
        loaded = {name: good for name, good in completed.loaded.items() if name in self._loading}
        swapped = [name for name in completed.swapped if name in self._swapping]
        released = self._released(completed.released)
        under_way = self._under_way()
        due = [stray for stray in self._strays if stray.waits.isdisjoint(under_way)]
        self._strays = [stray for stray in self._strays if not stray.waits.isdisjoint(under_way)]
        lost = {stray.request_id for stray in due if stray.report == "loaded"}
        swapped += [stray.request_id for stray in due if stray.report == "swapped"]
        released += [stray.request_id for stray in due if stray.report == "released"]
        self._loading -= loaded.keys()
        self._swapping.difference_update(swapped)
        self._held -= Counter(released)
        return replace(
            completed,
            loaded=loaded | dict.fromkeys(lost, (0, True)),
            failed=completed.failed | lost,
            swapped=tuple(swapped),
            released=tuple(released),
        )

    def _released(self, names: Sequence[str]) -> list[str]:
        """Of what the hook releases, that which nobody else will."""
        stray = Counter(stray.request_id for stray in self._strays if stray.report == "released")
        return list(((self._held - stray) & Counter(names)).elements())

    def _guard(self, method: str, request_id: str = "") -> "_Guard":
        return _Guard(self, method, request_id)

    def count(self, method: str, request_id: str, error: BaseException) -> None:
        """A method of the hook raised, for a request if any is named."""
        self.errors += 1
        now = self._clock()
        if now - self._logged.get(method, -_LOG_SECONDS) < _LOG_SECONDS:
            return
        self._logged[method] = now
        subject = f" for request {request_id!r}" if request_id else ""
        text = "hook.%s raised%s and counts as a miss; %d errors so far"
        _log.error(text, method, subject, self.errors, exc_info=error)


def _windowed(ids: Sequence[int]) -> dict[str, Sequence[int]]:
    # Left out where there are none: a hook that serves uniform models alone need not know of them.
    return {"windowed_ids": ids} if ids else {}


@dataclass(frozen=True, slots=True)
class _Guard:
    """Ends a block that raises an `Exception`, a third party's defect, and has it counted."""

    hook: GuardedHook
    method: str
    request_id: str

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self.hook.count(self.method, self.request_id, error)
        return True
