"""The bundled engine against transformers, and paged against contiguous KV memory, in one process and one run.

    python benchmarks/engine.py [--quick] [--running 16,32] [--json PATH]

Workload: chat-like request lengths (benchmarks/data/sharegpt_lengths.json) scaled by a half, random prompt tokens,
greedy, end-of-sequence ignored, bf16, 2 threads. All requests come at once, twice as many as run at a time at most
(`--running`, one set of rows for each), so that all places are taken for half of the run. Where several numbers are
given, all of them, and transformers, serve the requests of the largest. `--quick`: lengths scaled by a quarter, outputs
clipped to 64 tokens, one and a half times as many requests as run.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Report, Result, arguments
from transformers import AutoModelForCausalLM

from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.models import load_model
from kvtier.engine.models.catalog import cache_dir, fetch_default_model

TOKENS_PER_RUNNING = 1024  # of the device pool


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    output: int


def workload(vocabulary: int, running: int, *, quick: bool) -> list[Job]:
    lengths = json.loads((Path(__file__).parent / "data/sharegpt_lengths.json").read_text())["requests"]
    scale, count, clip = (4, 3 * running // 2, 64) if quick else (2, 2 * running, 512)
    random = np.random.default_rng(0)
    return [
        Job(random.integers(100, vocabulary, max(1, prompt // scale)).tolist(), max(1, min(output // scale, clip)))
        for prompt, output in lengths[:count]
    ]


@dataclass(frozen=True)
class Run:
    seconds: float
    outputs: list[RequestOutput]
    stats: Any


def run_engine(model: Any, jobs: Sequence[Job], block_size: int, running: int) -> Run:
    """All requests at once through our engine; blocks of the longest sequence's length are contiguous reservation."""
    blocks = max(running, running * TOKENS_PER_RUNNING // block_size)
    options = EngineOptions(block_size=block_size, num_blocks=blocks, max_running=running)
    engine = Engine(model, options)
    began = time.perf_counter()
    for number, job in enumerate(jobs):
        engine.add(str(number), job.prompt, SamplingParams(max_tokens=job.output, ignore_eos=True))
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason is not None:
                outputs[output.id] = output
    seconds = time.perf_counter() - began
    return Run(seconds, [outputs[str(number)] for number in range(len(jobs))], engine.stats())


def run_transformers(model: Any, jobs: Sequence[Job], batch: int) -> float:
    """Seconds for generate() over static batches, left-padded, each until its longest output is complete."""
    began = time.perf_counter()
    for at in range(0, len(jobs), batch):
        group = jobs[at : at + batch]
        width = max(len(job.prompt) for job in group)
        ids = torch.zeros(len(group), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(group):
            ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        longest = max(job.output for job in group)
        model.generate(
            ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=0
        )
    return time.perf_counter() - began


def percentiles(report: Report, name: str, seconds: Sequence[float], params: dict[str, Any]) -> None:
    for rank in (50, 90, 99):
        report.add(Result(f"{name}.p{rank}", 1e3 * float(np.percentile(seconds, rank)), "ms", params))


def numbers(text: str) -> list[int]:
    """Of a command line: `16,32`."""
    found = [int(number) for number in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers above 0")
    return found


@dataclass(frozen=True)
class Rivals:
    """Seconds of transformers for all jobs: one by one, in static batches of 8."""

    one_by_one: float
    by_eight: float


def measure(report: Report, loaded: Any, jobs: Sequence[Job], running: int, rivals: Rivals) -> None:
    """All rows for one number of running requests."""
    tokens = sum(job.output for job in jobs)
    params = {"requests": len(jobs), "output_tokens": tokens, "dtype": "bfloat16", "threads": 2, "running": running}
    ours = run_engine(loaded, jobs, 16, running)
    contiguous = run_engine(loaded, jobs, max(len(job.prompt) + job.output for job in jobs), running)
    rate = len(jobs) / ours.seconds
    for peer, seconds, name in (
        ("transformers.generate one by one", rivals.one_by_one, "engine.requests"),
        ("transformers.generate static batches of 8", rivals.by_eight, "engine.requests.static8"),
        ("the same engine, contiguous reservation", contiguous.seconds, "engine.requests.contiguous"),
    ):
        peer_rate = len(jobs) / seconds
        report.add(Result(name, rate, "requests/s", params, peer, peer_rate, rate / peer_rate))
    report.add(
        Result(
            "engine.output", tokens / ours.seconds, "tok/s", params, "transformers.generate one by one",
            tokens / rivals.one_by_one, rivals.one_by_one / ours.seconds,
        )
    )  # fmt: skip
    percentiles(report, "engine.ttft", [output.metrics.ttft for output in ours.outputs], params)
    percentiles(report, "engine.tpot", [output.metrics.tpot for output in ours.outputs], params)
    waste, rival = 100 * ours.stats.kv_waste, 100 * contiguous.stats.kv_waste_total
    report.add(Result("engine.kv_waste", waste, "%", params, "contiguous reservation, all waste", rival))
    report.add(
        Result("engine.kv_waste.total", 100 * ours.stats.kv_waste_total, "%", params, "contiguous reservation", rival)
    )


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--running", type=numbers, default=[16, 32], help="requests at a time, one or several")
    args = parser.parse_args()
    torch.set_num_threads(2)
    source = fetch_default_model(cache_dir(), lambda *_: None)
    loaded = load_model(source, torch.bfloat16)
    jobs = workload(loaded.config.vocab, max(args.running), quick=args.quick)
    report = Report(args.json)

    run_engine(loaded, jobs[:2], 16, 2)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    run_transformers(reference, jobs[:1], 1)
    rivals = Rivals(run_transformers(reference, jobs, 1), run_transformers(reference, jobs, 8))
    for running in args.running:
        measure(report, loaded, jobs, running, rivals)
    report.write()


if __name__ == "__main__":
    main()
