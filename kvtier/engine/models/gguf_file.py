"""GGUF checkpoints of the Llama family: metadata, config, and tensors under their HF names, dequantised on demand."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from gguf import GGUFReader, dequantize
from torch import Tensor

from kvtier.engine.models.config import Fields, ModelConfig, RopeFactors
from kvtier.engine.models.weights import Weights
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import ModelError

__all__ = ["GGUFWeights", "config_from_gguf"]

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
# general.file_type of unquantised files; everything else was bfloat16 before it was quantised, mostly.
_DTYPES = {0: "float32", 1: "float16"}
_OTHERWISE = "load other models from their HF directory"


class GGUFWeights(Weights):
    """A GGUF file. Tensors come out as float32.

    Raises:
        ModelError: a truncated or foreign file, or a model that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.origin = path
        reader = _reader(path)
        self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        self._tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
        factors = self._tensors.pop(_ROPE_FACTORS, None)
        scaling = None if factors is None else RopeFactors(tuple(_values(factors, path).tolist()))
        self.config = config_from_gguf(self.metadata, str(path), scaling, tied="lm_head.weight" not in self)

    def __getitem__(self, name: str) -> Tensor:
        values = torch.from_numpy(_values(self._tensors[name], self.origin))
        if name.endswith("self_attn.q_proj.weight"):
            return _unpermuted(values, self.config.heads)
        if name.endswith("self_attn.k_proj.weight"):
            return _unpermuted(values, self.config.kv_heads)
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the file's metadata."""
        return Tokenizer.from_gguf(self.metadata, str(self.origin))

    def _stored(self, name: str) -> str:
        tensor = self._tensors[name]
        data = np.ascontiguousarray(tensor.data).view(np.uint8)
        return f"{tensor.tensor_type.name}{tensor.shape.tolist()}{xxhash.xxh3_128_hexdigest(data.data)}"


def config_from_gguf(metadata: dict[str, Any], origin: str, scaling: RopeFactors | None, *, tied: bool) -> ModelConfig:
    """Read a model's config from GGUF metadata.

    Args:
        metadata: the file's key-value pairs.
        origin: the file's name, for messages.
        scaling: the file's RoPE divisors, where it has some.
        tied: the file has no output head of its own.

    Raises:
        ModelError: a missing entry, or a model that is not supported.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{origin}: GGUF architecture {architecture!r}: supported is llama; {_OTHERWISE}")
    for name in ("llama.expert_count", "llama.attention.sliding_window"):
        if metadata.get(name):
            raise ModelError(f"{origin}: {name} = {metadata[name]}: supported are files without it; {_OTHERWISE}")
    rope_type = metadata.get("llama.rope.scaling.type", "none")
    if rope_type != "none":
        raise ModelError(f"{origin}: RoPE scaling {rope_type!r}: supported are none and factors in {_ROPE_FACTORS}")
    fields = Fields(metadata, origin)
    hidden, heads = fields.integer("llama.embedding_length"), fields.integer("llama.attention.head_count")
    ends = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    head_dim = fields.integer("llama.attention.key_length", hidden // max(heads, 1))
    if fields.integer("llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{origin}: RoPE over a part of the {head_dim} elements of a head: supported is all of them")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden=hidden,
        layers=fields.integer("llama.block_count"),
        heads=heads,
        kv_heads=fields.integer("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=fields.integer("llama.feed_forward_length"),
        vocab=fields.integer("llama.vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        # The file holds a float32 of what was meant as a short decimal number.
        rms_eps=_shortest(fields.number("llama.attention.layer_norm_rms_epsilon")),
        rope_theta=fields.number("llama.rope.freq_base", 10000.0),
        rope_scaling=scaling,
        tied=tied,
        max_positions=fields.integer("llama.context_length"),
        eos_ids=frozenset(int(metadata[name]) for name in ends if name in metadata),
        dtype=_DTYPES.get(fields.integer("general.file_type", -1), "bfloat16"),
    )


def _reader(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}: expected a readable .gguf file") from error
    # What the reader raises on files that are cut short or no GGUF at all.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path}: no GGUF file, or a truncated one ({error}): download it again") from error


def _values(tensor: Any, path: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelError(f"{path}: {tensor.name} is quantised as {tensor.tensor_type.name}: not supported") from error
    # dequantize hands float32 data out as it lies in the file, which is mapped read-only.
    return np.array(values, dtype=np.float32)


def _hf_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    block, _, rest = name.partition(".")
    index, _, leaf = rest.partition(".")
    stem, _, kind = leaf.partition(".")
    if block != "blk" or stem not in _LAYER_NAMES:
        return name
    return f"model.layers.{index}.{_LAYER_NAMES[stem]}.{kind}"


def _unpermuted(rows: Tensor, heads: int) -> Tensor:
    """Undo the conversion's interleaving of each head's two halves: pairs (i, i + d/2) come as (2i, 2i + 1)."""
    if rows.shape[0] % (2 * heads):
        return rows  # a wrong shape, which `take` reports
    halves = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _shortest(value: float) -> float:
    """The shortest decimal number that rounds to the same float32."""
    return float(np.format_float_scientific(np.float32(value))) if math.isfinite(value) else value
