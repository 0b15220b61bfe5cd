"""The real SmolLM2-135M-Instruct against transformers."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvtier.engine.models.base import DenseAttention
from kvtier.engine.models.registry import LoadedModel, load_model
from kvtier.engine.tokenizer import IncrementalDecoder

pytestmark = pytest.mark.model

PROMPTS = [
    json.loads(line)["prompt"]
    for line in (Path(__file__).parents[1] / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
]
NASTY = [
    "",
    " ",
    "\n \n\t",
    "a  1 22 \uff13\uff13 ½ Ⅷ",
    "<|im_start|>user\nhi<|im_end|>",
    "👩‍👩‍👧‍👦 e\u0301\u0000\ufeff",
    "x" * 3000,
]
CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " naïve 🙂\n"}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "<|im_end|>{{ messages }}"},
    ],
]


@pytest.fixture(scope="module")
def ours(default_model: Path) -> LoadedModel:
    return load_model(default_model, torch.float32)


def test_logits_equal_transformers_over_512_tokens(default_model: Path, ours: LoadedModel) -> None:
    reference = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    text = "\n".join(PROMPTS)
    ids = torch.tensor(ours.tokenizer.encode(text * 3)[:512])
    assert len(ids) == 512
    positions = torch.arange(512)
    logits = ours.model.forward(ids, positions, DenseAttention(), positions)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    assert (logits - expected).abs().max() < 1e-3


def test_it_knows_the_capital_of_france(ours: LoadedModel) -> None:
    tokenizer = ours.tokenizer
    ids = tokenizer.encode(tokenizer.apply_chat_template(CONVERSATIONS[0]))
    prompt = len(ids)
    while ids[-1] not in tokenizer.eos_ids or len(ids) == prompt:
        positions = torch.arange(len(ids))
        ids.append(int(ours.model.forward(torch.tensor(ids), positions, DenseAttention(), positions[-1:]).argmax()))
        assert len(ids) < prompt + 20
    assert tokenizer.decode(ids[prompt:]) == "The capital of France is Paris."


def test_tokenizer_equals_transformers(default_model: Path, ours: LoadedModel) -> None:
    theirs, tokenizer = AutoTokenizer.from_pretrained(default_model), ours.tokenizer
    for text in PROMPTS + NASTY:
        ids = theirs(text).input_ids
        assert tokenizer.encode(text) == ids, text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert tokenizer.eos_ids == {theirs.eos_token_id}
    assert tokenizer.bos_id == theirs.bos_token_id


def test_every_digit_is_a_token_of_its_own(ours: LoadedModel) -> None:
    tokenizer = ours.tokenizer
    assert [tokenizer.decode([token]) for token in tokenizer.encode("a  123")] == ["a", "  ", "1", "2", "3"]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_template_equals_transformers(
    default_model: Path, ours: LoadedModel, messages: list[dict[str, str]], prompt: bool
) -> None:
    theirs = AutoTokenizer.from_pretrained(default_model)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert ours.tokenizer.apply_chat_template(messages, add_generation_prompt=prompt) == expected


def test_streamed_text_equals_decoded_text(ours: LoadedModel) -> None:
    tokenizer, draw = ours.tokenizer, random.Random(3)
    texts = [tokenizer.encode(text) for text in PROMPTS + NASTY]
    texts += [[draw.randrange(tokenizer.vocab_size) for _ in range(100)] for _ in range(20)]
    for ids in texts:
        for skip in (True, False):
            decoder = IncrementalDecoder(tokenizer, skip_special=skip)
            pieces = [decoder.push([token]) for token in ids] + [decoder.flush()]
            assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip)
