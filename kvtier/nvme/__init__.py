"""The NVMe tier: an LMDB index over O_DIRECT segment files in a directory that processes share."""

from kvtier.nvme.opening import NvmeOptions
from kvtier.nvme.tier import NvmeTier

__all__ = ["NvmeOptions", "NvmeTier"]
