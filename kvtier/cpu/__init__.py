"""The host tier: blocks in shared, optionally pinned memory of this machine."""

from kvtier.attach import AttachedRegion, recv_regions, send_regions
from kvtier.cpu.slab import HostSlab
from kvtier.cpu.staging import StagingRegion
from kvtier.cpu.tier import HostTier
from kvtier.tiers import RegionShare

__all__ = [
    "AttachedRegion",
    "HostSlab",
    "HostTier",
    "RegionShare",
    "StagingRegion",
    "recv_regions",
    "send_regions",
]
