"""Write a transformers Llama as GGUF the way llama.cpp's converter does, with a byte-level vocabulary."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Edit = Callable[[gguf.GGUFWriter], None]

LEAVES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute`, copied from convert_hf_to_gguf.py."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def byte_vocabulary(size: int) -> list[str]:
    """The 256 byte symbols of GPT-2, one merge, then `<extra_i>`."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    symbols = [*bytes_to_unicode().values(), "ab"]
    return symbols + [f"<extra_{index}>" for index in range(size - len(symbols))]


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    quantised: gguf.GGMLQuantizationType | None = None,
    edit: Edit | None = None,
    architecture: str = "llama",
) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if quantised is None else gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens = byte_vocabulary(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<extra") else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(config.vocab_size - 1)
    if edit is not None:
        edit(writer)
    for name, tensor in model.state_dict().items():
        if not (name == "lm_head.weight" and config.tie_word_embeddings):
            add_tensor(writer, name, tensor.numpy(), config, quantised)
    if config.rope_parameters["rope_type"] == "llama3":
        # As the converter does: divisors of the plain frequencies.
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        plain = config.rope_parameters["rope_theta"] ** -exponent
        writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer, name, values, config, quantised) -> None:
    if name.endswith("q_proj.weight"):
        values = permuted(values, config.num_attention_heads)
    elif name.endswith("k_proj.weight"):
        values = permuted(values, config.num_key_value_heads)
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        target = fixed[name]
    else:
        _, _, index, *leaf, kind = name.split(".")
        target = f"blk.{index}.{LEAVES['.'.join(leaf)]}.{kind}"
    if quantised is None or values.ndim == 1 or target == "token_embd.weight":
        writer.add_tensor(target, np.ascontiguousarray(values))
    else:
        writer.add_tensor(target, gguf.quantize(values, quantised), raw_dtype=quantised)
