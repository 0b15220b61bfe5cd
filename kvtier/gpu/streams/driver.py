"""The CUDA driver's copies, by address: one call each, or one for many (CUDA 12.8 and later). Pinning, likewise.

Neither torch nor CuPy (14.2) offers the batched call, so this goes to `libcuda`, which both have loaded. Needs the
device's context to be current in the calling thread; copies take no legacy default stream. A refusal by the runtime's
own cudaHostRegister would stay behind as its last error, which torch finds after its next kernel; here none does.
"""

import ctypes
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import TierUnavailable
from kvtier.gpu.streams.runs import Direction, Runs

__all__ = ["Driver", "open_driver"]

_SOURCE_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class Driver:
    """Copies of a loaded driver.

    Args:
        library: `libcuda`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._copy = library.cuMemcpyAsync
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._register = library.cuMemHostRegister_v2
        self._register.argtypes = (ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint)
        self._unregister = library.cuMemHostUnregister
        self._unregister.argtypes = (ctypes.c_uint64,)
        # _v2 is CUDA 13's: the same without the index of the copy that failed. Looked up by name: older drivers have
        # neither.
        self._batch, self._reports_index = None, False
        for name, reports_index in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
            try:
                self._batch, self._reports_index = library[name], reports_index
            except AttributeError:
                continue
            break

    @property
    def batches(self) -> bool:
        """Whether there is a batched call."""
        return self._batch is not None

    def register(self, address: int, nbytes: int, flags: int) -> int:
        """Pin host memory; an error code, 0 for none."""
        status: int = self._register(address, nbytes, flags)
        return status

    def unregister(self, address: int) -> int:
        """Undo `register`."""
        status: int = self._unregister(address)
        return status

    def copy(self, runs: Runs, direction: Direction, stream: int) -> None:
        """A call for each run; the driver finds out which side is the device.

        Raises:
            TierUnavailable: the driver refuses a copy. Those before it were launched.
        """
        targets, sources = _sides(runs, direction)
        for target, source, nbytes in zip(targets.tolist(), sources.tolist(), runs.nbytes.tolist(), strict=True):
            self._check(self._copy(target, source, nbytes, stream), runs, direction)

    def copy_batch(self, runs: Runs, direction: Direction, stream: int) -> None:
        """One call for all runs, in any order.

        Raises:
            TierUnavailable: the driver has no such call or refuses it. Some copies may have been launched.
        """
        if self._batch is None:
            raise TierUnavailable("this CUDA driver has no cuMemcpyBatchAsync; update it to 12.8 or later")
        targets, sources = _sides(runs, direction)
        attributes = _Attributes(order=_SOURCE_IN_STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        index = (ctypes.byref(failed),) if self._reports_index else ()
        status = self._batch(
            *(ctypes.c_void_p(column.ctypes.data) for column in (targets, sources, runs.nbytes)),
            ctypes.c_size_t(len(runs)),
            *(ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1)),
            *index,
            ctypes.c_void_p(stream),
        )
        self._check(status, runs, direction)

    def _check(self, status: int, runs: Runs, direction: Direction) -> None:
        if status:
            raise TierUnavailable(
                f"{len(runs)} copies {direction.value}, {runs.total} bytes: CUDA driver error {status}; "
                f"the blocks count as not copied"
            )


def _sides(runs: Runs, direction: Direction) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Targets and sources, each contiguous: the driver reads the columns themselves."""
    device, host = np.ascontiguousarray(runs.device), np.ascontiguousarray(runs.host)
    return (device, host) if direction is Direction.TO_DEVICE else (host, device)


@cache
def open_driver() -> Driver:
    """The driver of this machine.

    Raises:
        TierUnavailable: there is none.
    """
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError) as error:
        raise TierUnavailable(f"no CUDA driver: {error}; copies to and from a CUDA device need libcuda.so.1") from error
