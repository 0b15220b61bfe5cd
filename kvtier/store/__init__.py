"""TieredStore: one block store over several tiers. The only room that knows more than one of them."""

from kvtier.store.build import open_store
from kvtier.store.tiered import Lease, PutResult, StoreMatch, TieredStore

__all__ = ["Lease", "PutResult", "StoreMatch", "TieredStore", "open_store"]
