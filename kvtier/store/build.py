"""From the `tiering` section of the configuration to an open store."""

import time
from collections.abc import Callable

from kvtier import formats
from kvtier.config import HostSettings, NvmeSettings, TieringSettings
from kvtier.cpu import HostTier
from kvtier.errors import CapacityError, ConfigError, FormatMismatch
from kvtier.events import EventLog
from kvtier.layout import Layout
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.policies import make_admission, make_policy, make_prefetch
from kvtier.remote import RemoteTier, open_remote
from kvtier.store.options import StoreOptions
from kvtier.store.tiered import TieredStore

__all__ = ["open_store"]

# A quarter of host may wait for NVMe: enough to ride out a slow disk, never enough to starve the cache.
_WRITEBACK_SHARE = 4
# Sessions' keys, 150 to 900 bytes each: of as many blocks as there may be, if none is smaller than this, within bounds.
_SMALL_BLOCK = 16 << 10
_FEWEST_KEYS, _MOST_KEYS = 1 << 14, 1 << 20


def open_store(
    settings: TieringSettings,
    *,
    block_bytes: int = 1,
    host_limit: int | None = None,
    layout: Layout | None = None,
    metrics: Metrics | None = None,
    events: EventLog | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TieredStore | None:
    """Open the configured tiers.

    Args:
        settings: which tiers, where, how large, and how they are used.
        block_bytes: the largest block that every tier must be able to hold.
        host_limit: how far host can be resized at run time, where that is more than its capacity.
        layout: of the blocks that will come, so that a format that cannot take them is refused now.
        metrics: shared by the store and its tiers.
        events: told what host and NVMe hold, as it changes.
        clock: seconds, for policies and the store.

    Returns:
        The store, or None where tiering is off (`host` is None).

    Raises:
        CapacityError: a tier is too small, or too large for this machine.
        ConfigError: an unknown policy or format, or one that makes no sense where it is.
        TierUnavailable: the NVMe directory cannot be opened, or the remote store refuses.
    """
    if settings.host is None:
        return None
    # Before anything is opened: a directory that can never hold a block is not even made.
    _check_capacities(settings, block_bytes)
    _check_formats(settings, layout)
    metrics = metrics or Metrics()
    policy = make_policy(settings.host.policy, max(settings.host.capacity // block_bytes, 1), clock)
    limit = max(settings.host.capacity, host_limit or 0)
    host = HostTier(settings.host.capacity, policy=policy, metrics=metrics, events=events, limit_bytes=limit)
    lower: list[NvmeTier | RemoteTier] = []
    try:
        if settings.nvme is not None:
            lower.append(_open_nvme(settings.nvme, metrics, events))
        if settings.remote is not None:
            lower.append(open_remote(settings.remote, metrics))
        options = _options(settings, settings.host, limit)
        return TieredStore(host, lower, metrics=metrics, options=options, events=events, clock=clock)
    except BaseException:
        for tier in lower:
            tier.close()
        host.close()
        raise


def _options(settings: TieringSettings, host: HostSettings, limit: int) -> StoreOptions:
    nvme, remote = settings.nvme, settings.remote
    lower = {"nvme": nvme, "remote": remote}
    local = limit + (0 if nvme is None else nvme.capacity)
    rules = [tier.write for tier in (nvme, remote) if tier is not None and tier.write is not None]
    return StoreOptions(
        accept_lossy=settings.accept_lossy,
        formats={"host": host.format} | {name: tier.format for name, tier in lower.items() if tier is not None},
        writeback_bytes=max(host.capacity // _WRITEBACK_SHARE, 1),
        write_rule=rules[0] if rules else "through",
        write_budget=None if nvme is None else nvme.write_budget,
        load_deadline=settings.load_deadline,
        session_keys=_MOST_KEYS if remote else min(max(local // _SMALL_BLOCK, _FEWEST_KEYS), _MOST_KEYS),
        admission=make_admission(settings.admission),
        prefetch=make_prefetch(settings.prefetch),
    )


def _check_capacities(settings: TieringSettings, block_bytes: int) -> None:
    for name, tier in (("host", settings.host), ("nvme", settings.nvme)):
        if tier is not None and tier.capacity < block_bytes:
            raise CapacityError(
                f"tiering.{name}.capacity = {tier.capacity} bytes: one KV block of this model has {block_bytes}; "
                f"give the tier at least that much, or switch it off"
            )


def _check_formats(settings: TieringSettings, layout: Layout | None) -> None:
    for name, tier in (("host", settings.host), ("nvme", settings.nvme), ("remote", settings.remote)):
        if tier is not None and not formats.get(tier.format).exact and not settings.accept_lossy:
            raise ConfigError(
                f"tiering.{name}.format = {tier.format!r} is lossy: nothing stored in it would ever be reused; "
                "set tiering.accept_lossy = true (outputs may differ), or choose raw or bitsplit"
            )
        if tier is not None and layout is not None:
            _check_layout(name, tier.format, layout)
    if settings.host is not None and settings.host.format == "bitsplit":
        raise _variable("bitsplit")


def _check_layout(tier: str, format_id: str, layout: Layout) -> None:
    for group in range(len(layout.groups)):
        try:
            size = formats.get(format_id).size(layout, group)
        except FormatMismatch as error:
            raise ConfigError(f"tiering.{tier}.format = {format_id!r} cannot take this model's KV: {error}") from error
        if size is None and tier == "host":
            raise _variable(format_id)


def _variable(format_id: str) -> ConfigError:
    return ConfigError(
        f"tiering.host.format = {format_id!r}: its blocks differ in size, and host takes fixed sizes only; "
        "use it in tiering.nvme.format or tiering.remote.format"
    )


def _open_nvme(settings: NvmeSettings, metrics: Metrics, events: EventLog | None) -> NvmeTier:
    options = NvmeOptions(
        segment_bytes=settings.segment_size,
        io_threads=settings.io_threads,
        min_free_bytes=settings.min_free,
        durable=settings.durable,
    )
    return NvmeTier(settings.path, settings.capacity, options, metrics=metrics, events=events)
