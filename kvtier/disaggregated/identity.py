"""What an engine of either side is: its identity, and how it names blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from kvtier_engine import namespace_of
from numpy.typing import NDArray

from kvtier.api import AsyncLLM
from kvtier.config import Config, NvmeSettings
from kvtier.connector.parts import Parts
from kvtier.disaggregated.messages import Identity
from kvtier.engine import EngineOptions
from kvtier.engine.core import kv_layout
from kvtier.errors import ConfigError
from kvtier.keys import Chain, salted
from kvtier.layout import Layout
from kvtier.nvme.directory import read_meta
from kvtier.store import TieredStore
from kvtier.tiers import Tier

__all__ = ["Side", "shared_directory"]


@dataclass(frozen=True, slots=True)
class Side:
    """One engine of two that share a directory.

    Args:
        identity: what the other one must be equal to.
        store: this engine's; the tier below host is the shared directory.
        parts: names blocks.
        block_size: tokens per block.
        block_bytes: raw, all parts.
    """

    identity: Identity
    store: TieredStore
    parts: Parts
    block_size: int
    block_bytes: int

    @classmethod
    def of(cls, llm: AsyncLLM) -> Self:
        """The side that an engine is.

        Raises:
            ConfigError: it has no NVMe tier of its own settings, or one that is not written at once.
        """
        nvme = shared_directory(llm.config)
        store = llm.store
        if store is None or not store.lower:
            raise ConfigError("the engine has no tier below host: prefill and decode engines share the one on NVMe")
        meta = read_meta(nvme.path / "META.json")
        if meta is None:
            raise ConfigError(f"tiering.nvme.path = {str(nvme.path)!r}: it was removed while it is in use")
        size = llm.config.engine.block_size
        layout = kv_layout(llm.model, EngineOptions.from_config(llm.config.engine))
        namespace = namespace_of(llm.model, layout)
        identity = Identity(
            namespace.model,
            namespace.layout.hex(),
            namespace.numerics,
            namespace.scheme,
            meta.uuid,
            not store.options.accept_lossy,
        )
        return cls(identity, store, Parts(namespace, len(layout.groups), layout.shards), size, _raw_bytes(layout))

    @property
    def directory(self) -> Tier:
        """The shared one. A remote tier, which may be there too, comes after it."""
        return self.store.lower[0]

    def usable(self, tokens: int) -> int:
        """Blocks of a prompt that a cache may provide: its last token is always computed."""
        return (tokens - 1) // self.block_size

    def keys(self, tokens: Sequence[int] | NDArray[np.uint32], cache_salt: str | None = None) -> list[bytes]:
        """Store keys of a prompt's usable blocks, block-major.

        Args:
            tokens: of the prompt.
            cache_salt: see `SamplingParams.cache_salt`.
        """
        chain = Chain(self.block_size, salted(cache_salt))
        chain.extend(tokens)
        return self.parts.keys(chain.keys[: self.usable(len(tokens))])


def shared_directory(config: Config) -> NvmeSettings:
    """The settings of the directory in which KV is handed over.

    Raises:
        ConfigError: there is none, or blocks are not written to it at once.
    """
    nvme = config.tiering.nvme
    if nvme is None:
        raise ConfigError(
            "tiering.nvme is off: prefill and decode engines hand KV over in a directory; set tiering.nvme.path"
        )
    if nvme.write != "through" or nvme.write_budget is not None:
        raise ConfigError(
            f"tiering.nvme.write = {nvme.write!r}, write_budget = {nvme.write_budget}: KV is handed over as it is "
            f"computed; use 'through', without a budget"
        )
    return nvme


def _raw_bytes(layout: Layout) -> int:
    return layout.shards * sum(layout.block_bytes(group) for group in range(len(layout.groups)))
