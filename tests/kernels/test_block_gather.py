"""Blocks to and from contiguous memory, byte for byte."""

import pytest
import torch

from kvtier.errors import CapacityError, FormatMismatch
from kvtier.gpu.kernels.gather import gather_blocks, scatter_blocks


def random_bytes(*shape, seed=0):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


@pytest.mark.parametrize("nbytes", [8, 24, 1, 6, 36, 40_000])
def test_gather_and_scatter_move_the_same_bytes(nbytes):
    pool, ids = random_bytes(7, 1, nbytes), torch.tensor([5, 0, 3], dtype=torch.int32)
    packed = torch.zeros(3, 1, nbytes, dtype=torch.uint8)
    gather_blocks(pool, ids, packed)
    assert torch.equal(packed, pool[[5, 0, 3]])
    target = random_bytes(7, 1, nbytes, seed=1)
    expected = target.clone()
    expected[[5, 0, 3]] = packed
    scatter_blocks(packed, ids, target)
    assert torch.equal(target, expected)


def test_a_block_in_parts():
    # One tensor per layer, in one allocation: [layers, num_blocks, part].
    pool, ids = random_bytes(3, 6, 48).transpose(0, 1), torch.tensor([4, 1], dtype=torch.int32)
    packed = torch.zeros(2, 3, 48, dtype=torch.uint8)
    gather_blocks(pool, ids, packed)
    assert torch.equal(packed, pool[[4, 1]])


def test_an_odd_offset_moves_single_bytes():
    pool = random_bytes(3, 1, 65)[:, :, 1:]
    packed = torch.zeros(2, 1, 64, dtype=torch.uint8)
    gather_blocks(pool, torch.tensor([2, 0], dtype=torch.int32), packed)
    assert torch.equal(packed, pool[[2, 0]])


def test_nothing_to_move():
    gather_blocks(random_bytes(2, 1, 8), torch.empty(0, dtype=torch.int32), torch.empty(0, 1, 8, dtype=torch.uint8))


def test_refuses_what_does_not_belong_together():
    pool, ids = random_bytes(4, 1, 8), torch.tensor([1], dtype=torch.int32)
    with pytest.raises(CapacityError, match="2 packed blocks for 1 ids"):
        gather_blocks(pool, ids, random_bytes(2, 1, 8))
    with pytest.raises(FormatMismatch, match="1, 8"):
        gather_blocks(pool, ids, random_bytes(1, 1, 16))
    with pytest.raises(FormatMismatch, match="int32"):
        gather_blocks(pool, ids.long(), random_bytes(1, 1, 8))
