"""Models whose KV is of another kind than K and V of all tokens: a sliding window, and latents."""

from pathlib import Path

import pytest
import torch
from tiny_llama import BLOCK_BYTES, VOCABULARY
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, MistralConfig, MistralForCausalLM
from vllm_world import BLOCK, Vllm, tokens_of

SHARED = tokens_of(1800, 6 * BLOCK + 8)
PROMPTS = [[*SHARED, *tokens_of(1801 + each, 40)] for each in range(3)]
WINDOW = 3 * BLOCK
LOADED = 6 + len(PROMPTS)
"""Blocks: the shared ones once, and one more of each prompt."""
TILES = torch.cpu.get_capabilities().get("amx_tile", False)


def _mistral(path: Path) -> Path:
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        sliding_window=WINDOW,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    MistralForCausalLM(config).save_pretrained(path)
    return path


def _deepseek(path: Path) -> Path:
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        first_k_dense_replace=3,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    DeepseekV2ForCausalLM(config).save_pretrained(path)
    return path


def test_what_a_sliding_window_saw_comes_back(tmp_path):
    model = _mistral(tmp_path / "model")
    with Vllm(model) as plain:
        expected = plain.tokens(PROMPTS, 40)
    with Vllm(model, {"host": {"capacity": "16MiB"}}) as vllm:
        assert vllm.tokens(PROMPTS, 40) == expected
        for turn in (1, 2):
            vllm.only("host")
            answers = vllm.generate(PROMPTS, 40)
            assert [answer.tokens for answer in answers] == expected
            assert [answer.cached for answer in answers] == [7 * BLOCK] * len(PROMPTS)
            assert vllm.loaded() == {"host": turn * LOADED * BLOCK_BYTES}
        vllm.check_at_rest()


@pytest.mark.skipif(not TILES, reason="without AMX, vLLM has no prefix caching for MLA on a CPU")
def test_latents_come_back(tmp_path):
    model = _deepseek(tmp_path / "model")
    with Vllm(model, {"host": {"capacity": "16MiB"}}, dtype="bfloat16", enable_prefix_caching=True) as vllm:
        vllm.tokens(PROMPTS, 40)
        # In bfloat16 another batch rounds otherwise: each by itself, against what the device has.
        expected = [vllm.tokens([prompt], 40) for prompt in PROMPTS]
        for turn in (1, 2):
            vllm.only("host")
            assert [vllm.tokens([prompt], 40) for prompt in PROMPTS] == expected
            assert vllm.loaded() == {"host": turn * LOADED * BLOCK * 3 * (512 + 64) * 2}
        vllm.check_at_rest()
