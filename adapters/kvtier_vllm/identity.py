"""What vLLM's KV is compatible with: weights, numerics, and pages whose inside is the attention kernel's own affair."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.connector.checkpoint import fingerprint
from kvtier.errors import ConfigError, ModelError
from kvtier.keys import Namespace
from kvtier.layout import DTYPE_BYTES, GroupKind, LayerGroup, Layout

__all__ = ["Pool", "layout_of", "model_fingerprint", "namespace_of"]

# Of a config: what says who wrote it, and nothing about the model.
_UNRELATED = ("_name_or_path", "transformers_version")
# Rotations that depend on how long a context is allowed.
_BY_LENGTH = ("longrope", "dynamic")


@dataclass(frozen=True, slots=True)
class Pool:
    """What a worker says of the KV memory that it was given.

    Args:
        pages: bytes of one block's page in each layer; layers that share memory count once.
        dtype: of elements, a key of `DTYPE_BYTES`.
        kernel: what decides where in a page a value lies: backend, instruction set, arrangement of the tensors.
    """

    pages: tuple[int, ...]
    dtype: str
    kernel: str


def layout_of(pools: Mapping[tuple[int, int], Pool], block_size: int, engine: str) -> Layout:
    """The layout of blocks, each with a part per worker.

    Args:
        pools: of all workers, by (pipeline rank, tensor rank).
        block_size: tokens per block.
        engine: name and version, where bytes depend on it.

    Raises:
        ConfigError: workers whose parts differ.
    """
    first = next(iter(pools.values()))
    different = next((rank for rank, pool in pools.items() if pool != first), None)
    if different is not None:
        raise ConfigError(
            f"worker {different} holds {pools[different]}, another one {first}: expected equal parts; split the model "
            "evenly (layers by pipeline_parallel_size)"
        )
    stages, shards = (len({rank[axis] for rank in pools}) for axis in (0, 1))
    order = f"opaque:{engine}/{first.kernel}/pp{stages}tp{shards}"
    return Layout(block_size, (_group(first, block_size, order),), stages * shards)


def _group(pool: Pool, block_size: int, order: str) -> LayerGroup:
    dtype, rows = pool.dtype, block_size * len(pool.pages)
    if len(set(pool.pages)) > 1 or pool.pages[0] % (block_size * DTYPE_BYTES[dtype]):
        # Layers of different sizes, or scales among the values: all of it as one row of bytes for each token.
        dtype, rows = "int8", block_size
    total = sum(pool.pages)
    width, odd = divmod(total, rows * DTYPE_BYTES[dtype])
    if odd:
        raise ConfigError(
            f"blocks of {total} bytes for {block_size} tokens: expected a multiple; use another block_size"
        )
    return LayerGroup(GroupKind.MLA, tuple(range(rows // block_size)), 1, 1, width, dtype=dtype, order=order)


def namespace_of(config: Any, layout: Layout, version: str, *, model: str | None, salt: str) -> Namespace:
    """What must match for KV to be reusable.

    Args:
        config: vLLM's `VllmConfig`.
        layout: of the blocks.
        version: of vLLM, major and minor: kernels may round otherwise in another one.
        model: names the weights instead of their bytes.
        salt: see `Settings`.

    Raises:
        ConfigError: the weights are no files that can be read, and have no name.
    """
    numerics = {
        "vllm": version,
        "dtype": str(config.model_config.dtype),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "quantization": str(config.model_config.quantization),
    }
    draft = config.speculative_config
    if draft is not None:
        # A draft model's layers lie in the same blocks.
        numerics["draft"] = f"{draft.method} {draft.model}"
    return Namespace(
        model_fingerprint(config, model), layout.fingerprint, json.dumps(numerics, sort_keys=True), salt=salt
    )


def model_fingerprint(config: Any, name: str | None) -> str:
    """Names the weights and the config that they run under, equal after a restart. Raises as `namespace_of` does."""
    facts = _config_facts(config.model_config)
    if name is not None or config.load_config.load_format == "dummy":
        # Dummy weights come from the same seed every time.
        return json.dumps([name or "dummy", *facts])
    source = _weights(config.model_config)
    try:
        return fingerprint(source, facts)
    except ModelError as error:
        raise ConfigError(
            f'{error}; give them a name that changes when they do: kv_connector_extra_config {{"model": "<name>"}}'
        ) from error


def _config_facts(model_config: Any) -> list[str]:
    values = {key: value for key, value in model_config.hf_config.to_dict().items() if key not in _UNRELATED}
    text = json.dumps(values, sort_keys=True, default=str)
    limit = str(model_config.max_model_len) if any(kind in text for kind in _BY_LENGTH) else ""
    return [text, limit]


def _weights(model_config: Any) -> Path:
    """Where the weights lie: as given, or where the Hugging Face cache has them."""
    given = Path(str(model_config.model_weights or model_config.model))
    if given.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(given)):
        return given
    from huggingface_hub import snapshot_download  # noqa: PLC0415  # vLLM brings it along

    try:
        return Path(snapshot_download(str(given), revision=model_config.revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {given}: not in the Hugging Face cache: {error}") from error
