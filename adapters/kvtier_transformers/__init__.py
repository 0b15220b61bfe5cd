"""kvtier inside Hugging Face transformers: a cache that begins with what the tiers know of a prompt.

shapes      what a model caches, and which models are refused
identity    weights and numerics: the namespace of a model's blocks
prompts     rows of token ids, padded on the left
blocks      layer tensors <-> bytes of blocks
layers      one layer's keys and values, which may begin with a restored prefix
evidence    that cached KV is that of the tokens it is to be stored under
cache       KVTierCache, open_store
"""

from kvtier_transformers.cache import BLOCK_SIZE, KVTierCache, open_store
from kvtier_transformers.identity import namespace_of, weights_fingerprint
from kvtier_transformers.shapes import CachedShape, cached_shape

__all__ = [
    "BLOCK_SIZE",
    "CachedShape",
    "KVTierCache",
    "cached_shape",
    "namespace_of",
    "open_store",
    "weights_fingerprint",
]
