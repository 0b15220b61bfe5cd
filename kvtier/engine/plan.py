"""StepPlan: what one step computes, and the draft that the scheduler's phases fill in."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtier.engine.request import Request
from kvtier.gpu.table import BlockCopy
from kvtier.hooks import Step, StepSpan, TransferPlan

__all__ = ["Draft", "StepPlan"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything a runner needs for one step.

    Args:
        step: the spans to compute, one per request, decodes first.
        requests: the spans' requests, in the same order.
        samples: indices of the spans after which tokens are sampled: those that reach their request's last token. Rows
            of draft tokens follow the row of that token in the same span.
        copies: device blocks to copy before anything is computed (copy-on-write).
        transfers: what the worker hook is to move around this step; empty without a hook.
    """

    step: Step
    requests: tuple[Request, ...]
    samples: tuple[int, ...]
    copies: tuple[BlockCopy, ...]
    transfers: TransferPlan

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(span.stop - span.start for span in self.step.spans)


@dataclass(slots=True)
class _Share:
    """One request's part of a draft: compute [request.num_computed, stop)."""

    request: Request
    stop: int
    copies: list[BlockCopy]


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

    def compute(self, request: Request, stop: int, copies: list[BlockCopy]) -> None:
        """Compute the request's tokens up to `stop`, after copying blocks."""
        self.budget -= stop - request.num_computed
        self._shares[request.id] = _Share(request, stop, copies)

    def receive(self, block_ids: Iterable[int]) -> None:
        """A load may write to these blocks from now on."""
        self._arriving.update(block_ids)

    def withdraw(self, request: Request) -> None:
        """The request loses its blocks: what was planned for it is off."""
        self.withdrawn = True
        share = self._shares.pop(request.id, None)
        if share is not None:
            self.budget += share.stop - request.num_computed

    def step(self, index: int, block_size: int) -> Step:
        """The draft as the hook sees it."""
        spans, written = [], set(self._arriving)
        for share in self._shares.values():
            request, ids = share.request, tuple(share.request.blocks.ids)
            spans.append(StepSpan(request, ids, request.num_computed, share.stop, request.exact))
            written.update(ids[request.num_computed // block_size : -(-share.stop // block_size)])
            written.update(copy.dst for copy in share.copies)
        return Step(index, tuple(spans), frozenset(written))

    def seal(self, step: Step, transfers: TransferPlan) -> StepPlan:
        """The finished plan."""
        shares = list(self._shares.values())
        return StepPlan(
            step=step,
            requests=tuple(share.request for share in shares),
            samples=tuple(at for at, share in enumerate(shares) if share.stop >= share.request.num_tokens),
            copies=tuple(copy for share in shares for copy in share.copies),
            transfers=transfers,
        )
