"""Is the engine's output transformers' output? Same weights, float32, same run.

    python benchmarks/accuracy.py [--quick] [--json PATH]

`accuracy.logits`: largest absolute difference over 512 tokens. `accuracy.greedy`: prompts of tests/data/prompts.jsonl
whose greedy continuation (128 tokens, all prompts in one continuous batch) is `transformers.generate`'s, token for
token; `accuracy.ties`: prompts that differ first where the reference's top two logits are closer than 1e-3.
`--quick`: 6 prompts, 48 tokens.
"""

import json
from pathlib import Path
from typing import Any

import torch
from harness import Report, Result, arguments
from transformers import AutoModelForCausalLM

from kvtier.engine import Engine, EngineOptions, SamplingParams
from kvtier.engine.models import load_model
from kvtier.engine.models.base import DenseAttention
from kvtier.engine.models.catalog import cache_dir, fetch_default_model

TIE = 1e-3
PROMPTS = Path(__file__).parents[1] / "tests/data/prompts.jsonl"


def logits_difference(loaded: Any, reference: Any) -> float:
    ids = torch.randint(0, loaded.config.vocab, (512,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours = loaded.model.forward(ids, torch.arange(512), DenseAttention(), torch.arange(512))
        theirs = reference(ids[None]).logits[0]
    return float((ours - theirs).abs().max())


def greedy(loaded: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    engine = Engine(loaded, EngineOptions(num_blocks=1024, max_running=16))
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, params)
    finished = {}
    while engine.has_work:
        finished |= {output.id: list(output.token_ids) for output in engine.step() if output.finish_reason}
    return [finished[str(number)] for number in range(len(prompts))]


def is_tie(reference: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> bool:
    at = next(at for at, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if mine != other)
    with torch.inference_mode():
        top = reference(torch.tensor([prompt + theirs[:at]])).logits[0, -1].topk(2).values
    return float(top[0] - top[1]) < TIE


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    torch.set_num_threads(2)
    source = fetch_default_model(cache_dir(), lambda *_: None)
    loaded = load_model(source, torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    # min_new_tokens would forbid the end-of-sequence token; here it is a token like any other.
    reference.generation_config.eos_token_id = None
    report = Report(args.json)
    difference = logits_difference(loaded, reference)
    report.add(Result("accuracy.logits", difference, "max abs", {"tokens": 512, "dtype": "float32"}))

    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    prompts = [loaded.tokenizer.encode(text) for text in texts][: 6 if args.quick else None]
    tokens = 48 if args.quick else 128
    ours = greedy(loaded, prompts, tokens)
    same, ties = 0, 0
    for prompt, mine in zip(prompts, ours, strict=True):
        ids = reference.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, pad_token_id=0)[
            0, len(prompt) :
        ].tolist()
        same += mine == ids
        ties += mine != ids and is_tie(reference, prompt, mine, ids)
    params = {"prompts": len(prompts), "tokens": tokens, "dtype": "float32"}
    peer, count = "transformers.generate", len(prompts)
    report.add(Result("accuracy.greedy", same, "prompts", params, peer, count, same / count))
    report.add(Result("accuracy.ties", ties, "prompts", params))
    report.write()


if __name__ == "__main__":
    main()
