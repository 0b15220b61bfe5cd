"""ModelConfig: what a decoder's files say about its shapes and numerics. Knows no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ModelError
from kvtier.layout import GroupKind, LayerGroup

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "Fields",
    "Llama3Scaling",
    "ModelConfig",
    "RopeFactors",
    "RopeScaling",
    "config_from_hf",
    "eos_ids_from_hf",
    "read_json",
]

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's frequency-dependent RoPE scaling (Llama team, arXiv:2407.21783), as in `config.json`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class RopeFactors:
    """RoPE scaling given as one divisor per frequency, head_dim / 2 of them (GGUF's `rope_freqs.weight`)."""

    factors: tuple[float, ...]


RopeScaling = Llama3Scaling | RopeFactors


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and numerics of a decoder-only transformer.

    Args:
        architecture: HF class name, one of `SUPPORTED_ARCHITECTURES`.
        hidden: width of the residual stream.
        layers: number of decoder layers.
        heads: query heads.
        kv_heads: KV heads; divides `heads`.
        head_dim: elements per head, even.
        intermediate: width of the MLP.
        vocab: rows of the embedding.
        rms_eps: epsilon of the RMS norms.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how the frequencies are scaled, None for plain RoPE.
        tied: the output head is the embedding.
        max_positions: longest context in tokens.
        eos_ids: tokens that end a generation.
        dtype: the checkpoint's own dtype: float32, bfloat16 or float16.
    """

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied: bool
    max_positions: int
    eos_ids: frozenset[int]
    dtype: str

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_positions"):
            if getattr(self, name) < 1:
                raise ModelError(f"model config: {name} = {getattr(self, name)}, expected at least 1")
        if self.heads % self.kv_heads:
            raise ModelError(f"model config: {self.heads} query heads are no multiple of {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelError(f"model config: head_dim = {self.head_dim}, expected an even number (RoPE turns pairs)")
        if self.dtype not in _DTYPES:
            raise ModelError(f"model config: dtype {self.dtype!r}, expected one of {', '.join(_DTYPES)}")

    @property
    def numerics(self) -> str:
        """What changes KV values without changing shapes; goes into `keys.Namespace.numerics`."""
        return f"rms_eps={self.rms_eps!r};rope_theta={self.rope_theta!r};rope_scaling={self.rope_scaling!r}"

    @property
    def block_params(self) -> int:
        """Weights that every token passes through: all layers' matrices, without embedding and head."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    def layer_groups(self, dtype: str) -> tuple[LayerGroup, ...]:
        """Layer groups of the KV cache, for KV stored as `dtype` (a key of `layout.DTYPE_BYTES`)."""
        layers = tuple(range(self.layers))
        return (LayerGroup(GroupKind.GQA, layers, 2, self.kv_heads, self.head_dim, dtype=dtype),)


class Fields:
    """Typed access to a mapping read from a file; a bad entry is a ModelError that names file and entry.

    Args:
        values: the entries.
        origin: the file they came from, for messages.
    """

    __slots__ = ("origin", "values")

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values = values
        self.origin = origin

    def number(self, name: str, default: float | None = None) -> float:
        """A finite or infinite float; `default` where the entry is absent or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.origin}: {name} = {value!r}, expected a number: the file is incomplete or damaged")
        return float(value)

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer; `default` where the entry is absent or null."""
        value = self.number(name, default)
        if value != int(value):
            raise ModelError(f"{self.origin}: {name} = {value!r}, expected an integer")
        return int(value)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError where the file is unreadable or no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}: expected a readable model file") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON ({error}): download the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: {type(value).__name__}, expected a JSON object: download the file again")
    return value


def eos_ids_from_hf(directory: Path) -> frozenset[int]:
    """Token ids that end a generation: those of generation_config.json, else those of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        value = read_json(path).get("eos_token_id") if path.is_file() else None
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) for item in ids):
            raise ModelError(f"{path}: eos_token_id = {value!r}, expected a token id or a list of token ids")
        return frozenset(ids)
    return frozenset()


def config_from_hf(directory: Path) -> ModelConfig:
    """Read `config.json` (and the end tokens of `generation_config.json`) of a HF model directory.

    Raises:
        ModelError: no such file, a damaged file, or a model that is not supported.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(f"{directory}: no config.json: expected a directory of a HF model, or a .gguf file")
    raw = read_json(path)
    architecture = _supported_architecture(raw, str(path))
    fields = Fields(raw, str(path))
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
    return ModelConfig(
        architecture=architecture,
        hidden=hidden,
        layers=fields.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // max(heads, 1)),
        intermediate=fields.integer("intermediate_size"),
        vocab=fields.integer("vocab_size"),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=Fields(rope, str(path)).number("rope_theta", 10000.0),
        rope_scaling=_rope_scaling(rope, str(path)),
        tied=bool(raw.get("tie_word_embeddings", False)),
        max_positions=fields.integer("max_position_embeddings", 2048),
        eos_ids=eos_ids_from_hf(directory),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def _supported_architecture(raw: Mapping[str, Any], origin: str) -> str:
    names = raw.get("architectures") or ["(none)"]
    if names[0] not in SUPPORTED_ARCHITECTURES:
        raise ModelError(f"{origin}: architecture {names[0]}: supported are {', '.join(SUPPORTED_ARCHITECTURES)}")
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            raise ModelError(f"{origin}: {name} = true: supported are models without biases")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{origin}: hidden_act {raw['hidden_act']!r}: supported is silu")
    if raw.get("quantization_config"):
        raise ModelError(f"{origin}: quantised weights: supported are unquantised safetensors and GGUF files")
    return str(names[0])


def _rope_scaling(rope: Mapping[str, Any], origin: str) -> Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{origin}: partial_rotary_factor {rope['partial_rotary_factor']}: supported is 1.0")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"{origin}: RoPE scaling {kind!r}: supported are default and llama3")
    fields = Fields(rope, origin)
    return Llama3Scaling(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_positions=fields.integer("original_max_position_embeddings"),
    )
