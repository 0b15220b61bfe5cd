"""Seconds between the tokens of running decodes while long prompts arrive: one engine, and prefill apart from decode.

    python benchmarks/disaggregated.py [--quick] [--json PATH] [--threads 2] [--tokens 1000]

The default model. Four answers are being decoded; meanwhile one long prompt after the other arrives, the next when the
one before has its first token. `one`: a single engine, chunked prefill, all threads. `two`: `DisaggregatedLLM`, half of
the threads for each process, KV through a directory in /dev/shm. Each variant is a process of its own, rounds
alternate, every prompt is new to both. The prompts' first tokens are compared: a difference is a tie of two logits in
bf16, and is reported.

Prediction, written before the first run: on 2 cores, p99 of the gaps 3 to 6 x shorter (a chunk of 512 tokens costs a
single engine some 8 decode steps at once), the first token of a long prompt 0.5 to 0.8 x as soon, since half of the
cores compute it.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import Report, Result, arguments, require

from kvtier import AsyncLLM, SamplingParams
from kvtier.disaggregated import DisaggregatedLLM

TEXTS = sorted((Path(__file__).parents[1] / "tests/data/quality").glob("*.txt"))
DECODES = 4
ENGINE = {"num_blocks": 1024, "max_running": 8}
LONG = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=4096, temperature=0.0, ignore_eos=True)


def shared_memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # a directory in it, with a random name


async def decode(llm: Any, prompt: list[int], gaps: list[tuple[float, float]], started: asyncio.Semaphore) -> None:
    """Endlessly: (when, seconds since the token before) of each token."""
    latest, tokens = None, 0
    async for output in llm.generate(prompt, ENDLESS):
        now = time.perf_counter()
        if latest is None:
            started.release()
        else:
            fresh = len(output.token_ids) - tokens
            gaps += [(now, (now - latest) / fresh)] * fresh
        latest, tokens = now, len(output.token_ids)


async def workload(llm: Any, prompts: list[list[int]]) -> dict[str, Any]:
    gaps: list[tuple[float, float]] = []
    started = asyncio.Semaphore(0)
    decodes = [asyncio.create_task(decode(llm, prompt[:16], gaps, started)) for prompt in prompts[:DECODES]]
    for _ in decodes:
        await started.acquire()
    firsts, waits, loaded = [], [], 0
    began = time.perf_counter()
    for prompt in prompts[DECODES:]:
        asked = time.perf_counter()
        async for output in llm.generate(prompt, LONG):
            waits.append(time.perf_counter() - asked)
            firsts.append(output.token_ids[0])
            loaded += output.metrics.loaded_tokens
    ended = time.perf_counter()
    for task in decodes:
        task.cancel()
    await asyncio.gather(*decodes, return_exceptions=True)
    during = [gap for when, gap in gaps if began <= when <= ended]
    return {"gaps": during, "waits": waits, "firsts": firsts, "loaded": loaded, "seconds": ended - began}


def passages(tokenizer: Any, count: int, tokens: int) -> list[list[int]]:
    every = [token for path in TEXTS for token in tokenizer.encode(path.read_text(encoding="utf-8"))]
    step = max(1, (len(every) - tokens) // count)
    return [every[at * step : at * step + tokens] for at in range(count)]


def measure(variant: str, prompts: int, tokens: int, threads: int) -> dict[str, Any]:
    """One round of one variant, in this process, whose environment says how many threads it has."""
    count = DECODES + 1 + prompts  # the first one warms up
    if variant == "one":
        llm = AsyncLLM(tiering={"host": None}, **ENGINE)
        found = run(llm, passages(llm.model.tokenizer, count, tokens))
        llm.close()
        return found
    with tempfile.TemporaryDirectory(dir=shared_memory()) as directory:
        config = {"tiering": {"host": {"capacity": "1GiB"}, "nvme": {"min_free": 0}}}
        with DisaggregatedLLM(
            directory=Path(directory) / "kv",
            capacity="2GiB",
            prefill=ENGINE,
            decode=ENGINE,
            config=config,
            prefill_threads=max(1, threads // 2),
        ) as both:
            found = run(both.llm, passages(both.model.tokenizer, count, tokens))
        require(found["loaded"] > 0, "no KV was handed over")
        return found


def run(llm: AsyncLLM, prompts: list[list[int]]) -> dict[str, Any]:
    async def both() -> dict[str, Any]:
        async for _ in llm.generate(prompts[-1], LONG):
            pass
        return await workload(llm, prompts[:-1])

    return asyncio.run(both())


def in_process(variant: str, options: argparse.Namespace, prompts: int) -> dict[str, Any]:
    threads = options.threads if variant == "one" else max(1, options.threads // 2)
    command = [sys.executable, __file__, "--variant", variant, "--prompts", str(prompts)]
    command += ["--tokens", str(options.tokens), "--threads", str(options.threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def compare(options: argparse.Namespace, report: Report) -> None:
    rounds, prompts = (1, 3) if options.quick else (3, 8)
    found: dict[str, list[dict[str, Any]]] = {"one": [], "two": []}
    for number in range(rounds):
        for variant in ("one", "two") if number % 2 else ("two", "one"):
            found[variant].append(in_process(variant, options, prompts))
    differing = sum(
        a != b
        for one, two in zip(found["one"], found["two"], strict=True)
        for a, b in zip(one["firsts"], two["firsts"], strict=True)
    )
    params = {
        "rounds": rounds,
        "decodes": DECODES,
        "prompts": prompts,
        "prompt_tokens": options.tokens,
        "threads": options.threads,
        "differing": differing,
    }
    peer = "one engine, chunked prefill"
    for name, key, share in (("tpot.p50", "gaps", 50), ("tpot.p99", "gaps", 99), ("ttft.p50", "waits", 50)):
        ours, theirs = ([float(np.percentile(one[key], share)) for one in found[variant]] for variant in ("two", "one"))
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        values = 1e3 * statistics.median(ours), 1e3 * statistics.median(theirs)
        report.add(Result(f"disaggregated.{name}", values[0], "ms", params, peer, values[1], ratio))
    rates = {variant: [len(one["gaps"]) / one["seconds"] for one in found[variant]] for variant in found}
    ratio = statistics.median(a / b for a, b in zip(rates["two"], rates["one"], strict=True))
    ours, theirs = (statistics.median(rates[variant]) for variant in ("two", "one"))
    report.add(Result("disaggregated.decode", ours, "tokens/s", params, peer, theirs, ratio))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--threads", type=int, default=2, help="of the machine, shared by both processes")
    parser.add_argument("--tokens", type=int, default=1000, help="length of the long prompts")
    parser.add_argument("--prompts", type=int, default=3, help=argparse.SUPPRESS)
    parser.add_argument("--variant", choices=("one", "two"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant is not None:
        print(json.dumps(measure(options.variant, options.prompts, options.tokens, options.threads)))
        return
    report = Report(options.json)
    compare(options, report)
    report.write()


if __name__ == "__main__":
    main()
