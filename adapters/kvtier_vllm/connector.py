"""KVTierConnector: kvtier's tiers behind vLLM's KV connector interface, both sides of it.

vLLM builds the class twice: beside its scheduler, and in each worker, where it is built first. They meet in two ways:
each worker introduces itself by handshake metadata, from which the scheduler's side makes layout and namespace, and
opens the tiers; and the workers map its memory, which they are given over a socket (`kvtier.connector.sharing`).
"""

import platform
import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
import vllm
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.errors import ConfigError
from kvtier.events import EventLog
from kvtier.layout import DTYPE_BYTES
from kvtier_vllm.identity import Pool, layout_of, namespace_of
from kvtier_vllm.messages import Introduction, StepReport, StepWork
from kvtier_vllm.scheduler import SchedulerSide
from kvtier_vllm.settings import Settings, read_settings
from kvtier_vllm.stats import KVTierProm, KVTierStats
from kvtier_vllm.versions import check_version
from kvtier_vllm.worker import WorkerSide, pages_of

__all__ = ["KVTierConnector"]

_SOURCES = {"host": CacheHitSource.HOST, "nvme": CacheHitSource.DISK}


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """See vLLM's `KVConnectorBase_V1`; only what is particular to this one is said below."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        version = check_version(vllm.__version__, KVConnectorBase_V1, KVCacheManager)
        transfer = vllm_config.kv_transfer_config
        self._settings: Settings = read_settings(transfer.kv_connector_extra_config, transfer.kv_load_failure_policy)
        _check_parallel(vllm_config.parallel_config)
        self._version = ".".join(map(str, version))
        self._name: str = transfer.engine_id
        self._group = _only_group(kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._pool: Pool | None = None

    def _layout(self, pools: dict[tuple[int, int], Pool]) -> Any:
        engine = f"vllm-{current_platform.device_type}/{self._version}"
        return layout_of(pools, self._group.kv_cache_spec.block_size, engine)

    # ---- both sides

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that was not stored is a miss, no more."""
        return False

    def get_handshake_metadata(self) -> Introduction | None:
        """The device pool, as the worker found it."""
        return None if self._pool is None else Introduction(self._pool)

    def shutdown(self) -> None:
        """End the copies, write what is on its way down, close the tiers."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the blocks in the tensors of all layers, and what kernel wrote them."""
        layers = [name for name in self._group.layer_names if name in kv_caches]
        tensors = [kv_caches[name] for name in layers]
        pages = pages_of(tensors, self._kv_cache_config.num_blocks)
        backends = {backend.get_name() for backend in get_current_attn_backends(self._vllm_config, layers)}
        kernel = "+".join((*sorted(backends), _machine(pages.device), str(self._kv_cache_config.kv_cache_layout)))
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        self._pool = Pool(tuple(pages.sizes), dtype if dtype in DTYPE_BYTES else "int8", kernel)
        pipeline, tensor = get_pp_group(), get_tp_group()
        ranks = [(stage, rank) for stage in range(pipeline.world_size) for rank in range(tensor.world_size)]
        shard = ranks.index((pipeline.rank_in_group, tensor.rank_in_group))
        self._worker = WorkerSide(self._name, pages, self._layout(dict.fromkeys(ranks, self._pool)), shard)

    @property
    def _works(self) -> WorkerSide:
        if self._worker is None:
            raise ConfigError("vLLM gave this worker no KV cache; kvtier has nothing to work with")
        return self._worker

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before anything of this step is written."""
        self._works.before(_work(kv_connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """All loads of the step; those that it reads have arrived when the forward begins."""
        self._works.load(_work(self._get_connector_metadata()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is left to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved with all their layers, after the forward."""

    def wait_for_save(self) -> None:
        """All saves of the step."""
        self._works.save(_work(self._get_connector_metadata()))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Loads that ended. Saves hold no blocks."""
        return None, self._works.poll() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not get what was promised."""
        return self._works.take_invalid()

    def build_connector_worker_meta(self) -> StepReport | None:
        """What ended, for the scheduler's side."""
        return self._works.report()

    # ---- scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """All workers have introduced themselves: open the tiers."""
        layout = self._layout({rank: one.pool for rank, one in metadata.items()})
        settings = self._settings
        namespace = namespace_of(self._vllm_config, layout, self._version, model=settings.model, salt=settings.salt)
        budget = self._vllm_config.scheduler_config.max_num_batched_tokens
        wanted = self._vllm_config.kv_events_config
        events = EventLog() if wanted is not None and wanted.enable_kv_cache_events else None
        side = SchedulerSide(self._name, settings, namespace, layout, budget, events)
        side.manager = self._kv_cache_manager
        self._scheduler = side
        # An engine that is not shut down ends with the interpreter: what is on its way down is written then.
        weakref.finalize(self, side.close)

    @property
    def _schedules(self) -> SchedulerSide:
        if self._scheduler is None:
            raise ConfigError(
                "vLLM did not pass on its workers' handshake metadata: kvtier does not know what their KV looks like"
            )
        return self._scheduler

    def on_new_request(self, request: Any) -> None:
        """Take it into the books."""
        self._schedules.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """None until what the tiers have was looked up and, mostly, brought into host."""
        return self._schedules.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks."""
        self._schedules.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:
        """The copies of one step."""
        return self._schedules.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What became of them."""
        report = connector_output.kv_connector_worker_meta
        results = () if report is None else report.results
        self._schedules.completed(results, connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """No blocks are held: those that are being saved are fenced against their reuse."""
        self._schedules.finished(request, block_ids)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`; there is one group."""
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        """Whether saves are waited for."""
        return self._schedules.pending

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """By the tier that had the blocks before they were brought into host."""
        found = self._schedules.sources(request.request_id)
        tokens: dict[CacheHitSource, int] = {}
        for tier, blocks in found.items():
            source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            tokens[source] = tokens.get(source, 0) + blocks * self._group.kv_cache_spec.block_size
        return tokens

    def take_events(self) -> Iterable[Any]:
        """What tiers hold, and hold no more."""
        names = self._schedules.names
        return () if names is None else names.take()

    def get_kv_connector_stats(self) -> KVTierStats | None:
        """The scheduler's side has them all."""
        return None if self._scheduler is None else self._scheduler.stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTierStats | None:
        """From the wire."""
        return KVTierStats() if data is None else KVTierStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVTierProm:
        """For the front end."""
        return KVTierProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool | None:
        """Forget what is stored of this model, in all tiers."""
        return self._schedules.reset()


def _work(metadata: KVConnectorMetadata) -> StepWork:
    return cast("StepWork", metadata)


def _only_group(kv_cache_config: Any) -> Any:
    groups = [kv_cache_config.kv_cache_groups[group] for group in kv_cache_config.prefix_cacheable_group_ids]
    if len(groups) != 1 or len(kv_cache_config.kv_cache_groups) != 1:
        raise ConfigError(
            f"a model with {len(kv_cache_config.kv_cache_groups)} KV cache groups, {len(groups)} of them for prefixes: "
            "kvtier serves models whose layers are of one kind; try --disable-hybrid-kv-cache-manager"
        )
    spec = groups[0].kv_cache_spec
    specs = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    if not all(isinstance(one, AttentionSpec) for one in specs):
        raise ConfigError(f"KV cache of kind {type(specs[0]).__name__}: kvtier keeps the KV of attention only")
    return groups[0]


def _check_parallel(parallel: Any) -> None:
    contexts = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    if contexts > 1 or parallel.nnodes > 1:
        raise ConfigError(
            f"{contexts} context parallel ranks on {parallel.nnodes} nodes: kvtier needs every worker on one machine, "
            "and whole blocks in each; use tensor or pipeline parallelism within one node"
        )


def _machine(device: torch.device) -> str:
    if device.type != "cpu":
        return device.type
    # Kernels for tiles pack keys in another way than those for vectors.
    tiles = torch.cpu.get_capabilities().get("amx_tile", False)
    return f"{platform.machine()}{'-amx' if tiles else ''}"
