"""kvtier inside SGLang: tiers below its host cache, as a HiCache storage backend.

--enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
"backend_name": "kvtier", "module_path": "kvtier_sglang", "class_name": "KVTierStorage", "interface_v1": 1,
"nvme": {"path": "/var/cache/kvtier"}}'

storage   what SGLang's factory builds: its interface, in its types
pages     pages in and out of a `TieredStore`, for one rank
geometry  what a page of a host pool is: its layout, its namespace, where its bytes lie
settings  SGLang's extra config -> kvtier's `tiering` section
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_sglang.storage import KVTierStorage as KVTierStorage

__all__ = ["KVTierStorage"]


def __getattr__(name: str) -> Any:
    # The package imports without SGLang; its storage class does not.
    if name not in __all__:
        raise AttributeError(f"module 'kvtier_sglang' has no attribute {name!r}")
    return getattr(import_module("kvtier_sglang.storage"), name)
