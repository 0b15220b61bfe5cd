"""How kernels are started: on the device that their tensors are on, told what they have to be told."""

import contextlib

import pytest
import torch
from kernel_world import draw, layout

from kvtier.gpu.kernels.launch import Launch
from kvtier.gpu.kernels.quantized_pool import QuantizedPool
from kvtier.gpu.kernels.write_kv import write_launch


class OnCuda(torch.Tensor):
    """Says that it is on a device."""

    is_cuda = True

    def get_device(self):
        return 1


class Kernel:
    """Remembers on which device it was started, and with what."""

    def __init__(self):
        self.started = []
        self.current = 0

    def __getitem__(self, grid):
        return lambda **given: self.started.append((self.current, grid, given))


@pytest.fixture
def kernel(monkeypatch):
    made = Kernel()

    @contextlib.contextmanager
    def device_of(tensor):
        before, made.current = made.current, tensor.get_device() if tensor.is_cuda else made.current
        yield
        made.current = before

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    return made


def test_a_kernel_runs_where_its_tensors_are_and_not_on_the_threads_device(kernel):
    host, device = torch.zeros(1), torch.zeros(1).as_subclass(OnCuda)
    Launch(kernel, (2, 3), {"packed": host, "pool": device, "words": 4}, {"CHUNK": 8}, warps=8, stages=3).run()
    Launch(kernel, (1,), {"packed": host}).run()
    (first, second) = kernel.started
    assert first[:2] == (1, (2, 3))
    assert first[2] == {
        "packed": host, "pool": device, "words": 4, "CHUNK": 8,
        "num_warps": 8, "num_stages": 3, "enable_fp_fusion": True,
    }  # fmt: skip
    assert second[0] == 0
    assert kernel.current == 0


def test_without_programs_nothing_is_started(kernel):
    Launch(kernel, (0, 3), {"packed": torch.zeros(1)}).run()
    assert not kernel.started


def test_codes_are_rounded_twice_as_those_of_the_formats_are():
    k = draw(1, 2, 64)
    launch = write_launch(k, k, QuantizedPool(layout(), 1, "int8", "cpu").layer(0), torch.tensor([3]))
    assert not launch.options["enable_fp_fusion"]
