"""Copies between vLLM's tensors on a CPU and LMCache's memory, which LMCache 0.5.6 lacks."""

from typing import Any

import torch
from lmcache.v1 import gpu_connector
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface

__all__ = ["CpuConnector", "install"]


class CpuConnector(GPUConnectorInterface):
    """Copies whole pages between vLLM's tensors and LMCache's memory objects, one index operation a layer.

    Attributes:
        loaded_bytes: copied to vLLM so far.

    Args:
        block_size: tokens per block; chunks are multiples of it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.loaded_bytes = 0

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Fill vLLM's blocks, but those that it has already: others may be reading them."""
        begin = max(start, kwargs.get("vllm_cached_tokens", 0) // self._block_size * self._block_size)
        if begin >= end:
            return
        skip = (begin - start) // self._block_size
        places, pages, chunk = self._views(memory_obj, begin, end, (end - start) // self._block_size, kwargs)
        for layer, page in enumerate(pages):
            page[places] = chunk[layer, skip:]
        self.loaded_bytes += len(places) * chunk.shape[0] * chunk.shape[2]

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Empty vLLM's blocks into a memory object."""
        places, pages, chunk = self._views(memory_obj, start, end, (end - start) // self._block_size, kwargs)
        for layer, page in enumerate(pages):
            chunk[layer] = page[places]

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
        """One by one."""
        for each in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(*each, **kwargs)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        """One by one."""
        for each in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(*each, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Only layer-wise transfers ask for it."""
        raise NotImplementedError

    def _views(self, memory_obj: Any, start: int, end: int, blocks: int, kwargs: Any) -> tuple[Any, Any, torch.Tensor]:
        """vLLM's block ids, its pages by layer, and the chunk as bytes [layers, blocks, page bytes]."""
        places = kwargs["slot_mapping"][start : end : self._block_size] // self._block_size
        pages = [_pages(cache) for cache in kwargs["kvcaches"]]
        chunk = memory_obj.tensor.view(-1).view(torch.int8).view(len(pages), blocks, -1)
        return places, pages, chunk


def _pages(cache: torch.Tensor) -> torch.Tensor:
    """A layer's memory as bytes [blocks, page bytes], whatever its other axes are; all layers may share one storage."""
    size = cache.element_size()
    shape, strides = (cache.shape[0], cache[0].numel() * size), (cache.stride(0) * size, 1)
    return torch.tensor([], dtype=torch.int8).set_(
        cache.untyped_storage(), cache.storage_offset() * size, shape, strides
    )


def install(block_size: int) -> CpuConnector:
    """Put the connector where LMCache's factory would have raised."""
    connector = CpuConnector(block_size)
    gpu_connector.CreateGPUConnector = lambda *_, **__: connector
    return connector
