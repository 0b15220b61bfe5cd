"""Replays a trace through a TieredStore, one request after the other, with a simulated device in front.

For each request, as an engine's connector would: blocks that the device has are used there; the rest of the chain is
leased and fetched from the store; what nobody had is computed and put; then the lease ends.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvtier.errors import CorruptObject
from kvtier.hints import Hint
from kvtier.metrics import Metrics
from kvtier.replay.device import DeviceIndex
from kvtier.replay.foresight import HintSource, hint_source
from kvtier.replay.plan import ReplayPlan, Stage, open_stage
from kvtier.replay.records import Records
from kvtier.replay.report import Outcome, Sample, TierOutcome, prefill_flops
from kvtier.replay.trace import Trace, TraceRequest
from kvtier.store import Lease
from kvtier.tiers import BlockRef, Tier

__all__ = ["replay"]

_OWNER = "replay"
_SAMPLES = 400
# Bytes made at a time where records have their full length.
_PUT_BYTES = 64 << 20


def replay(trace: Trace, plan: ReplayPlan, *, progress: Callable[[], None] | None = None) -> Outcome:
    """Replay a trace.

    Args:
        trace: from `kvtier.replay.read_trace`.
        plan: tiers, policy and hints.
        progress: called after each request.

    Raises:
        ConfigError, CapacityError: the plan cannot be carried out.
        CorruptObject: the store handed out bytes that are not the block's.
    """
    hints = hint_source(plan.hints, trace, plan.seed)
    with open_stage(plan) as stage:
        run = _Run(trace, plan, stage, hints)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        for number, request in enumerate(trace.requests):
            run.serve(number, request)
            if progress is not None:
                progress()
        stage.store.flush()
        return run.outcome(time.perf_counter() - begin, time.process_time() - begin_cpu)


class _Run:
    """One replay under way."""

    def __init__(self, trace: Trace, plan: ReplayPlan, stage: Stage, hints: HintSource | None) -> None:
        self._trace = trace
        self._plan = plan
        self._stage = stage
        self._hints = hints
        self._device = DeviceIndex(plan.device_blocks)
        self._records = Records(plan.block_bytes if plan.full_bytes else None)
        self._hit_tokens: Counter[str] = Counter()
        self._read_blocks: Counter[str] = Counter()
        self._tokens = 0
        self._flops = self._saved_flops = 0.0
        self._samples: list[Sample] = []
        self._sample_every = max(1, len(trace.requests) // _SAMPLES)
        # Where nobody sleeps, the time between two requests is long enough for whatever the store does on the side.
        self._settles = bool(plan.nvme_blocks) and plan.time_scale is None
        self._per_put = max(1, _PUT_BYTES // plan.record_bytes)

    # ---- one request

    def serve(self, number: int, request: TraceRequest) -> None:
        """Look up, load, compute and store one prompt."""
        self._stage.clock.advance(request.at)
        store = self._stage.store
        refs = self._records.refs(request.blocks)
        keys = [ref.key for ref in refs]
        hints = None if self._hints is None else self._hints.hints(number, request)
        on_device = self._device.leading(request.blocks)
        lease = store.acquire(keys[on_device:], _OWNER, depth=on_device).result()
        try:
            found = self._load(lease, refs[on_device:])
            reused = on_device + len(found)
            self._put(refs[reused:], None if hints is None else hints[reused:])
            if hints is not None and reused:
                store.hint(keys[:reused], hints[:reused])
        finally:
            store.release(lease)
        if self._settles:
            store.flush()
        self._account(request, ["device"] * on_device + found)
        self._move(request.blocks)
        if self._plan.hints == "trace" and request.ends_session and request.session is not None:
            store.end_session(request.session)
        if number % self._sample_every == 0:
            self._sample(request.at)

    def _load(self, lease: Lease, refs: Sequence[BlockRef]) -> list[str]:
        """Bring a lease's blocks into host; returns where each of those that arrived was."""
        tiers = list(lease.tiers())
        arrived = self._stage.store.fetch(lease, 0, len(tiers)).result() if tiers else 0
        if self._plan.full_bytes:
            self._verify(lease, refs[:arrived])
        self._read_blocks["host"] += arrived
        return tiers[:arrived]

    def _verify(self, lease: Lease, refs: Sequence[BlockRef]) -> None:
        for ref, (_, handle) in zip(refs, lease.blocks, strict=False):
            if self._stage.host.buffer(handle)[: handle.nbytes] != self._records.data(ref):
                raise CorruptObject(f"block {ref.key.hex()}: the store handed out other bytes than were put")

    def _put(self, refs: Sequence[BlockRef], hints: Sequence[Hint] | None) -> None:
        for at in range(0, len(refs), self._per_put):
            part = slice(at, at + self._per_put)
            items = [(ref, self._records.data(ref)) for ref in refs[part]]
            self._stage.store.put(items, None if hints is None else hints[part]).result()

    def _move(self, blocks: Sequence[int]) -> None:
        """The device took the prompt's blocks in, and others left it."""
        entered, left = self._device.use(blocks)
        if self._plan.copies == "inclusive":
            return
        for moved, above in ((left, False), (entered, True)):
            if moved:
                self._stage.store.duplicate([ref.key for ref in self._records.known(moved)], above=above)
        self._put(self._records.known(left), None)

    # ---- accounts

    def _account(self, request: TraceRequest, found: Sequence[str]) -> None:
        size, at = self._trace.block_tokens, 0
        for depth, tier in enumerate(found, 1):
            end = min(depth * size, request.tokens)
            self._hit_tokens[tier] += end - at
            at = end
        self._tokens += request.tokens
        self._flops += prefill_flops(request.tokens)
        self._saved_flops += prefill_flops(at)

    def _sample(self, at: float) -> None:
        occupied = {tier.name: _share(tier.stats()) for tier in self._stage.store.tiers}
        if self._plan.device_blocks:
            occupied["device"] = len(self._device) / self._plan.device_blocks
        self._samples.append(Sample(at, occupied, self._hit_tokens.total() / self._tokens))

    def outcome(self, seconds: float, cpu_seconds: float) -> Outcome:
        """What was found out."""
        plan = self._plan
        return Outcome(
            policy=plan.policy,
            capacity_blocks=plan.capacity_blocks,
            hit_tokens=self._hit_tokens.total() / self._tokens,
            saved_compute=self._saved_flops / self._flops,
            tiers=dict(self._tier_outcomes()),
            hints=plan.hints,
            requests=len(self._trace.requests),
            touches=self._trace.touches,
            block_bytes=plan.block_bytes,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            samples=tuple(self._samples),
        )

    def _tier_outcomes(self) -> Iterator[tuple[str, TierOutcome]]:
        plan = self._plan
        if plan.device_blocks:
            yield "device", self._device_outcome()
        capacities = {"host": plan.capacity_blocks, "nvme": plan.nvme_blocks}
        for tier in self._stage.store.tiers:
            yield tier.name, self._tier_outcome(tier, capacities[tier.name])

    def _device_outcome(self) -> TierOutcome:
        hit = self._hit_tokens["device"] / self._tokens
        return TierOutcome(self._plan.device_blocks, len(self._device), hit, 0, 0, {}, {})

    def _tier_outcome(self, tier: Tier, capacity: int) -> TierOutcome:
        metrics, medium = self._stage.metrics, self._stage.medium
        read = self._read_blocks[tier.name] + self._blocks_of(metrics.value("read_bytes_total", tier=tier.name))
        return TierOutcome(
            capacity_blocks=capacity,
            blocks=tier.stats()["blocks"],
            hit_tokens=self._hit_tokens[tier.name] / self._tokens,
            read_bytes=read * self._plan.block_bytes,
            written_bytes=self._blocks_of(metrics.value("written_bytes_total", tier=tier.name))
            * self._plan.block_bytes,
            evicted=_by_reason(metrics, "evicted_blocks", tier.name),
            dropped=_by_reason(metrics, "dropped_blocks", tier.name),
            busy_seconds=medium.busy_seconds if medium is not None and tier.name == "nvme" else None,
        )

    def _blocks_of(self, nbytes: float) -> int:
        return round(nbytes) // self._plan.record_bytes


def _share(stats: Mapping[str, int]) -> float:
    return stats["bytes"] / stats["capacity_bytes"]


def _by_reason(metrics: Metrics, name: str, tier: str) -> dict[str, int]:
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    return {
        sample.labels["reason"]: int(sample.value)
        for sample in samples
        if sample.name == f"kvtier_{name}_total" and sample.labels["tier"] == tier and sample.value
    }
