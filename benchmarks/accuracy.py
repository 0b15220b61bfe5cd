"""Is the engine's output transformers' output, whatever the engine does meanwhile? Same weights, float32, same run.

    python benchmarks/accuracy.py [--quick] [--json PATH] [--only MODE,MODE]

`accuracy.logits`: largest absolute difference over 512 tokens. `accuracy.<mode>`: prompts whose greedy continuation is
`transformers.generate`'s, token for token, of the 20 of tests/data/prompts.jsonl and 30 of 500 to 900 tokens; `ties`
of them differ first where the reference's top two logits are closer than 1e-3. 32 tokens each.
`--quick`: 6 short and 2 long prompts, 24 tokens. `--expected FILE` keeps what transformers said for the next run.

Modes: alone, batched, preempted (a pool for a fifth of them, half of a better class; recompute), swapped (the same,
through host), tiered (from the device, from host, from NVMe after a restart, raw and bitsplit), remote (from an object
store, a directory, after a restart with an empty host, raw and bitsplit), pipelined (steps planned while one runs,
cold and loaded from host), speculative, forked (n = 3), aborts, disaggregated (prompts computed in another process).
"""

import asyncio
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from harness import Report, Result, arguments, require
from transformers import AutoModelForCausalLM

from kvtier import LLM, AsyncLLM, SamplingParams
from kvtier.disaggregated import DisaggregatedLLM
from kvtier.engine import Engine, RequestOutput
from kvtier.engine.models.base import DenseAttention
from kvtier.engine.models.catalog import cache_dir, fetch_default_model

TIE = 1e-3
DATA = Path(__file__).parents[1] / "tests/data"
BLOCKS = 1024

Outputs = list[list[int]]


@dataclass(frozen=True)
class Task:
    source: Path
    prompts: list[list[int]]
    tokens: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.tokens, ignore_eos=True)

    def llm(self, tiering: dict[str, Any] | None = None, **engine: Any) -> LLM:
        settings = {"num_blocks": BLOCKS, "max_running": 16} | engine
        config = {"model": {"dtype": "float32"}}
        return LLM(self.source, tiering=tiering or {"host": None}, config=config, **settings)


def lines(outputs: Sequence[RequestOutput]) -> Outputs:
    return [list(output.token_ids) for output in outputs]


def drive(engine: Engine, prompts: list[list[int]], params: SamplingParams, name: str = "r") -> Outputs:
    for number, prompt in enumerate(prompts):
        engine.add(f"{name}{number}", prompt, params)
    return finish(engine, name, len(prompts))


def finish(engine: Engine, name: str, count: int, each: Callable[[], None] = lambda: None) -> Outputs:
    finished = {}
    while engine.has_work or engine.busy:
        finished |= {output.id: list(output.token_ids) for output in engine.step() if output.finish_reason}
        each()
    return [finished[f"{name}{number}"] for number in range(count)]


def alone(task: Task) -> list[Outputs]:
    with task.llm(max_running=1) as llm:
        return [drive(llm.engine, task.prompts, task.params)]


def batched(task: Task) -> list[Outputs]:
    with task.llm() as llm:
        return [drive(llm.engine, task.prompts, task.params)]


def preempted(task: Task, preemption: str = "recompute") -> list[Outputs]:
    """Every second request is of a better class and comes when the pool is full of the others."""
    longest = max(map(len, task.prompts)) + task.tokens
    rules = {"order": "priority", "victims": "class", "watermark": 0.0, "preemption": preemption}
    with task.llm({"host": {"capacity": "2GiB"}}, num_blocks=4 * -(-longest // 16), **rules) as llm:
        engine, better = llm.engine, replace(task.params, priority=-1)
        waiting = [number for number in range(len(task.prompts)) if number % 2]
        for number in range(0, len(task.prompts), 2):
            engine.add(f"r{number}", task.prompts[number], task.params)

        def one_more() -> None:
            if waiting:
                number = waiting.pop()
                engine.add(f"r{number}", task.prompts[number], better)

        outputs = finish(engine, "r", len(task.prompts), one_more)
        stats = engine.stats()
        print(f"  {preemption}: {stats.preemptions} preemptions, {stats.swaps} swaps", flush=True)
        return [outputs]


def swapped(task: Task) -> list[Outputs]:
    return preempted(task, "swap")


def tiered(task: Task) -> list[Outputs]:
    found = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        for fmt in ("raw", "bitsplit"):
            nvme = {"path": f"{directory}/{fmt}", "capacity": "8GiB", "format": fmt}
            tiering = {"host": {"capacity": "4GiB"}, "nvme": nvme, "recompute_gate": False}
            with task.llm(tiering) as llm:
                found += [drive(llm.engine, task.prompts, task.params, name) for name in ("cold", "device")]
                llm.flush()
                llm.clear_device_cache()
                found.append(drive(llm.engine, task.prompts, task.params, "host"))
                llm.flush()
            with task.llm(tiering) as llm:
                found.append(drive(llm.engine, task.prompts, task.params, "restarted"))
                print(f"  {fmt}: loaded {llm.loaded_bytes()}", flush=True)
    return found


def remote(task: Task) -> list[Outputs]:
    found = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        for fmt in ("raw", "bitsplit"):
            place = Path(directory, fmt)
            place.mkdir()
            # Objects of one block, so that short prompts are found, too; time enough on a busy machine.
            store = {"url": f"file://{place}", "format": fmt, "options": "run=1", "timeout": 30.0, "absent_ttl": 0.0}
            tiering = {"host": {"capacity": "4GiB"}, "remote": store, "recompute_gate": False, "load_deadline": 60.0}
            with task.llm(tiering) as llm:
                found.append(drive(llm.engine, task.prompts, task.params, "cold"))
                llm.flush()
            with task.llm(tiering) as llm:
                found.append(drive(llm.engine, task.prompts, task.params, "restarted"))
                # Not what was loaded: a request that waits has its blocks brought to host first.
                nbytes = int(llm.store.metrics.value("read_bytes_total", tier="remote")) if llm.store else 0
            print(f"  {fmt}: {nbytes} bytes read", flush=True)
            require(nbytes > 0, f"nothing came from {place}")
    return found


def pipelined(task: Task) -> list[Outputs]:
    tiering = {"host": {"capacity": "4GiB"}, "recompute_gate": False}
    with task.llm(tiering, pipelined=True) as llm:
        outputs = [drive(llm.engine, task.prompts, task.params, "cold")]
        llm.flush()
        llm.clear_device_cache()
        outputs.append(drive(llm.engine, task.prompts, task.params, "host"))
        print(f"  loaded {llm.loaded_bytes()}", flush=True)
        return outputs


def speculative(task: Task) -> list[Outputs]:
    with task.llm(speculative="prompt_lookup") as llm:
        outputs = drive(llm.engine, task.prompts, task.params)
        stats = llm.engine.stats()
        print(f"  {stats.accepted_tokens} of {stats.draft_tokens} guesses accepted", flush=True)
        return [outputs]


def forked(task: Task) -> list[Outputs]:
    with task.llm() as llm:
        params = SamplingParams(max_tokens=task.tokens, ignore_eos=True, n=3)
        outputs = llm.generate(list(task.prompts), params)
        return [lines([output.sequences[index] for output in outputs]) for index in range(3)]


def aborts(task: Task) -> list[Outputs]:
    dice = random.Random(0)
    with task.llm({"host": {"capacity": "1GiB"}}, num_blocks=320) as llm:
        engine, doomed = llm.engine, []
        for number, prompt in enumerate(task.prompts):
            engine.add(f"r{number}", prompt, task.params)
            engine.add(f"doomed{number}", prompt[::-1], task.params)
            doomed.append(f"doomed{number}")

        def abort_one() -> None:
            if doomed and dice.random() < 0.3:
                engine.abort(doomed.pop(dice.randrange(len(doomed))))

        return [finish(engine, "r", len(task.prompts), abort_one)]


def disaggregated(task: Task) -> list[Outputs]:
    engine = {"num_blocks": BLOCKS, "max_running": 16}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        config = {"model": {"dtype": "float32"}, "tiering": {"host": {"capacity": "2GiB"}}}
        settings = {"directory": Path(directory) / "kv", "capacity": "8GiB", "prefill": engine, "decode": engine}
        with DisaggregatedLLM(task.source, config=config, prefill_threads=1, **settings) as both:
            outputs = asyncio.run(ask_all(both.llm, task))
    print(f"  {sum(output.metrics.loaded_tokens for output in outputs)} tokens handed over", flush=True)
    return [lines(outputs)]


async def ask_all(llm: AsyncLLM, task: Task) -> list[RequestOutput]:
    async def ask(prompt: list[int]) -> RequestOutput:
        return [output async for output in llm.generate(prompt, task.params)][-1]

    return await asyncio.gather(*map(ask, task.prompts))


MODES = {
    mode.__name__: mode
    for mode in (
        alone, batched, preempted, swapped, tiered, remote, pipelined, speculative, forked, aborts, disaggregated
    )
}  # fmt: skip


def logits_difference(loaded: Any, reference: Any) -> float:
    ids = torch.randint(0, loaded.config.vocab, (512,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours = loaded.model.forward(ids, torch.arange(512), DenseAttention(), torch.arange(512))
        theirs = reference(ids[None]).logits[0]
    return float((ours - theirs).abs().max())


def is_tie(reference: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> bool:
    at = next(at for at, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if mine != other)
    with torch.inference_mode():
        top = reference(torch.tensor([prompt + theirs[:at]])).logits[0, -1].topk(2).values
    return float(top[0] - top[1]) < TIE


def all_prompts(tokenizer: Any, short: int | None, long: int) -> list[list[int]]:
    texts = [json.loads(line)["prompt"] for line in (DATA / "prompts.jsonl").read_text().splitlines()]
    prompts = [tokenizer.encode(text) for text in texts][:short]
    sources = [tokenizer.encode(path.read_text()) for path in sorted((DATA / "quality").glob("*.txt"))]
    sources = [tokens for tokens in sources if len(tokens) >= 900]
    for number in range(long):
        tokens = sources[number % len(sources)]
        length = 500 + 397 * number % 400
        start = 53 * number % (len(tokens) - length)
        prompts.append(tokens[start : start + length])
    return prompts


def expectations(reference: Any, task: Task, known: Path | None) -> Outputs:
    """What transformers says, prompt after prompt; from the file, where it has just these prompts."""
    question = {"prompts": task.prompts, "tokens": task.tokens}
    if known is not None and known.is_file():
        kept = json.loads(known.read_text())
        if kept["question"] == question:
            return list(kept["answers"])
    answers = [
        reference.generate(torch.tensor([prompt]), max_new_tokens=task.tokens, do_sample=False, pad_token_id=0)[
            0, len(prompt) :
        ].tolist()
        for prompt in task.prompts
    ]
    if known is not None:
        known.write_text(json.dumps({"question": question, "answers": answers}))
    return answers


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default=",".join(MODES), help="modes, by name")
    parser.add_argument("--expected", type=Path, help="file of what transformers said, written if absent")
    parser.add_argument("--threads", type=int, default=2, help="of torch; 1 beside other work")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = fetch_default_model(cache_dir(), lambda *_: None)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    # min_new_tokens would forbid the end-of-sequence token; here it is a token like any other.
    reference.generation_config.eos_token_id = None
    report = Report(args.json)
    with Task(source, [], 1).llm() as llm:
        loaded = llm.model
    difference = logits_difference(loaded, reference)
    report.add(Result("accuracy.logits", difference, "max abs", {"tokens": 512, "dtype": "float32"}))

    prompts = all_prompts(loaded.tokenizer, *((6, 2) if args.quick else (None, 30)))
    task = Task(source, prompts, 24 if args.quick else 32)
    expected = expectations(reference, task, args.expected)
    for name in args.only.split(","):
        pairs = [pair for outputs in MODES[name](task) for pair in zip(prompts, outputs, expected, strict=True)]
        same = sum(ours == theirs for _, ours, theirs in pairs)
        ties = sum(ours != theirs and is_tie(reference, prompt, ours, theirs) for prompt, ours, theirs in pairs)
        params = {"outputs": len(pairs), "tokens": task.tokens, "dtype": "float32", "ties": ties}
        peer = "transformers.generate"
        report.add(Result(f"accuracy.{name}", same, "outputs", params, peer, len(pairs), same / len(pairs)))
        report.write()


if __name__ == "__main__":
    main()
