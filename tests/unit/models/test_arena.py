"""The arena: tensors side by side, apart from each other, alive as long as they are used."""

import gc

import torch

from kvtier.engine.models.arena import Arena


def test_tensors_are_aligned_and_apart():
    arena = Arena(chunk_bytes=4096)
    shapes = [(3,), (7, 5), (1,), (0,), (40, 40), (2, 3, 4)]
    tensors = [arena.empty(shape, torch.float32) for shape in shapes]
    for number, tensor in enumerate(tensors):
        assert tensor.is_contiguous()
        assert not tensor.data_ptr() % 64
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))
    assert [tensor.shape for tensor in tensors] == [torch.Size(shape) for shape in shapes]


def test_a_tensor_larger_than_a_chunk():
    arena = Arena(chunk_bytes=4096)
    small, large = arena.empty((16,), torch.bfloat16), arena.empty((100, 100), torch.float32)
    large.fill_(1)
    assert small.eq(0).all()
    assert large.sum() == 10_000


def test_a_tensor_outlives_its_arena():
    arena = Arena(chunk_bytes=4096)
    kept, _ = arena.empty((512,), torch.float32).fill_(3), arena.empty((1024,), torch.float32)
    del arena
    gc.collect()
    assert kept.eq(3).all()
