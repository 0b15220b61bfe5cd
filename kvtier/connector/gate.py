"""The gate between a look-up and its load: measured speeds in, a number of blocks out, and the reason on record."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby

from kvtier.connector.options import ConnectorOptions
from kvtier.cost import Decision, LoadOrRecompute, PrefillMeter, Run, SpeedMeter
from kvtier.store import TieredStore

__all__ = ["Gate"]

_log = logging.getLogger(__name__)

# How many decisions `explain` remembers.
_REMEMBERED = 1024
# A load may take this much longer than computing the same tokens was expected to take, before it is given up.
_PATIENCE = 1.5


class Gate:
    """Decides how many of the blocks that were found are worth loading. For use from one thread.

    Args:
        store: whose tiers are measured.
        block_size: tokens per block.
        block_bytes: raw bytes of a block, all parts; what is stored shorter is learned from leases.
        options: of the connector.
    """

    def __init__(self, store: TieredStore, block_size: int, block_bytes: int, options: ConnectorOptions) -> None:
        self.link = SpeedMeter()
        self._store = store
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._stored_bytes: dict[str, int] = {}
        self._options = options
        self._model = LoadOrRecompute(options.shape)
        self._prefill = PrefillMeter(options.shape)
        self._decisions: OrderedDict[str, Decision] = OrderedDict()

    def decide(self, request_id: str, tiers: Sequence[str], first: int) -> int:
        """How many of the blocks to load that lie in `tiers`, one name per block; `first`: blocks before them."""
        if not self._options.recompute_gate:
            return len(tiers)
        counted = [(tier, sum(1 for _ in group)) for tier, group in groupby(tiers)]
        runs = [
            Run(tier, blocks * self._stored_bytes.get(tier, self._block_bytes), blocks * self._block_size)
            for tier, blocks in counted
        ]
        decision = self._model.decide(
            runs,
            self._store.speeds(),
            self._prefill.tokens_per_second,
            start=first * self._block_size,
            link=self.link.snapshot(),
        )
        blocks = -(-decision.load_tokens // self._block_size)
        self._record(request_id, decision, len(tiers) * self._block_size)
        return blocks

    def copy_seconds(self, tiers: Sequence[str], blocks: int) -> float | None:
        """Expected time of the copy of `blocks` into the device; None where it is unknown, or not all are in host."""
        host = self._store.host.name
        if any(tier != host for tier in tiers):
            return None
        return self.link.snapshot().seconds(blocks * self._stored_bytes.get(host, self._block_bytes))

    def is_worth_keeping(self, tokens: int, blocks: int) -> bool:
        """Whether `blocks` of a request's first `tokens` are expected to come back from host sooner than computed."""
        if not self._options.recompute_gate:
            return True
        run = Run(self._store.host.name, blocks * self._block_bytes, tokens)
        rate, link = self._prefill.tokens_per_second, self.link.snapshot()
        decision = self._model.decide([run], self._store.speeds(), rate, link=link)
        # Never measured: it is tried, and measured with that.
        return decision.load_tokens >= tokens or decision.reason == "unmeasured"

    def _record(self, request_id: str, decision: Decision, found: int) -> None:
        self._decisions[request_id] = decision
        self._decisions.move_to_end(request_id)
        if len(self._decisions) > _REMEMBERED:
            self._decisions.popitem(last=False)
        choice = decision.choice(found)
        self._store.metrics.gate_decisions.labels(choice, decision.reason, decision.tier).inc()
        _log.debug(
            "request %s: %s, %d of %d tokens found: %s (%s); loading them takes %.4f s, computing all %s s",
            *(request_id, choice, decision.load_tokens, found, decision.reason, decision.tier),
            *(decision.load_seconds, decision.recompute_seconds),
        )

    def explain(self, request_id: str) -> Decision | None:
        """The latest decision for a request; None where there was nothing to decide, or it is long ago."""
        return self._decisions.get(request_id)

    def patience(self, request_id: str) -> float:
        """Seconds after which a look-up or a load for this request is given up."""
        decision = self._decisions.get(request_id)
        if decision is None or decision.recompute_seconds is None:
            return self._options.load_seconds
        wanted = max(self._options.least_seconds, _PATIENCE * decision.recompute_seconds)
        return min(self._options.load_seconds, wanted)

    def learn(self, tier: str, nbytes: int) -> None:
        """A block of this tier turned out to have so many bytes."""
        self._stored_bytes[tier] = nbytes

    def observe_prefill(self, tokens: int, seconds: float, attended: int) -> None:
        """See `SchedulerHook.observe_prefill`."""
        self._prefill.observe(tokens, seconds, attended)
        rate = self._prefill.tokens_per_second
        if rate is not None:
            self._store.metrics.prefill_rate.set(rate)
