"""What a model caches, learnt from the model: a forward over two tokens says more than a configuration does."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, get_layer_types_and_kwargs

from kvtier.errors import ModelError
from kvtier.layout import DTYPE_BYTES, GroupKind, LayerGroup, Layout

__all__ = ["CachedShape", "cache_argument", "cached_shape"]

# Frequencies that depend on how long the sequence has become: a prefix has other keys in a longer prompt.
_LENGTH_DEPENDENT = ("dynamic", "longrope")
# Of a sum, relative to the largest.
_NOISE = 1e-5


@dataclass(frozen=True, slots=True)
class CachedShape:
    """Keys and values of every layer, [rows, heads, slots, width] each.

    Args:
        heads: KV heads of a layer.
        key_width, value_width: elements of a head; they differ for MLA, where keys are latents and values rope keys.
        dtype: of both.
        devices: of each layer.
    """

    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]

    @property
    def is_latent(self) -> bool:
        """Whether a layer caches one latent row per token (MLA) instead of K and V per head."""
        return self.key_width != self.value_width

    def check(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Compare what was cached with it.

        Raises:
            ModelError: it has another dtype or shape, as under autocast.
        """
        for keys, values in layers:
            found = (keys.shape[1], values.shape[1], keys.shape[3], values.shape[3], keys.dtype, values.dtype)
            if found != (self.heads, self.heads, self.key_width, self.value_width, self.dtype, self.dtype):
                raise ModelError(
                    f"K {list(keys.shape)} of {keys.dtype} and V {list(values.shape)} of {values.dtype} were cached: "
                    f"expected {self}; run the model as it was when the cache was made, without autocast"
                )

    def layout(self, block_size: int) -> Layout:
        """Layout of its blocks: `lphtd` for K and V, latent and rope key side by side for MLA."""
        layers, dtype = tuple(range(len(self.devices))), str(self.dtype).removeprefix("torch.")
        if self.is_latent:
            group = LayerGroup(GroupKind.MLA, layers, 1, 1, self.key_width, self.value_width, dtype)
        else:
            group = LayerGroup(GroupKind.GQA, layers, 2, self.heads, self.key_width, dtype=dtype)
        return Layout(block_size, (group,))


_Placed = tuple[tuple[torch.dtype, torch.device], ...]
_shapes: "WeakKeyDictionary[PreTrainedModel, tuple[_Placed, CachedShape]]" = WeakKeyDictionary()


def cached_shape(model: PreTrainedModel) -> CachedShape:
    """What a model caches; asked once per model, dtype and placement.

    Raises:
        ModelError: a model whose cached state is no function of its tokens alone, or cannot be cut into blocks; the
            message names what is in the way.
    """
    placed = tuple((parameter.dtype, parameter.device) for parameter in model.parameters())
    known = _shapes.get(model)
    if known is None or known[0] != placed:
        _check(model)
        known = _shapes[model] = (placed, _probe(model))
    return known[1]


def cache_argument(model: PreTrainedModel) -> str:
    """By which name the model takes a cache: `cache`, or `past_key_values` before transformers 5.

    Raises:
        ModelError: it takes none.
    """
    taken = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in taken:
            return name
    raise ModelError(f"{type(model).__name__} takes no cache: expected an argument cache or past_key_values")


def _check(model: PreTrainedModel) -> None:
    """Refuse what can be told without running it."""
    name, config = type(model).__name__, model.config
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or text is not config:
        raise ModelError(
            f"{name} reads more than token ids (an encoder's, or images): they would not be in the names of its "
            "blocks; use the text decoder alone"
        )
    types, _ = get_layer_types_and_kwargs(text)
    foreign = sorted(set(types) - {"full_attention"})
    if foreign:
        raise ModelError(
            f"{name} has layers of type {', '.join(foreign)}: expected full_attention in all {len(types)} layers, "
            "whose KV can be cut into blocks; use a DynamicCache for this model"
        )
    ropes = sorted(_rope_types(text.to_dict().get("rope_parameters")) & set(_LENGTH_DEPENDENT))
    if ropes:
        raise ModelError(
            f"{name} has rope_type {', '.join(ropes)}: its keys depend on the length of the whole sequence, so that "
            "the KV of a prefix cannot be reused; use a DynamicCache for this model"
        )


def _rope_types(parameters: object) -> set[str]:
    """Of all layers; parameters may be given per layer type."""
    if not isinstance(parameters, dict):
        return set()
    inner = [_rope_types(value) for value in parameters.values()]
    return {str(parameters.get("rope_type", "default"))}.union(*inner)


def _probe(model: PreTrainedModel) -> CachedShape:
    """Run two prompts that differ in their last token, and look at what was cached."""
    cache = DynamicCache(config=model.config)
    tokens = torch.tensor([[0, 1], [0, 2]], device=model.device)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=True, **{cache_argument(model): cache})
    name = type(model).__name__
    pairs = [
        (layer.keys, layer.values)
        for layer in cache.layers
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
    ]
    if not pairs or len(pairs) != len(cache.layers):
        raise ModelError(f"{name} cached KV in {len(pairs)} of {len(cache.layers)} layers: expected all of them")
    kinds = {(keys.shape[1:], values.shape[1:], keys.dtype, values.dtype) for keys, values in pairs}
    (heads, slots, key_width), (value_heads, *_, value_width), dtype, _ = next(iter(kinds))
    latent = key_width != value_width
    if len(kinds) > 1 or heads != value_heads or slots != tokens.shape[1] or (latent and heads != 1):
        raise ModelError(
            f"{name} caches {sorted(map(str, kinds))} for 2 tokens: expected the same [heads, 2, width] of K and V in "
            "all layers, or one latent and one rope key"
        )
    if str(dtype).removeprefix("torch.") not in DTYPE_BYTES:
        raise ModelError(f"{name} caches {dtype}: expected one of {', '.join(DTYPE_BYTES)}")
    if not all(_is_causal(states) for pair in pairs for states in pair):
        raise ModelError(f"{name} is not causal: the KV of a prefix depends on what follows, and cannot be reused")
    return CachedShape(heads, key_width, value_width, dtype, tuple(keys.device for keys, _ in pairs))


def _is_causal(states: Tensor) -> bool:
    """Whether the first token's states, [2, heads, 2, width], are the same whatever follows."""
    first, second = states[:, :, 0].float()
    # Two rows of one product may be summed in another order.
    tolerance = max(2 * torch.finfo(states.dtype).eps, _NOISE) * float(first.abs().max())
    return bool(torch.all((first - second).abs() <= tolerance))
