"""Runs: contiguous copies between device and host memory, as columns, so that many of them cost one launch."""

import ctypes
import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier.native.copying import copy_runs

__all__ = ["Direction", "Runs", "address_of", "addresses_of"]


class Direction(enum.Enum):
    """Which way bytes go."""

    TO_DEVICE = "to_device"
    TO_HOST = "to_host"


@dataclass(frozen=True, slots=True)
class Runs:
    """Copies of `nbytes[i]` bytes between addresses `device[i]` and `host[i]`. int64 [n] each.

    Who holds one sees to it that the memory lives.
    """

    device: NDArray[np.int64]
    host: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    @classmethod
    def of(cls, device: Sequence[int] | NDArray[np.int64], host: Sequence[int], nbytes: int) -> "Runs":
        """Copies of one length each."""
        return cls(np.asarray(device, np.int64), np.asarray(host, np.int64), np.full(len(host), nbytes, np.int64))

    def __len__(self) -> int:
        """How many."""
        return len(self.nbytes)

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return int(self.nbytes.sum())

    def slice(self, index: int, count: int) -> "Runs":
        """The part `index` of each run, cut into `count` equal ones.

        run      [ slice 0 | slice 1 | ... | slice count-1 ]       a block's layers are its slices
        """
        width = self.nbytes // count
        return Runs(self.device + index * width, self.host + index * width, width)

    def merged(self) -> "Runs":
        """The same copies, each with the one that follows it on both sides joined to it."""
        if len(self) < 2:
            return self
        follows = (np.diff(self.device) == self.nbytes[:-1]) & (np.diff(self.host) == self.nbytes[:-1])
        first = np.flatnonzero(np.concatenate(([True], ~follows)))
        return Runs(self.device[first], self.host[first], np.add.reduceat(self.nbytes, first))

    def move(self, direction: Direction) -> None:
        """Make the copies at once, where both sides are host memory. Lets go of the GIL."""
        joined = self.merged()
        columns = (joined.device, joined.host) if direction is Direction.TO_DEVICE else (joined.host, joined.device)
        copy_runs(*columns, joined.nbytes)


class _Buffer(ctypes.Structure):
    """Py_buffer, of which only the address is of interest."""

    _fields_ = (("address", ctypes.c_void_p), ("rest", ctypes.c_void_p * 15))


_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("PyBuffer_Release", ctypes.pythonapi))


def addresses_of(memories: Sequence[memoryview]) -> list[int]:
    """Where contiguous memory lies, read-only or not. A third of what going through numpy takes."""
    buffer, found = _Buffer(), []
    at = ctypes.addressof(buffer)
    for memory in memories:
        _get_buffer(memory, at, 0)
        found.append(buffer.address)
        _release_buffer(at)
    return found


def address_of(memory: memoryview) -> int:
    """Where contiguous memory lies, read-only or not."""
    return addresses_of([memory])[0]
