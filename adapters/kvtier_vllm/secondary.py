"""`KVTierSecondaryTier`: kvtier's NVMe and remote tiers below vLLM's own host tier.

For who keeps vLLM's `OffloadingConnector` and wants below its host tier what its own secondary tiers lack: checksums,
limits of capacity, an index that a crash does not harm, several tiers.

    "secondary_tiers": [{"type": "KVTierSecondaryTier", "module_path": "kvtier_vllm.secondary",
                         "nvme": {"path": "/var/cache/kv", "capacity": "64GiB"}}]

vLLM's calls come from its scheduler: they look into indices in memory, or hand work to the threads of an `Exchange`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvtier.config import TieringSettings, load_config
from kvtier.connector.exchange import Exchange
from kvtier.errors import ConfigError
from kvtier.keys import Namespace
from kvtier.store import TieredStore
from kvtier.store.build import open_store
from kvtier_vllm.secondary_names import BlockNames, namespace_of, weights_of

__all__ = ["KVTierSecondaryTier"]

# Room for a prompt of some thousand tokens on its way; what is to be kept for long is vLLM's own host tier.
_STAGING = "256MiB"


@dataclass(slots=True)
class _Missed:
    """Keys that were found for a request and did not arrive: it does not ask for them again, but computes them."""

    keys: set[OffloadKey] = field(default_factory=set)


class _RemoteLookups(AsyncLookupManager):
    """Asks remote tiers in a thread of vLLM's, a step's keys at a time."""

    def __init__(self, tier_type: str, names: BlockNames, exchange: Exchange) -> None:
        self._names = names
        self._exchange = exchange
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._exchange.present_anywhere(self._names.keys(keys))


class KVTierSecondaryTier(SecondaryTierManager):
    """vLLM's secondary tier over a `TieredStore`, of which the host tier is staging.

    Args:
        offloading_spec, primary_kv_view, tier_type, backpressure_detector: vLLM's.
        locality: where the tiers are relative to this process, for vLLM's filters and events: LOCAL or REMOTE.
        model: names the weights; by default a digest of all their bytes, where vLLM loads them from a directory.
        salt: separates users of one store who must not share prefixes, and engines that differ in what vLLM does not
            tell: quantization at load time, overrides of the model's config.
        tiering: the `tiering` section of kvtier's configuration, with `nvme` or `remote`; `host.capacity` is 256 MiB
            by default.

    Raises:
        ConfigError: a bad setting, no tier below host, or a model that must be named.
        CapacityError: a tier is too small.
        TierUnavailable: a tier cannot be opened.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        locality: str | None = None,
        model: str | None = None,
        salt: str = "",
        **tiering: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        settings = _settings(tiering)
        self._names = BlockNames(_namespace(offloading_spec, self.block_size_bytes, model, salt))
        self.store = _opened(settings, self.block_size_bytes)
        try:
            self._exchange = Exchange(self.store, primary_kv_view)
        except BaseException:
            self.store.close()
            raise
        remote = self.store.has_remote
        self._remote = _RemoteLookups(tier_type, self._names, self._exchange) if remote else None
        self._jobs: dict[int, TransferJob] = {}

    # ---- looking up

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT, MISS, or RETRY while a remote tier is asked."""
        missed = req_context.get_state(_Missed)
        if missed is not None and key in missed.keys:
            return LookupResult.MISS
        if self._exchange.present(self._names.keys([key])[0]):
            return LookupResult.HIT
        if self._remote is None:
            return LookupResult.MISS
        found = self._remote.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Blocks as they are computed will do: what is there already is not written twice."""
        req_context.set_state(_Missed())
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what was asked for it."""
        if self._remote is not None:
            self._remote.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send the step's remote look-ups on their way."""
        if self._remote is not None:
            self._remote.flush()

    # ---- moving

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Write rows of vLLM's host tier down."""
        self._jobs[job_metadata.job_id] = job_metadata
        refs = self._names.refs(job_metadata.keys)
        self._exchange.save(job_metadata.job_id, refs, job_metadata.chunk_ids.tolist())

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Fill rows of vLLM's host tier."""
        self._jobs[job_metadata.job_id] = job_metadata
        keys = self._names.keys(job_metadata.keys)
        self._exchange.load(job_metadata.job_id, keys, job_metadata.chunk_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended; what a load did not bring is a miss for its request from now on."""
        return [self._result(*moved) for moved in self._exchange.finished()]

    def _result(self, number: int, good: tuple[bool, ...], nbytes: int, seconds: float) -> JobResult:
        job = self._jobs.pop(number)
        if not job.is_promotion:
            return JobResult(number, all(good), None, seconds, nbytes)
        arrived = tuple(key for key, came in zip(job.keys, good, strict=True) if came)
        missed = job.req_context.get_state(_Missed)
        if missed is not None:
            missed.keys.update(set(job.keys).difference(arrived))
        return JobResult(number, all(good), arrived or None, seconds, nbytes)

    def drain_jobs(self) -> None:
        """Wait until nothing touches vLLM's host tier."""
        self._exchange.drain()

    def shutdown(self) -> None:
        """Finish what is under way, write what waits, close the tiers. Idempotent."""
        if self._remote is not None:
            self._remote.shutdown()
            self._remote = None
        self._exchange.close()
        self.store.close()


def _settings(tiering: dict[str, Any]) -> TieringSettings:
    host = tiering.get("host", {})
    overrides = tiering if host is None else {**tiering, "host": {"capacity": _STAGING, **host}}
    settings = load_config({"tiering": overrides}).config.tiering
    lower = {"nvme": settings.nvme, "remote": settings.remote}
    if not any(lower.values()):
        raise ConfigError(
            'no tier below host is configured: give "nvme": {"path": …} or "remote": {"url": …} in the configuration '
            "of this secondary tier"
        )
    for name, tier in {"host": settings.host, **lower}.items():
        if tier is not None and tier.format != "raw":
            raise ConfigError(
                f"tiering.{name}.format = {tier.format!r}: vLLM's host tier hands over bytes and does not say what "
                "they are; expected raw. `KVTierConnector` takes other formats"
            )
    return settings


def _opened(settings: TieringSettings, block_bytes: int) -> TieredStore:
    store = open_store(settings, block_bytes=block_bytes)
    if store is None:
        raise ConfigError("tiering.host = none: the tiers below need it as staging; remove the setting")
    runs = [tier.caps.run for tier in store.lower if tier.caps.run > 1]
    if runs:
        store.close()
        raise ConfigError(
            f"tiering.remote: {runs[0]} blocks per object: vLLM does not tell a secondary tier which blocks follow one "
            'another; set remote.options = "run=1"'
        )
    return store


def _namespace(spec: OffloadingSpec, block_bytes: int, model: str | None, salt: str) -> Namespace:
    """What the bytes of a row of vLLM's host tier depend on, as far as vLLM tells a secondary tier."""
    config = spec.config
    parallel = config.parallel
    facts = {
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "platform": current_platform.device_type,
        # vLLM's CPU kernels pack K for the instructions that they use.
        "amx": torch.cpu._is_amx_tile_supported(),  # noqa: SLF001  as vLLM asks
        "bytes": block_bytes,
        "dtype": config.model.dtype,
        "hashed": config.cache.tokens_per_hash,
        "blocks": config.cache.blocks_per_chunk,
        "groups": [[group.group_id, group.tokens_per_block, group.layer_names] for group in config.groups],
        "parallel": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, parallel.world_size],
        "layout": [config.kv_cache_layout, config.canonical_layout, config.replicated_layout],
    }
    return namespace_of(model or weights_of(config.model.name), facts, salt)
