"""`engine.vllm.*`: the bundled engine beside vLLM 0.32.0's CPU backend, same weights, same prompts, turn by turn.

    python benchmarks/engine_vllm.py [--quick] [--threads 2] [--json PATH]

Prompts of 256 random tokens, 64 output tokens, greedy, end-of-sequence ignored, bf16, prefix caching off in vLLM (here
every prompt is new), text decoded by both. vLLM runs in a process and an environment of its own
(benchmarks/requirements-vllm.txt), which sleeps while kvtier runs.

    engine.vllm.decode    tokens per second while all requests decode: from the last first token to the first end
    engine.vllm.total     tokens per second from the first request to the last token, prefill included

`--quick`: 1 and 16 requests, one round, eager mode only.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from harness import Report, Result, arguments

from kvtier.engine import Engine, EngineOptions, SamplingParams
from kvtier.engine.models import load_model
from kvtier.engine.models.catalog import cache_dir, fetch_default_model

PYTHON = Path(__file__).parents[1] / "build/vllm-venv/bin/python"
MISSING = "vLLM 0.32.0 (not installed: see benchmarks/requirements-vllm.txt)"
PROMPT, OUTPUT = 256, 64
CONCURRENT = (1, 8, 16)
MODES = ("eager", "compiled")
ROUNDS = 3


@dataclass(frozen=True)
class Phases:
    """One batch of requests: wall and CPU seconds of all of it, and of the part in which every request decodes."""

    seconds: float
    cpu_seconds: float
    tokens: int
    decode_seconds: float
    decode_tokens: int

    @property
    def total(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds

    @property
    def decode(self) -> float:
        """Output tokens per second of decoding."""
        return self.decode_tokens / self.decode_seconds


Prompts = Sequence[list[int]]
Contender = Callable[[Prompts, int], Phases]


class Vllm:
    """vLLM's process. A context manager; `run` is a `Contender`."""

    def __init__(self, model: Path, mode: str, threads: int, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / f"vllm-{mode}.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [str(PYTHON), str(Path(__file__).with_name("vllm_peer.py")), str(model), mode],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
        self.ready = self._answer() == "ready"

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def run(self, prompts: Prompts, output: int) -> Phases:
        assert self._process.stdin is not None
        print(json.dumps([prompts, output]), file=self._process.stdin, flush=True)
        answer = self._answer()
        if answer is None:
            raise RuntimeError(f"vLLM ended: see {self.log}")
        return Phases(**answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


def kvtier(model: Any) -> Contender:
    """A fresh engine for every batch: its pool begins empty."""

    def run(prompts: Prompts, output: int) -> Phases:
        engine = Engine(model, EngineOptions(num_blocks=2048, max_running=max(CONCURRENT)))
        cpu, began = time.process_time(), time.perf_counter()
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        for at, prompt in enumerate(prompts):
            engine.add(str(at), prompt, params)
        counts: dict[str, int] = {}
        marks = []
        while engine.has_work:
            for each in engine.step():
                counts[each.id] = len(each.token_ids)
            if len(counts) == len(prompts) and max(counts.values()) < output:
                marks.append((time.perf_counter(), sum(counts.values())))
        return Phases(
            time.perf_counter() - began,
            time.process_time() - cpu,
            sum(counts.values()),
            marks[-1][0] - marks[0][0],
            marks[-1][1] - marks[0][1],
        )

    return run


def measure(contenders: dict[str, Contender], count: int, vocabulary: int, rounds: int) -> dict[str, list[Phases]]:
    """Every contender in every round, in alternating order, after a round that is thrown away."""
    random = np.random.default_rng(count)
    results: dict[str, list[Phases]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        prompts = [random.integers(100, vocabulary, PROMPT).tolist() for _ in range(count)]
        for name in contenders if number % 2 else reversed(contenders):
            phases = contenders[name](prompts, OUTPUT)
            if number:
                results[name].append(phases)
    return results


def report_pair(report: Report, params: dict[str, Any], ours: list[Phases], peer: str, theirs: list[Phases]) -> None:
    for name in ("decode", "total"):
        mine, other = (list(map(attrgetter(name), phases)) for phases in (ours, theirs))
        ratio = median(a / b for a, b in zip(mine, other, strict=True))
        report.add(Result(f"engine.vllm.{name}", median(mine), "tok/s", params, peer, median(other), ratio))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--threads", type=int, default=2, help="of both engines")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report = Report(args.json)
    source = fetch_default_model(cache_dir(), lambda *_: None)
    model = load_model(source, torch.bfloat16)
    concurrent, rounds = (CONCURRENT[::2], 1) if args.quick else (CONCURRENT, ROUNDS)
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {"kvtier": kvtier(model)}
        absent = [] if PYTHON.exists() else [MISSING]
        for mode in () if absent else MODES[:1] if args.quick else MODES:
            peer = stack.enter_context(Vllm(source, mode, args.threads, report.directory))
            if peer.ready:
                contenders[f"vLLM 0.32.0 {mode}"] = peer.run
            else:
                absent.append(f"vLLM 0.32.0 {mode} (did not start: see {peer.log})")
        for count in concurrent:
            results = measure(contenders, count, model.config.vocab, rounds)
            ours = results.pop("kvtier")
            params = {"requests": count, "prompt": PROMPT, "output": OUTPUT, "threads": args.threads, "rounds": rounds}
            for peer, theirs in results.items():
                cpu = median(b.cpu_seconds / a.cpu_seconds for a, b in zip(ours, theirs, strict=True))
                report_pair(report, {**params, "cpu_ratio": round(cpu, 3)}, ours, peer, theirs)
            for peer in absent:
                report.add(Result("engine.vllm.decode", median(x.decode for x in ours), "tok/s", params, peer))
                report.add(Result("engine.vllm.total", median(x.total for x in ours), "tok/s", params, peer))
    report.write()


if __name__ == "__main__":
    main()
