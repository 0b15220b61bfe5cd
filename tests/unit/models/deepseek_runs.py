"""A tiny DeepSeek with a tokenizer on disk, prompts, and what transformers continues them with."""

from dataclasses import dataclass
from pathlib import Path

import torch
from deepseek_reference import saved_deepseek
from tiny_model import tiny_tokenizer

from kvtier.engine import SamplingParams

TOKENS = 16
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
# Random weights leave the two best tokens closer now and then than float32 tells apart: such prompts say nothing.
_CLEAR = 1e-3


@dataclass(frozen=True)
class Expected:
    """A model directory, prompts, and their greedy continuations."""

    directory: Path
    prompts: list[list[int]]
    continuations: list[list[int]]


def expected(directory: Path, kind: str, lengths: tuple[int, ...] = (1, 9, 47, 70)) -> Expected:
    """Make the model and its reference: the whole sequence anew for every token, without a cache."""
    model = saved_deepseek(directory, kind)
    tiny_tokenizer().backend.save(str(directory / "tokenizer.json"))
    generator = torch.Generator().manual_seed(11)
    prompts: list[list[int]] = []
    continuations: list[list[int]] = []
    for length in lengths:
        prompt, continuation = None, None
        while continuation is None:
            prompt = torch.randint(1, 257, (length,), generator=generator).tolist()
            continuation = _greedy(model, prompt)
        prompts.append(prompt)
        continuations.append(continuation)
    return Expected(directory, prompts, continuations)


def _greedy(model: torch.nn.Module, prompt: list[int]) -> list[int] | None:
    tokens = list(prompt)
    for _ in range(TOKENS):
        with torch.inference_mode():
            best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        if best.values[0] - best.values[1] < _CLEAR:
            return None
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]
