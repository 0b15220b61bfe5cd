"""What makes one model's KV another's: weights and numerics, and thus the namespace of its blocks."""

import hashlib
import json
from weakref import WeakKeyDictionary

import torch
import transformers
import xxhash
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from kvtier.errors import ModelError
from kvtier.keys import Namespace
from kvtier.layout import Layout

__all__ = ["namespace_of", "weights_fingerprint"]

# Where a configuration comes from; it changes no value.
_ORIGIN = ("_name_or_path", "architectures", "dtype", "id2label", "label2id", "transformers_version")

# The storage itself, since another one may come to lie at its address.
_Stamp = tuple[tuple[str, StorageWeakRef, int, int], ...]
_fingerprints: "WeakKeyDictionary[PreTrainedModel, tuple[_Stamp, str]]" = WeakKeyDictionary()


def namespace_of(model: PreTrainedModel, layout: Layout, fingerprint: str | None = None, salt: str = "") -> Namespace:
    """What must match for this model's KV to be reusable.

    Numerics are the whole configuration (rope, norms, experts), the implementation of attention and the version of
    transformers: another release may arrange a head otherwise, in the same shape. The dtype is in the layout.

    Args:
        model: its weights are hashed once, unless the caller names them.
        layout: shape and dtype of the blocks.
        fingerprint: the caller's own name of these weights, adapters included; he answers for it.
        salt: separates users who must not share prefixes.

    Raises:
        ModelError: see `weights_fingerprint`.
    """
    name = weights_fingerprint(model) if fingerprint is None else f"caller:{fingerprint}"
    return Namespace(name, layout.fingerprint, _numerics(model), salt=salt)


def weights_fingerprint(model: PreTrainedModel) -> str:
    """32 hex digits that change whenever a weight, name, shape or dtype does.

    Frequencies of RoPE and the like count among them: another dtype of theirs makes other keys of the same weights.
    Reads every byte once per model (xxh3_128 per tensor, sha256 over the list) and again after a tensor was replaced or
    written in place; each time where torch keeps no count of that, in models made under `torch.inference_mode`. Writes
    through `Tensor.data` are not noticed by torch, nor here.

    Raises:
        ModelError: weights that are elsewhere, or adapters that can be switched without a trace in the weights.
    """
    tensors = _tensors(model)
    _check_weights(model, tensors)
    if any(tensor.is_inference() for tensor in tensors.values()):
        return _digest(tensors)
    stamp = tuple(
        (name, _storage(tensor), tensor.data_ptr(), tensor._version)  # noqa: SLF001  # torch's documented name for it
        for name, tensor in tensors.items()
    )
    known = _fingerprints.get(model)
    if known is None or known[0] != stamp:
        known = _fingerprints[model] = (stamp, _digest(tensors))
    return known[1]


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """All that a model computes with. Tables that are derived from other values, and grow as they are used, are not."""
    kept = model.state_dict(keep_vars=True)
    vectors = {name: buffer for name, buffer in model.named_buffers() if buffer.ndim <= 1}
    return {**vectors, **kept}


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(b"kvtier.transformers.weights.2\0")
    for name in sorted(tensors):
        digest.update(f"{name}\0{_content(tensors[name])}\0".encode())
    return digest.hexdigest()[:32]


def _check_weights(model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    away = [name for name, tensor in tensors.items() if tensor.is_meta]
    if away:
        raise ModelError(f"{len(away)} weights are not in memory ({away[0]}): name the weights by fingerprint=")
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise ModelError(
            "the model carries PEFT adapters, which can be switched on and off without a trace in its weights: merge "
            "them, or name the state that is on by fingerprint="
        )


def _content(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype}{list(tensor.shape)}{xxhash.xxh3_128_hexdigest(data.data)}"


def _numerics(model: PreTrainedModel) -> str:
    config = model.config
    values = {name: value for name, value in config.to_dict().items() if name not in _ORIGIN}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:32]
    attention = config._attn_implementation  # noqa: SLF001  # it has no other name
    return f"transformers={transformers.__version__};attention={attention};config={digest}"
