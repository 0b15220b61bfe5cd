"""The transformers adapter passes the public suite: prompts run in turn, and nothing is kept on the device."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from kvtier_transformers import KVTierCache
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.testing import AdapterSetup, AdapterSuite

SIZE = 4

Tokens = tuple[int, ...]


def attentive_llama() -> LlamaForCausalLM:
    """Two layers of random weights; what it attends to decides what it says."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 6
            layer.self_attn.q_proj.weight *= 3
    return model


MODEL = attentive_llama()
ANSWERS: dict[tuple[Tokens, int], Tokens] = {}


class Generator:
    """Implements `AdapterEngine` with `model.generate`, one prompt after another."""

    def __init__(self, setup: AdapterSetup) -> None:
        self._setup = setup
        self._loaded = 0

    def _run(self, prompt: Tokens, max_tokens: int) -> tuple[KVTierCache, torch.Tensor]:
        setup, ids = self._setup, torch.tensor([prompt])
        cache = KVTierCache.from_prompt(
            setup.store,
            ids,
            MODEL,
            block_size=SIZE,
            fingerprint="attentive",
            salt=setup.salt,
            accept_lossy=setup.accept_lossy,
        )
        self._loaded += cache.restored[0]
        return cache, MODEL.generate(ids, **cache.kwargs, max_new_tokens=max_tokens, do_sample=False)

    def generate(self, prompts: Sequence[Tokens], max_tokens: int) -> list[Tokens]:
        answers = []
        for prompt in prompts:
            cache, output = self._run(prompt, max_tokens)
            cache.commit(output)
            answers.append(tuple(output[0, len(prompt) :].tolist()))
        return answers

    def abort(self, prompts: Sequence[Tokens], max_tokens: int, steps: int) -> None:
        """What was begun is dropped, and never committed."""
        for prompt in prompts[: steps + 1]:
            self._run(prompt, 1)

    def forget(self) -> None:
        pass  # nothing outlives its cache

    def loaded_tokens(self) -> int:
        return self._loaded

    def loaded_bytes(self) -> Mapping[str, int]:
        store = self._setup.store
        return {tier.name: int(store.metrics.value("loaded_bytes_total", tier=tier.name)) for tier in store.tiers}

    def preemptions(self) -> int:
        return 0

    def close(self) -> None:
        pass


@pytest.mark.filterwarnings("ignore")
class TestTransformersAdapter(AdapterSuite):
    block_tokens = SIZE
    block_bytes = 2 * 2 * 2 * SIZE * 8 * 4  # layers, K and V, heads, tokens, width, bytes
    token_ids = range(1, 257)
    device_prefix = False
    preempts = False

    def loadable(self, tokens: int) -> int:
        return min(tokens - 1, tokens // SIZE * SIZE)

    def make_engine(self, setup: AdapterSetup) -> Generator:
        return Generator(setup)

    def reference(self, prompt: Tokens, max_tokens: int) -> Tokens:
        if (prompt, max_tokens) not in ANSWERS:
            tokens = list(prompt)
            for _ in range(max_tokens):
                with torch.inference_mode():
                    logits = MODEL(torch.tensor([tokens]), use_cache=False).logits
                tokens.append(int(logits[0, -1].argmax()))
            ANSWERS[prompt, max_tokens] = tuple(tokens[len(prompt) :])
        return ANSWERS[prompt, max_tokens]
