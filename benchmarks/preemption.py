"""Requests that lose their device blocks: kept in host memory against computed again, and classes under full load.

    python benchmarks/preemption.py [--quick] [--json PATH]

The default model in bf16, 2 threads, a host tier, all in one process. Goodput: output tokens per second until all
requests are through; rounds interleaved. The requests need twice the device's blocks. `equal running batch`: a device
with room for all of them, and as many running as had blocks on average in the swapping run.
Priority: low-class requests hold all blocks and places; high-class ones come in between. Their excess is TTFT less the
median TTFT of the same prompt on the idle engine, 99th percentile, in steps of nothing but decodes.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from harness import Cost, Report, Result, arguments, interleaved, require
from kvtier_engine import connect

from kvtier.cpu import HostTier
from kvtier.engine import Engine, EngineOptions, SamplingParams
from kvtier.engine.models import LoadedModel, load_model
from kvtier.engine.models.catalog import cache_dir, fetch_default_model
from kvtier.engine.rules import Preemption, SchedulingRules
from kvtier.store import TieredStore

BLOCK = 16
HOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Load:
    """Requests of one size.

    requests: how many. prompt, output: tokens of each.
    """

    requests: int
    prompt: int
    output: int

    @property
    def blocks(self) -> int:
        """What they need together."""
        return self.requests * -(-(self.prompt + self.output) // BLOCK)

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Random, so that nothing is shared."""
        return np.random.default_rng(0).integers(100, vocabulary, (self.requests, self.prompt)).tolist()


@dataclass
class Run:
    """One way to serve the load, and what its runs were like."""

    blocks: int
    running: int
    preemption: Preemption = "swap"
    tiered: bool = True
    preemptions: list[int] = field(default_factory=list)
    swaps: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    active: list[float] = field(default_factory=list)


@contextlib.contextmanager
def engine_of(
    model: LoadedModel, blocks: int, running: int, rules: SchedulingRules, *, tiered: bool = True
) -> Iterator[Engine]:
    """An engine with a host tier of its own, or without any."""
    options = EngineOptions(block_size=BLOCK, num_blocks=blocks, max_running=running, scheduling=rules)
    if not tiered:
        yield Engine(model, options)
        return
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(TieredStore(HostTier(HOST_BYTES))))
        connection = connect(store, model, model.model.layout(BLOCK), options.token_budget)
        stack.enter_context(contextlib.closing(connection))
        yield Engine(model, options, (connection.scheduler, connection.worker))


def serve(model: LoadedModel, load: Load, run: Run) -> Cost:
    """Seconds until all requests are through."""
    rules = SchedulingRules(preemption=run.preemption)
    with engine_of(model, run.blocks, run.running, rules, tiered=run.tiered) as engine:
        params = SamplingParams(max_tokens=load.output, ignore_eos=True)
        cpu, began, active, steps, done = time.process_time(), time.perf_counter(), 0, 0, 0
        stats = engine.stats()
        for number, prompt in enumerate(load.prompts(model.config.vocab)):
            engine.add(str(number), prompt, params)
        while engine.has_work:
            done += sum(output.finish_reason == "length" for output in engine.step())
            stats = engine.stats()
            active, steps = active + stats.running, steps + 1
        cost = Cost(time.perf_counter() - began, time.process_time() - cpu)
        require(done == load.requests, f"{done} of {load.requests} requests were finished")
        run.preemptions.append(stats.preemptions)
        run.swaps.append(stats.swaps)
        run.computed.append(stats.computed_tokens)
        run.active.append(active / steps)
    return cost


def goodput(report: Report, model: LoadedModel, load: Load, rounds: int) -> None:
    """Swap against recompute on the same device, and against a device with room for all."""
    pool, running = load.blocks // 2, load.requests
    runs = {
        "swap": Run(pool, running),
        "recompute": Run(pool, running, "recompute"),
        "recompute.untiered": Run(pool, running, "recompute", tiered=False),
    }
    probe = Run(pool, running)
    serve(model, load, probe)
    equal = max(1, round(probe.active[0]))
    runs["unlimited"] = Run(2 * load.blocks, equal)
    measured = interleaved({name: lambda run=run: serve(model, load, run) for name, run in runs.items()}, rounds)
    tokens = load.requests * load.output
    swap = runs["swap"]
    require(min(swap.swaps) > 0, "nothing was swapped: the device is too large for this load")
    for name, peer in (
        ("engine.preemption.swap", "recompute"),
        ("engine.preemption.swap.untiered", "recompute.untiered"),
        ("engine.preemption.swap.unlimited", "unlimited"),
    ):
        theirs = runs[peer]
        params = {
            "requests": load.requests, "prompt": load.prompt, "output": load.output, "blocks": pool,
            "working_set": load.blocks, "swaps": swap.swaps[-1], "computed": swap.computed[-1],
            "peer_preemptions": theirs.preemptions[-1], "peer_computed": theirs.computed[-1],
            "peer_running": theirs.running, "active": round(swap.active[-1], 2), "rounds": rounds,
            "cpu_ratio": round(measured.cpu_ratio("swap", peer), 3),
        }  # fmt: skip
        rate, rival = tokens / measured.median("swap").seconds, tokens / measured.median(peer).seconds
        report.add(Result(name, rate, "tok/s", params, peer, rival, measured.ratio("swap", peer)))


@dataclass
class Watch:
    """Steps of an engine, told apart by what they did."""

    engine: Engine
    decodes: list[float] = field(default_factory=list)
    chunks: list[float] = field(default_factory=list)

    def step(self) -> Sequence[Any]:
        """One step; its time is noted if it did nothing but decode."""
        before, began = self.engine.stats(), time.perf_counter()
        outputs = self.engine.step()
        after, seconds = self.engine.stats(), time.perf_counter() - began
        computed = after.computed_tokens - before.computed_tokens
        if computed == len(outputs) and after.preemptions == before.preemptions:
            self.decodes.append(seconds)
        return outputs

    def ttft(self, name: str, prompt: list[int], params: SamplingParams) -> float:
        """Seconds to a request's first token, while all others go on."""
        self.engine.add(name, prompt, params)
        while True:
            for output in self.step():
                if output.id == name:
                    return float(output.metrics.ttft)


def priority(report: Report, model: LoadedModel, load: Load, arrivals: int, prompt_tokens: int) -> None:
    """High-class requests under a full load of low ones."""
    rules = SchedulingRules(order="priority", victims="class", preemption="swap", ageing=3600.0)
    random = np.random.default_rng(1)
    vocabulary, high = model.config.vocab, SamplingParams(max_tokens=2, ignore_eos=True)
    prompts = [random.integers(100, vocabulary, prompt_tokens).tolist() for _ in range(arrivals)]
    running, blocks = max(2, load.requests // 2), load.blocks // 2
    with engine_of(model, blocks, running, rules) as engine:
        idle = Watch(engine)
        alone = [idle.ttft(f"alone-{at}", prompt, high) for at, prompt in enumerate(prompts)]
    with engine_of(model, blocks, running, rules) as engine:
        watch = Watch(engine)
        low = SamplingParams(max_tokens=load.output, ignore_eos=True, priority=1)
        queue = iter(range(10**6))
        for prompt in load.prompts(vocabulary):
            engine.add(f"low-{next(queue)}", prompt, low)
        excess = []
        for at, prompt in enumerate(prompts):
            for _ in range(12):
                watch.step()
            while engine.stats().waiting < 2:
                engine.add(f"low-{next(queue)}", random.integers(100, vocabulary, load.prompt).tolist(), low)
            excess.append(watch.ttft(f"high-{at}", prompt, high) - float(np.median(alone)))
        preemptions = engine.stats().preemptions
    decode = float(np.median(watch.decodes))
    # A chunk: what one step of the token budget takes; on the idle engine the prompt is exactly one.
    allowed = 2 + float(np.median(alone)) / decode
    p99 = float(np.percentile(excess, 99)) / decode
    params = {
        "arrivals": arrivals, "prompt": prompt_tokens, "low_running": running, "blocks": blocks,
        "preemptions": preemptions, "decode_ms": round(1e3 * decode, 2),
        "p50": round(float(np.median(excess)) / decode, 2),
    }  # fmt: skip
    ratio = allowed / p99 if p99 > 0 else None  # no later than on the idle engine
    report.add(
        Result("engine.priority.p99_excess", p99, "decode steps", params, "2 decode steps + 1 chunk", allowed, ratio)
    )


def main() -> None:
    """Measure."""
    args = arguments(__doc__ or "").parse_args()
    torch.set_num_threads(2)
    model = load_model(fetch_default_model(cache_dir(), lambda *_: None), torch.bfloat16)
    report = Report(args.json)
    # Outputs are long beside prompts: all places are taken before the blocks are, and then somebody has to give way.
    load = Load(8, 64, 160) if args.quick else Load(16, 64, 384)
    goodput(report, model, load, 2 if args.quick else 3)
    priority(report, model, load, 12 if args.quick else 40, 256)
    report.write()


if __name__ == "__main__":
    main()
