"""TieredStore: one block store over several tiers. The only room that knows more than one of them."""

from kvtier.store.build import open_store
from kvtier.store.lease import Lease
from kvtier.store.options import StoreOptions
from kvtier.store.prefetching import Prefetch
from kvtier.store.private import PrivateObject
from kvtier.store.putting import Received
from kvtier.store.results import Located, PrefetchResult, PutOutcome, PutResult, StoreMatch
from kvtier.store.tiered import TieredStore

__all__ = [
    "Lease",
    "Located",
    "Prefetch",
    "PrefetchResult",
    "PrivateObject",
    "PutOutcome",
    "PutResult",
    "Received",
    "StoreMatch",
    "StoreOptions",
    "TieredStore",
    "open_store",
]
