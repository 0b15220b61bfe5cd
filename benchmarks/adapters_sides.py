"""What vLLM runs with in benchmarks/adapters.py: how each connector is configured, and what can be seen of it.

Runs in vLLM's environment. Every side counts bytes where they are copied into the device's blocks, by its own means.
"""

import time
from abc import ABC, abstractmethod
from typing import Any

__all__ = ["SIDES", "Side"]

HOST_BYTES = 1 << 30
NVME_BYTES = 4 << 30


class Side(ABC):
    """One connector.

    Args:
        directory: where it keeps blocks.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory

    @abstractmethod
    def config(self) -> dict[str, Any] | None:
        """`kv_transfer_config`."""

    @abstractmethod
    def loaded_bytes(self, core: Any) -> int:
        """Copied into the device's blocks so far."""

    @abstractmethod
    def settle(self, core: Any) -> None:
        """Wait until all that was stored is where it will stay."""

    @abstractmethod
    def forget_host(self, llm: Any) -> None:
        """Empty the device's prefix cache and host memory; what lies below stays."""


class NoConnector(Side):
    """vLLM alone."""

    def config(self) -> dict[str, Any] | None:
        return None

    def loaded_bytes(self, core: Any) -> int:
        return 0

    def settle(self, core: Any) -> None:
        pass

    def forget_host(self, llm: Any) -> None:
        llm.reset_prefix_cache()


class Native(Side):
    """vLLM's own host tier."""

    secondary: tuple[dict[str, Any], ...] = ()

    def config(self) -> dict[str, Any] | None:
        from vllm_native import transfer_config  # noqa: PLC0415  vLLM is imported when its environment is complete

        return transfer_config(HOST_BYTES, *self.secondary)

    def loaded_bytes(self, core: Any) -> int:
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

        return int(get_kv_transfer_group().connector_worker.worker.loaded_bytes)

    def settle(self, core: Any) -> None:
        # Steps until its transfers are over; the device -> host copies of the last step begin with the next one.
        while core.scheduler.has_requests():
            core.step()

    def forget_host(self, llm: Any) -> None:
        llm.reset_prefix_cache(reset_connector=True)


class NativeFs(Native):
    """vLLM's own host tier, and its `fs` tier below."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.secondary = ({"type": "fs", "root_dir": directory},)


class Secondary(Native):
    """vLLM's own host tier, and kvtier's NVMe tier below."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        nvme = {"path": directory, "capacity": NVME_BYTES}
        tier = {"type": "KVTierSecondaryTier", "module_path": "kvtier_vllm.secondary", "nvme": nvme}
        self.secondary = (tier,)

    def forget_host(self, llm: Any) -> None:
        super().forget_host(llm)
        (tier,) = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.manager.secondary_tiers
        tier.store.clear("host")


class KVTier(Side):
    """kvtier's connector: host and NVMe."""

    def config(self) -> dict[str, Any] | None:
        extra = {
            "host": {"capacity": HOST_BYTES},
            "nvme": {"path": self.directory, "capacity": NVME_BYTES},
        }
        return {
            "kv_connector": "KVTierConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }

    def loaded_bytes(self, core: Any) -> int:
        metrics = self._store(core).metrics
        return int(sum(metrics.value("loaded_bytes_total", tier=tier) for tier in ("host", "nvme")))

    def settle(self, core: Any) -> None:
        while core.scheduler.has_requests():
            core.step()
        self._store(core).settle()

    def forget_host(self, llm: Any) -> None:
        llm.reset_prefix_cache()
        self._store(llm.llm_engine.engine_core.engine_core).clear("host")

    @staticmethod
    def _store(core: Any) -> Any:
        return core.scheduler.connector._scheduler.store  # noqa: SLF001  what the measured process may see


class LMCache(Side):
    """LMCache's connector with our copies: CPU memory and local disk."""

    chunk = 256

    def config(self) -> dict[str, Any] | None:
        extra = {
            "lmcache.chunk_size": self.chunk,
            "lmcache.local_cpu": True,
            "lmcache.max_local_cpu_size": HOST_BYTES / 2**30,
            "lmcache.local_disk": f"file://{self.directory}/",
            "lmcache.max_local_disk_size": NVME_BYTES / 2**30,
        }
        return {
            "kv_connector": "CpuLMCacheConnector",
            "kv_connector_module_path": "vllm_lmcache",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def loaded_bytes(self, core: Any) -> int:
        return int(core.scheduler.connector.copies.loaded_bytes)

    def settle(self, core: Any) -> None:
        while core.scheduler.has_requests():
            core.step()
        disk = self._engine().storage_manager.storage_backends["LocalDiskBackend"]
        while disk.disk_worker.put_tasks:
            time.sleep(1e-3)

    def forget_host(self, llm: Any) -> None:
        llm.reset_prefix_cache()
        self._engine().clear(locations=["LocalCPUBackend"])

    @staticmethod
    def _engine() -> Any:
        from lmcache.integration.vllm.utils import ENGINE_NAME  # noqa: PLC0415
        from lmcache.v1.cache_engine import LMCacheEngineBuilder  # noqa: PLC0415

        return LMCacheEngineBuilder.get(ENGINE_NAME)


class LMCacheFine(LMCache):
    """The same with chunks of one block, so that as much is found again as by the others."""

    chunk = 32


SIDES: dict[str, type[Side]] = {
    "none": NoConnector,
    "native": Native,
    "native_fs": NativeFs,
    "secondary": Secondary,
    "kvtier": KVTier,
    "lmcache": LMCache,
    "lmcache_fine": LMCacheFine,
}
