"""What the latent formats do to the attention of a DeepSeek model in transformers, whose cache they go through.

With random weights only the relative order of errors counts, so each is measured in those of bfloat16 itself: of an
attention's output over latents rounded to it, v over the latents that transformers computed in float32.
"""

import copy

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from kvtier import formats
from kvtier.layout import GroupKind, LayerGroup, Layout

BLOCK, BLOCKS, LATENT, ROPE = 16, 8, 512, 64
BOUNDS = {"raw": 0.0, "bitsplit": 0.0, "mla8": 5.3, "mla4": 88.0}
LAYOUT = Layout(BLOCK, (LayerGroup(GroupKind.MLA, (0,), 1, 1, LATENT, rope_dim=ROPE, dtype="bfloat16"),))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        qk_nope_head_dim=32,
        v_head_dim=32,
        q_lora_rank=None,
        first_k_dense_replace=1,
    )
    return DeepseekV3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def cache(model):
    tokens = torch.randint(0, 256, (1, BLOCK * BLOCKS), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(tokens, use_cache=True).past_key_values


def attended(model, cache, rows):
    """The attention's output for one more token, over these rows (tokens, latent + rope) in place of the cache's."""
    given, seen = copy.deepcopy(cache), []
    layer = given.layers[0]
    layer.keys = rows[:, :LATENT].reshape(layer.keys.shape)
    layer.values = rows[:, LATENT:].reshape(layer.values.shape)
    attention = model.model.layers[0].self_attn
    hook = attention.register_forward_hook(lambda *call: seen.append(call[2][0]))
    try:
        with torch.inference_mode():
            model(torch.tensor([[7]]), past_key_values=given)
    finally:
        hook.remove()
    return seen[0].double()


def through(name, rows):
    """Rows after encode and decode, block by block; bfloat16 in, bfloat16 out."""
    fmt = formats.get(name)
    back = []
    for block in rows.bfloat16().split(BLOCK):
        raw = block.contiguous().view(torch.uint8).numpy().reshape(-1)
        coded, out = np.zeros(fmt.bound(LAYOUT), np.uint8), np.zeros_like(raw)
        size = fmt.encode(raw.data, LAYOUT, coded.data)
        fmt.decode(coded[:size].data, LAYOUT, out.data)
        back.append(torch.from_numpy(out).view(torch.bfloat16).reshape(block.shape))
    return torch.cat(back).float()


@pytest.mark.parametrize("name", BOUNDS)
def test_attention_over_latents_from_a_tier_stays_inside_its_gate(model, cache, name):
    layer = cache.layers[0]
    exact = torch.cat([layer.keys.reshape(-1, LATENT), layer.values.reshape(-1, ROPE)], 1)
    assert exact.shape == (BLOCK * BLOCKS, LATENT + ROPE)
    kept = attended(model, cache, exact.bfloat16().float())
    coded = attended(model, cache, through(name, exact))
    own = float((kept - attended(model, cache, exact)).norm())
    assert own > 0
    assert float((coded - kept).norm()) <= BOUNDS[name] * own
