"""Triton kernels over paged KV. Import the modules, not this package: they need Triton (extra `gpu`), it does not.

launch                                how kernels are defined, started and compiled
rows, batch                           what they are given: where KV lies and how it is coded; who attends to what
attend, combine                       device code that the attention kernels share
paged_decode, paged_prefill           attention over K and V, raw or coded
latent_decode                         attention over MLA latents
write_kv                              new KV into a pool, coded on the way
quantized_pool                        a pool of coded blocks
gather                                scattered blocks to and from contiguous memory, one launch
int8_product                          products with int8 weights
block_mass                            how much attention each block got; bounds of its keys
catalog                               everything compiled ahead of time
cases                                 checks and measurements for a real device
"""

from importlib.util import find_spec

__all__ = ["available"]


def available() -> bool:
    """Whether Triton is installed. Says nothing about a device."""
    return find_spec("triton") is not None
