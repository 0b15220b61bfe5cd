"""Real transformers models of a few thousand random weights, and what they compute with their own cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from kvtier_transformers import KVTierCache, open_store
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvtier.store import TieredStore

BLOCK = 4
VOCAB = 61

_PLAIN = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    # Far above the usual 0.02: outputs must depend on the whole prompt, or nothing would be tested.
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def llama(seed: int = 0, **options: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**_PLAIN, "num_key_value_heads": 2, **options})).eval()


def qwen3(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**_PLAIN, num_key_value_heads=2, head_dim=16)).eval()


def deepseek(seed: int = 0) -> PreTrainedModel:
    """MLA: latents of 16 and rope keys of 8 elements, and experts in the second layer."""
    torch.manual_seed(seed)
    config = DeepseekV3Config(
        **_PLAIN,
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    return DeepseekV3ForCausalLM(config).eval()


MODELS = {"llama": llama, "qwen3": qwen3, "deepseek": deepseek}


def prompt(length: int, seed: int = 0, rows: int = 1) -> Tensor:
    """Token ids 1.., [rows, length]: 0 is left for padding."""
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def opened(model: PreTrainedModel, **tiering: Any) -> TieredStore:
    return open_store({"host": {"capacity": "16MiB"}, **tiering}, model, BLOCK)


def nvme(path: object, **options: Any) -> dict[str, Any]:
    return {"path": str(path), "capacity": "16MiB", "min_free": "0", **options}


def cache_for(store: TieredStore, ids: Tensor, model: PreTrainedModel, **options: Any) -> KVTierCache:
    return KVTierCache.from_prompt(store, ids, model, block_size=BLOCK, **options)


def generated(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    """Greedy, 12 tokens, unless told otherwise; sampling begins at the same seed each time."""
    torch.manual_seed(0)
    return model.generate(ids, **{"max_new_tokens": 12, "do_sample": False, **options})


def warm(store: TieredStore, model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    """Generate once and store what was computed."""
    cache = cache_for(store, ids, model, **options)
    output = generated(model, ids, cache=cache, **{name: options[name] for name in options.keys() & {"attention_mask"}})
    cache.commit(output)
    return output


@contextmanager
def fed(model: PreTrainedModel) -> Iterator[list[int]]:
    """How many tokens each forward of the decoder computes."""
    lengths: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield lengths
    finally:
        hook.remove()


def assert_kv_is_the_models_own(cache: KVTierCache, model: PreTrainedModel, ids: Tensor) -> None:
    """What was restored is what the model computes of these tokens, without padding, by itself."""
    length = cache.get_seq_length()
    with torch.no_grad():
        own = model(ids[:, :length], use_cache=True).cache
    for restored, computed in zip(cache.layers, own.layers, strict=True):
        torch.testing.assert_close(restored.keys, computed.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(restored.values, computed.values, rtol=1e-4, atol=1e-4)


def nothing_is_held(store: TieredStore) -> bool:
    store.flush()  # what is on its way down is leased by the store itself
    stats = store.stats()
    return not stats["store"]["leases"] and not any(stats[tier.name]["leases"] for tier in store.tiers)
