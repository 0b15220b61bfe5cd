"""StepPlan: what one step computes, and the draft that the scheduler's phases fill in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvtier.engine.latency import StepWork
from kvtier.engine.request import Request
from kvtier.gpu.table import BlockCopy
from kvtier.hooks import NO_BLOCK, Step, StepSpan, TransferPlan

__all__ = ["Draft", "StepPlan"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything a runner needs for one step.

    A step that was planned while another one was under way may compute a token that only that one brings, and may
    hold requests that have ended meanwhile: what it computes for those is of no use, and harms nobody.

    Args:
        step: the spans to compute, one per request, decodes first.
        requests: the spans' requests, in the same order.
        samples: indices of the spans after which tokens are sampled: those that reach their request's last token. Rows
            of draft tokens follow the row of that token in the same span.
        copies: device blocks to copy before anything is computed (copy-on-write).
        transfers: what the worker hook is to move around this step; empty without a hook.
        arriving: id of a request that this step computes from KV that it also loads -> tokens that are to be there
            then. Where they are not, what was computed for it is void.
    """

    step: Step
    requests: tuple[Request, ...]
    samples: tuple[int, ...]
    copies: tuple[BlockCopy, ...]
    transfers: TransferPlan
    arriving: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(span.stop - span.start for span in self.step.spans)


@dataclass(slots=True)
class _Share:
    """One request's share of a draft: compute [start, stop)."""

    request: Request
    start: int
    stop: int
    copies: list[BlockCopy]

    @property
    def is_decode(self) -> bool:
        return self.start == self.request.num_tokens + self.request.pending - 1


@dataclass(slots=True)
class Draft:
    """A step in the making. Whatever was added for a request can be withdrawn exactly.

    Args:
        budget: tokens that the step may still compute.
        withdrawn: whether a request was preempted for it.
    """

    budget: int
    withdrawn: bool = False
    _shares: dict[str, _Share] = field(default_factory=dict)
    _arriving: set[int] = field(default_factory=set)
    _windowed_arriving: set[int] = field(default_factory=set)
    _overlapped: dict[str, int] = field(default_factory=dict)

    def compute(self, request: Request, stop: int, copies: list[BlockCopy]) -> None:
        """Compute the request's tokens up to `stop`, after copying blocks."""
        self.budget -= stop - request.reach
        self._shares[request.id] = _Share(request, request.reach, stop, copies)

    def receive(self, block_ids: Iterable[int], windowed_ids: Iterable[int] = ()) -> None:
        """A load may write to these blocks from now on."""
        self._arriving.update(block_ids)
        self._windowed_arriving.update(block for block in windowed_ids if block != NO_BLOCK)

    def overlap(self, request: Request, stop: int) -> None:
        """The request's tokens up to `stop` are loaded while it is computed."""
        self._overlapped[request.id] = stop

    def withdraw(self, request: Request) -> tuple[list[int], list[int]]:
        """The request loses its blocks: what was planned for it is off.

        Returns:
            The blocks that hold its KV, in order: of one that was to be copied, the original. And those of the windowed
            layers' own pool, if they have one.
        """
        self.withdrawn = True
        share = self._shares.pop(request.id, None)
        self._overlapped.pop(request.id, None)
        originals: dict[int, int] = {}
        windowed: dict[int, int] = {}
        if share is not None:
            self.budget += share.stop - share.start
            originals = {copy.dst: copy.src for copy in share.copies}
            windowed = {copy.windowed_dst: copy.windowed_src for copy in share.copies}
        blocks = request.blocks
        return (
            [originals.get(block, block) for block in blocks.ids],
            [windowed.get(block, block) for block in blocks.windowed_ids],
        )

    @property
    def work(self) -> StepWork:
        """What is in it so far."""
        decodes = [share for share in self._shares.values() if share.is_decode]
        total = sum(share.stop - share.start for share in self._shares.values())
        last = sum(share.stop - share.start for share in decodes)
        return StepWork(last, sum(share.start for share in decodes), total - last)

    @property
    def tightest_target(self) -> float | None:
        """The least time per token that a request in it, which has its first one, wants; None: none does."""
        targets = [
            share.request.params.tpot_target
            for share in self._shares.values()
            if share.request.num_output and share.request.params.tpot_target is not None
        ]
        return min(targets, default=None)

    def step(self, index: int, block_size: int) -> Step:
        """The draft as the hook sees it."""
        spans, written, windowed = [], set(self._arriving), set(self._windowed_arriving)
        for share in self._shares.values():
            request, ids = share.request, tuple(share.request.blocks.ids)
            windowed_ids = tuple(request.blocks.windowed_ids)
            spans.append(StepSpan(request, ids, share.start, share.stop, request.exact, windowed_ids))
            first, stop = share.start // block_size, -(-share.stop // block_size)
            written.update(ids[first:stop])
            written.update(copy.dst for copy in share.copies)
            windowed.update(windowed_ids[first:stop])
        return Step(index, tuple(spans), frozenset(written), frozenset(windowed))

    def seal(self, step: Step, transfers: TransferPlan) -> StepPlan:
        """The finished plan."""
        shares = list(self._shares.values())
        return StepPlan(
            step=step,
            requests=tuple(share.request for share in shares),
            samples=tuple(
                at for at, share in enumerate(shares) if share.stop >= share.request.num_tokens + share.request.pending
            ),
            copies=tuple(copy for share in shares for copy in share.copies),
            transfers=transfers,
            arriving=dict(self._overlapped),
        )
