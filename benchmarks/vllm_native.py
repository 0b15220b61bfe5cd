"""vLLM's native offloading on a CPU: the two specs that vLLM ships refuse to copy anywhere but to and from a GPU.

They are named from outside (`spec_name`, `spec_module_path`), and replace nothing but the copies: scheduling, the host
tier, its secondary tiers and their threads are vLLM's own. The copies are whole pages, one index operation a layer.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["CpuHostSpec", "CpuTieringSpec", "CpuWorker", "transfer_config"]


class CpuWorker(OffloadingWorker):
    """Copies pages between the device's tensors and the host's before it returns.

    Args:
        kv_caches: vLLM's tensors, [blocks, page bytes] each.
        host: tensors of the host tier, [chunks, page bytes] each, in the same order; one block is one chunk.
        region: what they lie in, let go of at the end.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, host: list[torch.Tensor], region: SharedOffloadRegion | None
    ) -> None:
        self._device = [each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in kv_caches.tensors]
        self._host = host
        self._region = region
        self._block_bytes = sum(each.page_size_bytes for each in kv_caches.tensors)
        self._finished: list[TransferResult] = []
        self.stored_bytes = 0
        self.loaded_bytes = 0

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: LoadStoreSpec) -> bool:
        """Device -> host."""
        self.stored_bytes += self._copy(job_id, self._device, src_spec, self._host, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: Any) -> bool:
        """Host -> device."""
        self.loaded_bytes += self._copy(job_id, self._host, src_spec, self._device, dst_spec)
        return True

    def _copy(
        self, job: int, sources: list[torch.Tensor], source: Any, targets: list[torch.Tensor], target: Any
    ) -> int:
        began = time.perf_counter()
        rows = torch.from_numpy(source.block_ids.astype(np.int64))
        places = torch.from_numpy(target.block_ids.astype(np.int64))
        for ours, theirs in zip(sources, targets, strict=True):
            theirs[places] = ours[rows]
        nbytes = len(rows) * self._block_bytes
        self._finished.append(TransferResult(job, True, nbytes, time.perf_counter() - began))
        return nbytes

    def get_finished(self) -> list[TransferResult]:
        """What was copied since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        """Let go of the host's memory."""
        self._host.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None


class CpuHostSpec(CPUOffloadingSpec):
    """vLLM's host tier alone."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """One block a chunk; the host's tensors are this worker's own."""
        if self._worker is None:
            host = [torch.zeros(self.num_chunks, t.page_size_bytes, dtype=torch.int8) for t in kv_caches.tensors]
            self._worker = CpuWorker(kv_caches, host, None)
        return self._worker


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's host tier with its secondary tiers below it."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The host's tensors lie in the region that secondary tiers see."""
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            host = [region.create_next_worker_view(t.page_size_bytes) for t in kv_caches.tensors]
            self._worker = CpuWorker(kv_caches, host, region)
        return self._worker


def transfer_config(host_bytes: int, *secondary: dict[str, Any]) -> dict[str, Any]:
    """`kv_transfer_config` of vLLM's own connector: its host tier, and these secondary tiers below it."""
    spec = CpuTieringSpec if secondary else CpuHostSpec
    extra = {
        "spec_name": spec.__name__,
        # By this file's name: the importer has this directory on its path.
        "spec_module_path": Path(__file__).stem,
        "cpu_bytes_to_use": host_bytes,
        "secondary_tiers": list(secondary),
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
