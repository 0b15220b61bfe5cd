"""Models and prompts that cannot be served are refused, with a reason, before anything is changed."""

import pytest
import torch
from kvtier_transformers import cached_shape, weights_fingerprint
from kvtier_transformers.shapes import cache_argument
from transformers import (
    AutoModelForCausalLM,
    BatchEncoding,
    BertConfig,
    DeepseekV32Config,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    Qwen2Config,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers_world import BLOCK, VOCAB, cache_for, generated, llama, opened, prompt, warm

from kvtier.errors import ModelError, RequestError
from kvtier.layout import GroupKind

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}
LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}

REFUSED = {
    "sliding_attention": lambda: Gemma3TextConfig(**SMALL, head_dim=8),
    "sliding_attention,": lambda: Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "linear_attention": lambda: MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=VOCAB, state_size=4),
    "indexed_attention": lambda: DeepseekV32Config(**{**SMALL, "num_key_value_heads": 4}, **LATENT),
    "rope_type dynamic": lambda: LlamaConfig(**SMALL, rope_parameters=DYNAMIC),
    "not causal": lambda: BertConfig(**SMALL, is_decoder=False),
    "torch.float64": lambda: LlamaConfig(**SMALL, dtype=torch.float64),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_model_whose_kv_cannot_be_kept_in_blocks_is_refused_by_name(reason, store):
    model = AutoModelForCausalLM.from_config(REFUSED[reason]()).eval()
    with pytest.raises(ModelError, match=reason.strip(",")) as refused:
        cache_for(store, prompt(9), model)
    assert type(model).__name__ in str(refused.value)
    with pytest.raises(ModelError):
        opened(model)


def test_an_encoder_is_refused(store):
    config = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCAB)
    with pytest.raises(ModelError, match="T5ForConditionalGeneration reads more than token ids"):
        cache_for(store, prompt(9), T5ForConditionalGeneration(config).eval())


def test_a_model_in_training_mode_is_refused(store):
    with pytest.raises(RequestError, match=r"model\.eval\(\)"):
        cache_for(store, prompt(9), llama().train())


def test_a_wrapped_model_is_asked_for_by_what_is_inside(store, plain):
    compiled = torch.compile(plain, backend="eager")
    for wrapped in (compiled, torch.nn.DataParallel(plain)):
        with pytest.raises(RequestError, match=f"model is a {type(wrapped).__name__}.*pass the one inside"):
            cache_for(store, prompt(9), wrapped)
    expected = warm(store, plain, prompt(9))
    cache = cache_for(store, prompt(9), plain)
    assert cache.restored == (8,)
    assert torch.equal(generated(compiled, prompt(9), cache=cache), expected)
    assert cache.commit(expected).dropped == 0


def test_a_model_that_generates_without_a_cache_is_refused(store):
    model = llama()
    model.generation_config.use_cache = False
    with pytest.raises(RequestError, match=r"use_cache is False"):
        cache_for(store, prompt(9), model)


def test_a_model_without_a_head_is_served(store, plain):
    cache = cache_for(store, prompt(9), plain.model)
    with torch.no_grad():
        plain.model(prompt(9), cache=cache)
    assert cache.commit() == (2, 0, 0)
    assert cache_for(store, prompt(9), plain.model).restored == (8,)


def test_weights_that_are_elsewhere_or_adapters_need_a_name(plain):
    with torch.device("meta"):
        away = llama()
    with pytest.raises(ModelError, match="fingerprint="):
        weights_fingerprint(away)
    adapted = llama()
    adapted.model.layers[0].adapter = type("Adapter", (torch.nn.Module,), {"__module__": "peft.tuners.lora"})()
    with pytest.raises(ModelError, match=r"PEFT.*fingerprint="):
        weights_fingerprint(adapted)


@pytest.mark.parametrize(
    ("ids", "mask", "reason"),
    [
        (torch.tensor([1, 2, 3]), None, r"shape \(3,\)"),
        (torch.empty((1, 0), dtype=torch.long), None, r"shape \(1, 0\)"),
        (torch.rand(1, 4), None, "type float"),
        (prompt(4) > 9, None, "type bool"),
        ([[1, 2, 3]], None, "input_ids is a list: expected a tensor"),
        (BatchEncoding({"input_ids": prompt(4)}), None, r"input_ids is a BatchEncoding.*\[.input_ids.\]"),
        (prompt(4), [[1, 1, 1, 1]], "attention_mask is a list"),
        (prompt(4), torch.ones(1, 5), r"attention_mask of shape \(1, 5\)"),
        (prompt(4), torch.tensor([[1, 1, 1, 0]]), "padding on the left"),
        (prompt(4), torch.tensor([[1, 0, 1, 1]]), "padding on the left"),
        (prompt(4), torch.tensor([[0, 0, 0, 0]]), "padding on the left"),
        (torch.tensor([[1, -2, 3, 4, 5]]), None, "token ids -2..5"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_refused(ids, mask, reason, store, plain):
    with pytest.raises(RequestError, match=reason):
        cache_for(store, ids, plain, attention_mask=mask)


def test_padding_that_generation_would_mask_must_be_named():
    model = llama(pad_token_id=0)
    store = opened(model)
    try:
        padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt(9)], 1)
        with pytest.raises(RequestError, match="padding token 0"):
            cache_for(store, padded, model)
        mask = (padded != 0).long()
        warm(store, model, padded, attention_mask=mask)
        # A padded prompt, and the same one without its padding, are one.
        assert cache_for(store, prompt(9), model).restored == (8,)
        cache = cache_for(store, padded, model, attention_mask=mask)
        assert cache.restored == (8,)
        expected = generated(model, padded, attention_mask=mask)
        assert torch.equal(generated(model, padded, attention_mask=mask, cache=cache), expected)
    finally:
        store.close()


def test_padding_that_ends_sequences_too_is_a_token_as_generation_has_it(store):
    model = llama(pad_token_id=5, eos_token_id=[5, 7])
    ids = torch.cat([prompt(6), torch.full((1, 1), 5), prompt(6, seed=1)], 1)
    warm(store, model, ids)
    assert cache_for(store, ids, model).restored == (12,)


def test_what_a_model_caches_is_learnt_from_it(model):
    shape, group = cached_shape(model), cached_shape(model).layout(BLOCK).groups[0]
    latent = type(model).__name__.startswith("Deepseek")
    assert group.kind == (GroupKind.MLA if latent else GroupKind.GQA)
    assert shape is cached_shape(model)
    assert cache_argument(model) == "cache"


def test_the_caches_name_follows_the_models_signature():
    class Old(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None):
            raise NotImplementedError

    class Without(torch.nn.Module):
        def forward(self, input_ids):
            raise NotImplementedError

    assert cache_argument(Old()) == "past_key_values"
    with pytest.raises(ModelError, match="takes no cache"):
        cache_argument(Without())
