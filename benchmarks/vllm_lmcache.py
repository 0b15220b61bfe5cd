"""LMCache 0.5.6 in vLLM on a CPU, with copies of our own: as shipped it finds no connector there and caches nothing.

What is measured with it is LMCache's engine, look-up and backends, plus these copies; not LMCache as its users run it.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

__all__ = ["CpuLMCacheConnector"]


class CpuLMCacheConnector(LMCacheConnectorV1):
    """LMCache's connector, unchanged but for the copies.

    Attributes:
        copies: `vllm_lmcache_copies.CpuConnector`, of all instances.
    """

    copies: Any = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        # Not before: vLLM looks into every loaded module when it prepares its worker, and stumbles over LMCache's.
        from vllm_lmcache_copies import install  # noqa: PLC0415

        if CpuLMCacheConnector.copies is None:
            CpuLMCacheConnector.copies = install(vllm_config.cache_config.block_size)
        super().__init__(vllm_config, role, kv_cache_config)
