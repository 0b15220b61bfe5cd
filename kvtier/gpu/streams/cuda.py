"""What the streams of a CUDA device have in common, whichever library makes them: pinned memory, launches, lanes."""

import threading
from collections.abc import Callable, Mapping
from importlib import import_module

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.gpu import kernels
from kvtier.gpu.streams.base import Event, Flag
from kvtier.gpu.streams.driver import Driver, open_driver
from kvtier.gpu.streams.launch import Launch, Launcher, Way
from kvtier.gpu.streams.pinning import PinnedMemory
from kvtier.gpu.streams.runs import Direction, Runs
from kvtier.gpu.streams.threads import ThreadLane

__all__ = ["CudaDevice"]


class CudaDevice:
    """A CUDA device's memory and copies, by stream handle.

    Args:
        device: with its index.
        single: launches copies one by one; None: by the driver.
        only: launch copies in this way wherever it can be used.

    Raises:
        TierUnavailable: there is no driver, or no such way to launch copies.
    """

    def __init__(self, device: torch.device, single: Launch | None = None, only: Way | None = None) -> None:
        driver = open_driver()
        self.device = device
        self.pinned = PinnedMemory(driver.register, driver.unregister)
        self.launcher = Launcher(_ways(driver, device, single), only)
        self._buffers: list[torch.Tensor] = []

    def copy(self, handle: int, runs: Runs, direction: Direction) -> None:
        """Launch copies."""
        with torch.cuda.device(self.device):
            self.launcher(runs, direction, handle, pinned=self.pinned.covers(runs))

    def pin(self, memory: memoryview) -> bool:
        """See `Streams.pin`."""
        with torch.cuda.device(self.device):
            self._enter()
            return self.pinned.pin(memory)

    def unpin(self, memory: memoryview) -> None:
        """See `Streams.unpin`."""
        with torch.cuda.device(self.device):
            self._enter()
            self.pinned.unpin(memory)

    def buffer(self, nbytes: int) -> NDArray[np.uint8]:
        """Pinned memory, which lives as long as this."""
        tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._buffers.append(tensor)
        self.pinned.add(tensor.data_ptr(), nbytes)
        return tensor.numpy()

    def lane(self, name: str, synchronize: Callable[[Event], None]) -> ThreadLane:
        """A thread in which the device's context is current: the driver's calls need that."""
        return ThreadLane(name, synchronize, self._enter)

    def _enter(self) -> None:
        # The first call of a thread to the runtime makes the context current; choosing a device alone may not.
        torch.cuda.set_device(self.device)
        torch.cuda.current_stream(self.device).query()

    def flag(self) -> Flag:
        """A flag between threads."""
        return threading.Event()


def _ways(driver: Driver, device: torch.device, single: Launch | None) -> Mapping[Way, Launch]:
    ways: dict[Way, Launch] = {Way.SINGLE: driver.copy if single is None else single}
    if driver.batches:
        ways[Way.BATCH] = driver.copy_batch
    if kernels.available():
        ways[Way.GATHER] = import_module("kvtier.gpu.streams.gather").GatherCopies(device)
    return ways
