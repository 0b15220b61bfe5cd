"""Load or recompute: how much of what a look-up found is worth moving.

    found      [ host ........ | nvme ............ | remote ... ]     runs of blocks, each in one tier
    chosen     [ load ............................ | recompute  ]     one cut, between two runs

Loading tokens [start, cut) and computing [cut, stop) costs sum(latency + (queue + bytes) / speed) + w(cut, stop) / F.
Inside a run that is concave in the cut (bytes are linear, attention grows), so only its ends need to be looked at.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from kvtier.cost.prefill import PrefillShape
from kvtier.cost.speed import UNMEASURED, TierSpeed

__all__ = ["Choice", "Decision", "LoadOrRecompute", "Run"]

Choice: TypeAlias = Literal["load", "split", "recompute"]
_Reason: TypeAlias = Literal["cheaper", "unmeasured", "no_prefill_rate", "probe", "slow", "queued"]

_PROBE_SECONDS = 10.0
_PROBE_BYTES = 4 << 20
_TRIAL_BYTES = 256 << 20


class Run(NamedTuple):
    """Consecutive blocks of one request that lie in one tier."""

    tier: str
    nbytes: int
    tokens: int


class Decision(NamedTuple):
    """What to do with the runs that were found.

    load_tokens: of their beginning are loaded, the rest is computed.
    reason: `cheaper`: loading is. `unmeasured`: the tier is tried, up to a bound. `no_prefill_rate`: nothing to
        compare with yet. `probe`: a slow tier is measured again. `slow`: computing is cheaper. `queued`: computing is
        cheaper while the tier has so much to do.
    tier: the one that decided: the first that is not loaded from, or else the last that is.
    load_seconds, recompute_seconds: expected times to load `load_tokens` (what is unmeasured counts nothing), and to
        compute all that was found; None where that is unknown.
    """

    load_tokens: int
    reason: _Reason
    tier: str
    load_seconds: float
    recompute_seconds: float | None

    def choice(self, found: int) -> Choice:
        """In a word, where `found` tokens were found."""
        if self.load_tokens == 0:
            return "recompute"
        return "load" if self.load_tokens >= found else "split"


class _Cut(NamedTuple):
    """Loading the first `runs` runs: seconds until they are there, and with an idle tier."""

    runs: int
    tokens: int
    load: float
    idle: float


class LoadOrRecompute:
    """The model of the choice. Not thread-safe.

    Args:
        shape: how prefill work grows with depth.
        probe_seconds: a tier that was judged slow is measured again after this long, or it could never recover.
        probe_bytes: most bytes of such a probe (at least one token's share of the run is taken).
        trial_bytes: most bytes that are asked of a tier that was never measured.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        shape: PrefillShape | None = None,
        *,
        probe_seconds: float = _PROBE_SECONDS,
        probe_bytes: int = _PROBE_BYTES,
        trial_bytes: int = _TRIAL_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shape = shape or PrefillShape()
        self._probe_seconds = probe_seconds
        self._probe_bytes = probe_bytes
        self._trial_bytes = trial_bytes
        self._clock = clock
        self._next_probe: dict[str, float] = {}

    def decide(
        self,
        runs: Sequence[Run],
        speeds: Mapping[str, TierSpeed],
        prefill_tokens_per_second: float | None,
        *,
        start: int = 0,
        link: TierSpeed = UNMEASURED,
    ) -> Decision:
        """How much of the runs to load.

        Args:
            runs: what was found, in order; not empty.
            speeds: by tier; a tier that is missing is unmeasured.
            prefill_tokens_per_second: at depth 0; None if unknown.
            start: tokens before the first run.
            link: from host into device memory, which everything that is loaded passes last.
        """
        runs = [run for at, run in enumerate(runs) if run.tokens or at == 0]
        cuts = self._cuts(runs, speeds, link)
        if prefill_tokens_per_second is None:
            return self._bounded(runs, cuts[-1], speeds, ("no_prefill_rate", None))
        stop = start + sum(run.tokens for run in runs)
        rate = prefill_tokens_per_second
        recompute = self._shape.work(start, stop) / rate

        def total(load: float, cut: _Cut) -> float:
            return load + self._shape.work(start + cut.tokens, stop) / rate

        # Of equals the longer one: it leaves the device free for others.
        best = min(reversed(cuts), key=lambda cut: total(cut.load, cut))
        if best.runs == len(runs):
            return self._bounded(runs, best, speeds, ("cheaper", recompute))
        idle = min(reversed(cuts), key=lambda cut: total(cut.idle, cut))
        refused = runs[best.runs]
        if idle.runs > best.runs:
            return Decision(best.tokens, "queued", refused.tier, best.load, recompute)
        return self._probe(refused, best, recompute)

    @staticmethod
    def _cuts(runs: Sequence[Run], speeds: Mapping[str, TierSpeed], link: TierSpeed) -> list[_Cut]:
        cuts = [_Cut(0, 0, 0.0, 0.0)]
        seen: set[str] = set()
        moved = 0
        for run in runs:
            before = cuts[-1]
            moved += run.nbytes
            speed = speeds.get(run.tier, UNMEASURED)
            idle = speed._replace(queued_bytes=0)
            # A queue and a latency are waited for once, whatever else of the tier follows.
            again = idle._replace(latency_seconds=0.0)
            load = ((again if run.tier in seen else speed).seconds(run.nbytes) or 0.0) + before.load
            free = ((again if run.tier in seen else idle).seconds(run.nbytes) or 0.0) + before.idle
            over = link if before.runs == 0 else link._replace(queued_bytes=0, latency_seconds=0.0)
            last = over.seconds(run.nbytes) or 0.0
            seen.add(run.tier)
            cuts.append(_Cut(before.runs + 1, before.tokens + run.tokens, load + last, free + last))
        return cuts

    def _bounded(
        self, runs: Sequence[Run], cut: _Cut, speeds: Mapping[str, TierSpeed], why: tuple[_Reason, float | None]
    ) -> Decision:
        """Load up to `cut`, but of tiers that were never measured no more than the bound."""
        reason, recompute = why
        tokens, left = 0, self._trial_bytes
        for run in runs[: cut.runs]:
            if speeds.get(run.tier, UNMEASURED).bytes_per_second is None:
                fitting = _leading(run, left)
                left -= run.nbytes
                if reason == "cheaper":
                    reason = "unmeasured"
                if fitting < run.tokens:
                    return Decision(tokens + fitting, "unmeasured", run.tier, cut.load, recompute)
            tokens += run.tokens
        return Decision(tokens, reason, runs[cut.runs - 1].tier, cut.load, recompute)

    def _probe(self, run: Run, best: _Cut, recompute: float) -> Decision:
        now = self._clock()
        due = self._next_probe.setdefault(run.tier, now + self._probe_seconds)
        if now < due:
            return Decision(best.tokens, "slow", run.tier, best.load, recompute)
        self._next_probe[run.tier] = now + self._probe_seconds
        return Decision(best.tokens + _leading(run, self._probe_bytes), "probe", run.tier, best.load, recompute)


def _leading(run: Run, nbytes: int) -> int:
    """Leading tokens of a run that have `nbytes`; at least one, the caller rounds up to blocks."""
    if run.nbytes <= nbytes:
        return run.tokens
    return max(1, run.tokens * max(nbytes, 0) // run.nbytes)
