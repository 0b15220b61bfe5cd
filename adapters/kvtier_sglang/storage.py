"""KVTierStorage: what SGLang's `StorageBackendFactory` builds for `--hicache-storage-backend dynamic`.

    construction -> settings are checked    register_mem_pool_host -> tiers are opened    get, set, ... -> `PageStore`

Both interfaces reach the same records: flat pages (`batch_get`, `batch_set`), and pages of the host pool where they lie
(`batch_get_v1`, `batch_set_v1`), which SGLang uses where the extra config says `"interface_v1": 1`. Models with pools
beside that of K and V are refused.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolName

from kvtier.errors import ConfigError, TierUnavailable
from kvtier_sglang.geometry import HostPool, geometry_of
from kvtier_sglang.pages import Moved, PageStore
from kvtier_sglang.settings import read_settings

__all__ = ["KVTierStorage"]


class KVTierStorage(HiCacheStorage):
    """SGLang's pages on kvtier's tiers. Thread-safe once the host pool is registered.

    Args:
        storage_config: of this rank; its `extra_config` is kvtier's `tiering` section (see `read_settings`).
        kwargs: of the factory; nothing in it is of use.

    Raises:
        ConfigError: see `read_settings`.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        del kwargs
        self._config = storage_config
        self._settings = read_settings(storage_config.extra_config)
        self._pages: PageStore | None = None

    # ---- the host pool

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Open the tiers for the pages of this pool.

        Raises:
            KVTierError: the pool cannot be stored, or a tier cannot be opened: SGLang does not start then.
        """
        geometry = geometry_of(mem_pool_host, self._config, self._settings.salt)
        self.close()
        super().register_mem_pool_host(mem_pool_host)
        self._pages = PageStore.open(self._settings, geometry, writer=self._config.is_storage_writer)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take note of the pool of K and V, which is registered already.

        Raises:
            ConfigError: the model has other pools (sliding windows, states, indexers, drafts), which are not stored.
        """
        if host_pool_name != PoolName.KV:
            raise ConfigError(
                f"host pool {str(host_pool_name)!r} of {self._config.model_name}: kvtier stores models whose only pool "
                "is that of K and V; start SGLang without --hicache-storage-backend for this one"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    @property
    def pages(self) -> PageStore:
        """Where the pages are.

        Raises:
            TierUnavailable: no host pool was registered yet.
        """
        if self._pages is None:
            raise TierUnavailable("no host pool is registered: call register_mem_pool_host before anything is stored")
        return self._pages

    # ---- pages where they lie

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fill pages of the host pool; which of them arrived."""
        return self.pages.load(keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the host pool; which of them are stored."""
        return self.pages.save(keys, host_indices)

    # ---- flat pages

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """The page, in the tensor that was given or in a new one; None: it is not there."""
        return self.batch_get([key], [self._new() if target_location is None else target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """`get` for a run of pages; from the first one on that is missing, all are None."""
        targets = [self._new() for _ in keys] if target_locations is None else target_locations
        arrived = self.pages.load_flat(keys, targets)
        return [target if good else None for target, good in zip(targets, arrived, strict=True)]

    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store a page; whether it is stored. Without a value nothing is."""
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store a run of pages; whether all of them are stored."""
        return values is not None and all(self.pages.save_flat(keys, values))

    def _new(self) -> torch.Tensor:
        geometry = self.pages.geometry
        dtype = geometry.pool.dtype
        return torch.empty(geometry.page_bytes // dtype.itemsize, dtype=dtype, device="cpu")

    # ---- looking up, and the whole

    def exists(self, key: str) -> bool:
        """Whether the page is in some tier."""
        return self.pages.present([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many leading pages are in some tier."""
        return self.pages.present(keys)

    def clear(self) -> None:
        """Remove the pages of this model, as SGLang has it now, from every tier; raises `BlocksRemain`."""
        self.pages.clear()

    def get_stats(self) -> Any:
        """Batches since the last call, as SGLang's `StorageMetrics`; None where it collects none."""
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics  # noqa: PLC0415  heavy: half of SGLang

        loads, saves = _taken(self.pages.loads), _taken(self.pages.saves)
        return StorageMetrics(
            prefetch_pgs=[one.pages for one in loads],
            backup_pgs=[one.pages for one in saves],
            prefetch_bandwidth=[one.speed for one in loads],
            backup_bandwidth=[one.speed for one in saves],
        )

    def close(self) -> None:
        """Write what waits and close the tiers. Idempotent."""
        if self._pages is not None:
            self._pages.close()


def _taken(log: deque[Moved]) -> list[Moved]:
    return [log.popleft() for _ in range(len(log))]
