"""From the `tiering` section of the configuration to an open store."""

from kvtier.config import NvmeSettings, TieringSettings
from kvtier.cpu import HostTier
from kvtier.errors import CapacityError
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.store.tiered import TieredStore

__all__ = ["open_store"]

# A quarter of host may wait for NVMe: enough to ride out a slow disk, never enough to starve the cache.
_WRITEBACK_SHARE = 4


def open_store(
    settings: TieringSettings, *, block_bytes: int = 1, metrics: Metrics | None = None
) -> TieredStore | None:
    """Open the configured tiers.

    Args:
        settings: which tiers, where and how large.
        block_bytes: the largest block that every tier must be able to hold.
        metrics: shared by the store and its tiers.

    Returns:
        The store, or None where tiering is off (`host` is None).

    Raises:
        CapacityError: a tier is too small, or too large for this machine.
        TierUnavailable: the NVMe directory cannot be opened.
    """
    if settings.host is None:
        return None
    _check_capacities(settings, block_bytes)
    metrics = metrics or Metrics()
    host = HostTier(settings.host.capacity, metrics=metrics)
    try:
        lower = [] if settings.nvme is None else [_open_nvme(settings.nvme, metrics)]
    except BaseException:
        host.close()
        raise
    return TieredStore(
        host,
        lower,
        metrics=metrics,
        writeback_bytes=settings.host.capacity // _WRITEBACK_SHARE,
        accept_lossy=settings.accept_lossy,
    )


def _check_capacities(settings: TieringSettings, block_bytes: int) -> None:
    # Before anything is opened: a directory that can never hold a block is not even made.
    for name, tier in (("host", settings.host), ("nvme", settings.nvme)):
        if tier is not None and tier.capacity < block_bytes:
            raise CapacityError(
                f"tiering.{name}.capacity = {tier.capacity} bytes: one KV block of this model has {block_bytes}; "
                f"give the tier at least that much, or switch it off"
            )


def _open_nvme(settings: NvmeSettings, metrics: Metrics) -> NvmeTier:
    options = NvmeOptions(
        segment_bytes=settings.segment_size,
        io_threads=settings.io_threads,
        min_free_bytes=settings.min_free,
        durable=settings.durable,
    )
    return NvmeTier(settings.path, settings.capacity, options, metrics=metrics)
