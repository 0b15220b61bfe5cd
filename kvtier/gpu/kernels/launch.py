"""How kernels are defined and started: the one module that knows Triton's launcher.

A launcher prepares a `Launch` from its tensors and runs it. `catalog` prepares the same launches from tensors without
memory and compiles them, so that what is compiled ahead of time is what runs.

Under TRITON_INTERPRET=1 kernels run on CPU tensors, in numpy. The interpreter computes garbage with bfloat16 and says
nothing, hence `compute_dtype`: every kernel converts what it loads to it before the first operation.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvtier.errors import FormatMismatch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the kernels are written in Triton, which is not installed: pip install 'kvtier[gpu]'") from error

__all__ = [
    "INTERPRETED",
    "Launch",
    "ceil_div",
    "compute_dtype",
    "has_large_shared_memory",
    "kernel",
    "multiprocessors",
    "padded",
    "tl",
]


def kernel(function: Callable[..., Any]) -> Any:
    """`triton.jit`, with a type for mypy. Under it belongs `typing.no_type_check`: the body is Triton, not Python."""
    return triton.jit(function)


@kernel
def _probe() -> None:
    pass


INTERPRETED = not isinstance(_probe, triton.JITFunction)
"""Whether kernels of this process run in Triton's interpreter; decided when Triton is first imported."""

_LARGE_SHARED_MEMORY = frozenset({(8, 0), (8, 7), (9, 0), (10, 0), (10, 3)})
_COMPUTE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a kernel.

    Args:
        kernel: what to run.
        grid: programs per axis; without any, `run` does nothing.
        arguments: tensors (as pointers), numbers and None, by name.
        constants: values that are compiled in, by name.
        warps, stages: of 32 threads; buffers of the software pipeline.
        fused: a product and the sum that it goes into may be rounded once, instead of one after the other.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int | float | None]
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 2
    fused: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": self.fused}

    def run(self) -> None:
        """Start it on its device's current stream; the first start with new types or constants compiles."""
        if min(self.grid) <= 0:
            return
        tensors = [value for value in self.arguments.values() if isinstance(value, Tensor)]
        # Triton takes the thread's current device, whatever the tensors are on; one of them may be pinned host memory.
        on_device = next((tensor for tensor in tensors if tensor.is_cuda), tensors[0])
        with torch.cuda.device_of(on_device):  # type: ignore[no-untyped-call]
            self.kernel[self.grid](**self.arguments, **self.constants, **self.options)


def compute_dtype(dtype: torch.dtype) -> Any:
    """Triton's type for the operands of products, for queries of a dtype; sums are always float32.

    Raises:
        FormatMismatch: no float of 16 or 32 bits.
    """
    if dtype not in _COMPUTE:
        raise FormatMismatch(f"queries of {dtype}: expected float32, bfloat16 or float16")
    return tl.float32 if INTERPRETED else _COMPUTE[dtype]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs a device runs side by side; 1 for the interpreter. Asked at first use, never at import."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program may use 160 KiB of shared memory, as on data centre devices, or 99 KiB, as on others."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in _LARGE_SHARED_MEMORY


def padded(width: int) -> int:
    """The tile width for `width` elements: a power of two, and at least the 16 that tensor cores take."""
    return max(16, 1 << (width - 1).bit_length())


def ceil_div(value: int, by: int) -> int:
    """`value / by`, rounded up."""
    return -(-value // by)
