"""Prompt lookup against plain decoding: where it pays, and where it must cost nothing.

    python benchmarks/speculative.py [--quick] [--only NAME[,NAME]] [--json PATH]

`repeating`   a passage and its first third again, greedy: the model goes on copying
`prose`       a passage and the beginning of something else, greedy: a small model's prose comes to repeat itself
`elsewhere`   the same prompts, drawn at temperature 1: text that repeats neither its prompt nor itself, on which
              guesses are to be given up

The default model, bf16, 2 threads, one request at a time, the same requests with and without guesses in alternating
order (20 pairs, `--quick`: 6). Both give the same tokens, which is checked: a difference between the two is a tie in
bf16, reported and not counted as a failure.

Predictions, written before the first runs: repeating >= 1.8 x (a step with 9 rows costs about 1.5 steps with one, and
brings up to 9 tokens), prose 0.99 to 1.05 x (it was 1.6 x); elsewhere 0.97 to 1.0 x, under a fifth of the
guesses right: of 95 steps, those few have guesses that it takes to find out.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from harness import Report, Result, arguments

from kvtier.engine import Engine, EngineOptions, SamplingParams
from kvtier.engine.drafting import PromptLookup
from kvtier.engine.models import LoadedModel, load_model
from kvtier.engine.models.catalog import cache_dir, fetch_default_model

TEXTS = Path(__file__).parents[1] / "tests/data/quality"
NAMES = ("northanger.txt", "sockets.txt", "persuasion.txt", "functional.txt")


def passages(model: LoadedModel, count: int) -> list[list[int]]:
    texts = ((TEXTS / name).read_text(encoding="utf-8") for name in NAMES[:count])
    return [model.tokenizer.encode(text)[:240] for text in texts]


def repeating(model: LoadedModel, count: int) -> list[list[int]]:
    """A passage, and its first third again: the model goes on copying."""
    return [passage + passage[:80] for passage in passages(model, count)]


def prose(model: LoadedModel, count: int) -> list[list[int]]:
    """A passage, and the beginning of something else."""
    beginning = model.tokenizer.encode("\n\nOnce upon a time, far away from all of this,")
    return [passage[:120] + beginning for passage in passages(model, count)]


KINDS = {"repeating": (repeating, 0.0), "prose": (prose, 0.0), "elsewhere": (prose, 1.0)}


def run(
    model: LoadedModel, prompts: Sequence[list[int]], params: SamplingParams, *, guesses: bool
) -> tuple[float, list[tuple[int, ...]], float]:
    """Decode seconds of all requests one by one, their outputs, the share of guesses that were right."""
    options = EngineOptions(num_blocks=256)
    engine = Engine(model, options, proposer=PromptLookup() if guesses else None)
    seconds, outputs = 0.0, []
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, params)
        while not (first := engine.step()):
            pass
        began, last = time.perf_counter(), first[0]
        while engine.has_work:
            last = engine.step()[0]
        seconds += time.perf_counter() - began
        outputs.append(last.token_ids)
    stats = engine.stats()
    return seconds, outputs, stats.accepted_tokens / max(stats.draft_tokens, 1)


def compare(
    report: Report, model: LoadedModel, name: str, prompts: Sequence[list[int]], pairs: int, temperature: float
) -> None:
    sampling = SamplingParams(max_tokens=96, ignore_eos=True, temperature=temperature, seed=1)
    run(model, prompts[:1], sampling, guesses=True)
    ratios, rates, accepted, differing = [], [], 0.0, 0
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        found = {guesses: run(model, prompts, sampling, guesses=guesses) for guesses in order}
        ratios.append(found[False][0] / found[True][0])
        rates.append(sum(map(len, found[True][1])) / found[True][0])
        accepted = found[True][2]
        differing = sum(ours != theirs for ours, theirs in zip(found[True][1], found[False][1], strict=True))
    middle, spread = statistics.mean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
    params = {
        "pairs": pairs,
        "requests": len(prompts),
        "temperature": temperature,
        "accepted": round(accepted, 3),
        "low": round(middle - 1.96 * spread, 3),
        "high": round(middle + 1.96 * spread, 3),
        "differing": differing,
    }
    rate = float(np.median(rates))
    ratio = statistics.median(ratios)
    report.add(Result(name, rate, "tok/s", params, "the same engine without guesses", rate / ratio, ratio))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of text, all by default")
    args = parser.parse_args()
    torch.set_num_threads(2)
    model = load_model(fetch_default_model(cache_dir(), lambda *_: None), torch.bfloat16)
    report = Report(args.json)
    pairs, count = (6, 1) if args.quick else (20, 2)
    for name in args.only.split(","):
        prompts, temperature = KINDS[name]
        compare(report, model, f"engine.speculative.{name}", prompts(model, count), pairs, temperature)
    report.write()


if __name__ == "__main__":
    main()
