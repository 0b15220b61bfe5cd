"""Requests that lose their device blocks: kept in host memory against computed again, and classes under full load.

    python benchmarks/preemption.py [--quick] [--json PATH]

The default model in bf16, 2 threads, a host tier, all in one process. Goodput: output tokens per second until all
requests are through; rounds interleaved. The live requests need twice the device's blocks:

`swap`: low-class requests fill the device, and again and again a wave of high-class ones that fills it once more.
Every wave takes the blocks of all low ones. `unlimited`: a device with room for all, and at most as many running as had
blocks on average in the swapping run, rounded up: its own average (`peer_active`) is no less than that (`active`).
`fcfs`: one class, all at once. Who came last gives way as the others grow: seldom, and once.

`gain_bound` is what recompute would take longer, by count: the tokens that it prefills again, at the speed at which
the same engine prefills, beside the time that swapping took. A ratio above it would be another effect than preemption.
Priority: low-class requests hold all blocks and places; high-class ones come in between. Their excess is TTFT less the
median TTFT of the same prompt on idle engines that have not seen it, 99th percentile, in steps of nothing but decodes.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from harness import Cost, Report, Result, arguments, interleaved, require
from kvtier_engine import connect

from kvtier.cpu import HostTier
from kvtier.engine import Engine, EngineOptions, EngineStats, SamplingParams
from kvtier.engine.models import LoadedModel, load_model
from kvtier.engine.models.catalog import cache_dir, fetch_default_model
from kvtier.engine.orders import OrderName
from kvtier.engine.rules import Preemption, SchedulingRules
from kvtier.store import TieredStore

BLOCK = 16
HOST_BYTES = 1 << 30
IDLE_ENGINES = 3


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

    @property
    def text(self) -> str:
        """Its size, for a table."""
        return f"{self.requests} x ({self.prompt} + {self.output})"

    def prompts(self, vocabulary: int, seed: int = 0) -> list[list[int]]:
        """Random, so that nothing is shared."""
        return np.random.default_rng(seed).integers(100, vocabulary, (self.requests, self.prompt)).tolist()


@dataclass(frozen=True)
class Scenario:
    """Who comes when.

    base: there from the start. wave: of a better class; comes `waves` times, each time after `every` steps in which
    nobody but `base` brought a token.
    """

    base: Load
    wave: Load = Load(0, 1, 1)
    waves: int = 0
    every: int = 1

    @property
    def blocks(self) -> int:
        """Half of what they need at a time."""
        return (self.base.blocks + self.wave.blocks) // 2

    @property
    def order(self) -> OrderName:
        """What lets a wave go first."""
        return "priority" if self.waves else "fcfs"

    @property
    def tokens(self) -> int:
        """All output."""
        return self.base.requests * self.base.output + self.waves * self.wave.requests * self.wave.output


@dataclass
class Run:
    """One way to serve a scenario, and what its runs were like."""

    blocks: int
    running: int
    preemption: Preemption = "swap"
    tiered: bool = True
    stats: list[EngineStats] = field(default_factory=list)
    active: list[float] = field(default_factory=list)

    @property
    def last(self) -> EngineStats:
        """The counters of the latest run."""
        return self.stats[-1]


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


def serve(model: LoadedModel, scenario: Scenario, run: Run) -> Cost:
    """Seconds until all requests are through."""
    # No head-room that depends on the device's size: who fits is let in.
    rules = SchedulingRules(
        order=scenario.order, victims="class", preemption=run.preemption, ageing=3600.0, watermark=0.0
    )
    base, wave, vocabulary = scenario.base, scenario.wave, model.config.vocab
    low, high = (
        SamplingParams(max_tokens=load.output, ignore_eos=True, priority=at) for at, load in ((1, base), (0, wave))
    )
    with engine_of(model, run.blocks, run.running, rules, tiered=run.tiered) as engine:
        cpu, began, active, steps, done, calm = time.process_time(), time.perf_counter(), 0, 0, 0, 0
        coming, guests = iter(range(scenario.waves)), set[str]()
        for number, prompt in enumerate(base.prompts(vocabulary)):
            engine.add(f"base-{number}", prompt, low)
        turn = next(coming, None)
        while engine.has_work or turn is not None:
            if turn is not None and (calm >= scenario.every or not engine.has_work):
                calm = 0
                for number, prompt in enumerate(wave.prompts(vocabulary, seed=1 + turn)):
                    guests.add(f"wave-{turn}-{number}")
                    engine.add(f"wave-{turn}-{number}", prompt, high)
                turn = next(coming, None)
            outputs = engine.step()
            ended = {output.id for output in outputs if output.finish_reason == "length"}
            done, guests = done + len(ended), guests - ended
            calm += bool(outputs) and not guests
            active, steps = active + engine.stats().running, steps + 1
        cost = Cost(time.perf_counter() - began, time.process_time() - cpu)
        wanted = base.requests + scenario.waves * wave.requests
        require(done == wanted, f"{done} of {wanted} requests were finished")
        run.stats.append(engine.stats())
        run.active.append(active / steps)
    return cost


def prefill_rate(model: LoadedModel, load: Load) -> float:
    """Prompt tokens per second of an idle engine."""
    with engine_of(model, 2 * load.blocks, load.requests, SchedulingRules(), tiered=False) as engine:
        began = time.perf_counter()
        for number, prompt in enumerate(load.prompts(model.config.vocab)):
            engine.add(str(number), prompt, SamplingParams(max_tokens=1))
        while engine.has_work:
            engine.step()
        return load.requests * load.prompt / (time.perf_counter() - began)


def goodput(
    report: Report, model: LoadedModel, name: str, scenario: Scenario, rounds: int, peers: Sequence[str]
) -> None:
    """Swap against recompute on the same device, and against a device with room for all."""
    pool, running = scenario.blocks, scenario.base.requests + scenario.wave.requests
    runs = {
        "swap": Run(pool, running),
        "recompute": Run(pool, running, "recompute"),
        "recompute.untiered": Run(pool, running, "recompute", tiered=False),
    }
    if "unlimited" in peers:
        probe = Run(pool, running)
        serve(model, scenario, probe)
        runs["unlimited"] = Run(4 * pool, math.ceil(probe.active[0]))
    rate = prefill_rate(model, scenario.base)
    chosen = {peer: runs[peer] for peer in ("swap", *peers)}
    measured = interleaved({peer: lambda run=run: serve(model, scenario, run) for peer, run in chosen.items()}, rounds)
    swap, seconds = runs["swap"], measured.median("swap").seconds
    require(swap.last.swaps > 0, "nothing was swapped: the device is too large for this load")
    for peer in peers:
        theirs = runs[peer]
        again = theirs.last.computed_tokens - swap.last.computed_tokens
        params = {
            "base": scenario.base.text, "wave": scenario.wave.text if scenario.waves else None,
            "waves": scenario.waves, "blocks": pool, "working_set": scenario.base.blocks + scenario.wave.blocks,
            "swaps": swap.last.swaps, "loaded": swap.last.loaded_tokens, "computed": swap.last.computed_tokens,
            "steps": swap.last.steps, "active": round(swap.active[-1], 2),
            "peer_preemptions": theirs.last.preemptions, "peer_computed": theirs.last.computed_tokens,
            "peer_steps": theirs.last.steps, "peer_running": theirs.running, "peer_active": round(theirs.active[-1], 2),
            "rounds": rounds,
            "gain_bound": round(1 + again / rate / seconds, 2),
            "cpu_ratio": round(measured.cpu_ratio("swap", peer), 3),
        }  # fmt: skip
        ours, rival = scenario.tokens / seconds, scenario.tokens / measured.median(peer).seconds
        title = name if peer == "recompute" else f"{name}.{peer.rpartition('.')[2]}"
        report.add(Result(title, ours, "tok/s", params, peer, rival, measured.ratio("swap", peer)))


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
    idle = []
    for _ in range(IDLE_ENGINES):
        with engine_of(model, blocks, running, rules) as engine:
            watch = Watch(engine)
            # The first request of an engine's life takes longer than any later one.
            watch.ttft("warm", random.integers(100, vocabulary, prompt_tokens).tolist(), high)
            idle.append([watch.ttft(f"alone-{at}", prompt, high) for at, prompt in enumerate(prompts)])
    alone = np.median(idle, axis=0)
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
            excess.append(watch.ttft(f"high-{at}", prompt, high) - float(alone[at]))
        preemptions = engine.stats().preemptions
    decode = float(np.median(watch.decodes))
    # A chunk: what one step of the token budget takes; on the idle engine the prompt is exactly one.
    allowed = 2 + float(np.median(alone)) / decode
    p99 = float(np.percentile(excess, 99)) / decode
    params = {
        "arrivals": arrivals, "prompt": prompt_tokens, "low_running": running, "blocks": blocks,
        "preemptions": preemptions, "decode_ms": round(1e3 * decode, 2), "idle_engines": IDLE_ENGINES,
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
    if args.quick:
        waves, alone, rounds = Scenario(Load(3, 768, 96), Load(3, 768, 24), 3, 10), Load(8, 64, 160), 2
    else:
        waves, alone, rounds = Scenario(Load(4, 1024, 96), Load(4, 1024, 24), 3, 10), Load(8, 128, 192), 2
    goodput(report, model, "engine.preemption.swap", waves, rounds, ("recompute", "unlimited"))
    peers = ("recompute",) if args.quick else ("recompute", "recompute.untiered")
    goodput(report, model, "engine.preemption.fcfs", Scenario(alone), rounds, peers)
    # Outputs are long beside prompts: all places are taken before the blocks are, and then somebody has to give way.
    low = Load(8, 64, 160) if args.quick else Load(16, 64, 384)
    priority(report, model, low, 12 if args.quick else 30, 256)
    report.write()


if __name__ == "__main__":
    main()
