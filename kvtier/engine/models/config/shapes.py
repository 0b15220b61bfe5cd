"""ModelConfig: shapes and numerics of a decoder, as data. What families differ in is a field, never a class."""

from dataclasses import dataclass
from typing import NamedTuple

from kvtier.engine.models.yarn import YarnScaling
from kvtier.errors import ModelError
from kvtier.layout import GroupKind, LayerGroup

__all__ = ["ExpertNames", "ExpertsConfig", "Llama3Scaling", "ModelConfig", "RopeFactors", "RopeScaling"]

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


RopeScaling = Llama3Scaling | RopeFactors | YarnScaling


class ExpertNames(NamedTuple):
    """What a checkpoint calls the parts of a mixture: tensors `<layer>.<block>.experts.<i>.<gate>.weight` and so on."""

    block: str
    gate: str
    up: str
    down: str


QWEN_NAMES = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """MLPs of which each token runs through a few.

    Args:
        count: experts of a layer.
        choices: experts per token.
        intermediate: width of one expert.
        normalise: the weights of a token's experts sum to 1, instead of being probabilities.
        layers: which layers have experts; the others have a dense MLP.
        shared_intermediate: width of the gated expert that every token runs through, 0 for none.
        names: of the tensors.
    """

    count: int
    choices: int
    intermediate: int
    normalise: bool
    layers: frozenset[int]
    shared_intermediate: int = 0
    names: ExpertNames = QWEN_NAMES

    def __post_init__(self) -> None:
        if not 1 <= self.choices <= self.count:
            raise ModelError(f"model config: {self.choices} experts per token of {self.count}, expected 1 to as many")
        if self.intermediate < 1 or self.shared_intermediate < 0:
            raise ModelError(
                f"model config: experts of width {self.intermediate} and a shared one of {self.shared_intermediate}, "
                "expected at least 1, and at least 0"
            )

    def active_params(self, hidden: int) -> int:
        """Weights of one layer that a token passes through."""
        shared = 3 * self.shared_intermediate + 1 if self.shared_intermediate else 0
        return hidden * (self.count + 3 * self.choices * self.intermediate + shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and numerics of a decoder-only transformer.

    Args:
        architecture: HF class name, one of `families.SUPPORTED_ARCHITECTURES`.
        hidden: width of the residual stream.
        layers: number of decoder layers.
        heads: query heads.
        kv_heads: KV heads; divides `heads`.
        head_dim: elements per head, even.
        intermediate: width of the dense MLPs.
        vocab: rows of the embedding.
        rms_eps: epsilon of the RMS norms.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how the frequencies are scaled, None for plain RoPE.
        tied: the output head is the embedding.
        max_positions: longest context in tokens.
        eos_ids: tokens that end a generation.
        dtype: the checkpoint's own dtype: float32, bfloat16 or float16.
        qkv_bias: the projections to queries, keys and values have biases.
        output_bias: the projection of attention's output has one.
        qk_norm: queries and keys are RMS-normalised per head, before RoPE.
        windows: per layer, how many tokens up to its own one a token attends to, None for all; empty: all in every
            layer.
        experts: of the layers that have some.
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
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_positions"):
            if getattr(self, name) < 1:
                raise ModelError(f"model config: {name} = {getattr(self, name)}, expected at least 1")
        if self.heads % self.kv_heads:
            raise ModelError(f"model config: {self.heads} query heads are no multiple of {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelError(f"model config: head_dim = {self.head_dim}, expected an even number (RoPE turns pairs)")
        if not self.rope_theta > 1:
            raise ModelError(f"model config: rope_theta = {self.rope_theta}, expected a number greater than 1")
        if self.dtype not in _DTYPES:
            raise ModelError(f"model config: dtype {self.dtype!r}, expected one of {', '.join(_DTYPES)}")
        if self.windows and len(self.windows) != self.layers:
            raise ModelError(
                f"model config: {len(self.windows)} windows, expected one for each of {self.layers} layers"
            )
        narrow = [window for window in self.windows if window is not None and window < 1]
        if narrow:
            raise ModelError(f"model config: a sliding window of {narrow[0]} tokens, expected at least 1")

    @property
    def numerics(self) -> str:
        """What changes KV values without changing shapes; goes into `keys.Namespace.numerics`."""
        text = f"rms_eps={self.rms_eps!r};rope_theta={self.rope_theta!r};rope_scaling={self.rope_scaling!r}"
        if any(self.windows):
            text += f";windows={self.windows!r}"
        if self.experts is not None:
            text += f";experts={self.experts.choices}{'n' if self.experts.normalise else 'p'}"
        return text

    @property
    def routed(self) -> bool:
        """Tokens are sent to experts, whose numbers of rows the host has to know: a step waits for the device."""
        return self.experts is not None

    @property
    def block_params(self) -> int:
        """Weights that every token passes through: all layers' matrices, without embedding and head."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        dense = 3 * self.hidden * self.intermediate
        if self.experts is None:
            return self.layers * (attention + dense)
        sparse = len(self.experts.layers)
        return (
            self.layers * attention + (self.layers - sparse) * dense + sparse * self.experts.active_params(self.hidden)
        )

    @property
    def rope_dim(self) -> int:
        """Elements of a head that RoPE turns."""
        return self.head_dim

    @property
    def rotation_scale(self) -> float:
        """What rotated queries and keys are multiplied by."""
        return self.rope_scaling.rotation_scale if isinstance(self.rope_scaling, YarnScaling) else 1.0

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by before their softmax."""
        scale: float = self.head_dim**-0.5
        return scale

    @property
    def pair_work(self) -> int:
        """Multiplications of attention for one token and one that it attends to, in all layers."""
        return self.layers * self.heads * 2 * self.head_dim

    def layer_groups(self, dtype: str) -> tuple[LayerGroup, ...]:
        """Layer groups of the KV cache, for KV stored as `dtype` (a key of `layout.DTYPE_BYTES`).

        One, or two where only some layers have a window: first those that keep the KV of the whole context, then those
        that keep a window. The widest of their windows is the group's; attention masks what is behind a layer's own
        (`windows`).
        """
        windows = self.windows or (None,) * self.layers
        full = tuple(layer for layer, window in enumerate(windows) if window is None)
        windowed = tuple(layer for layer, window in enumerate(windows) if window is not None)
        widest = max((window for window in windows if window is not None), default=None)
        return tuple(
            LayerGroup(GroupKind.GQA, layers, 2, self.kv_heads, self.head_dim, dtype=dtype, window=window)
            for layers, window in ((full, None), (windowed, widest))
            if layers
        )
