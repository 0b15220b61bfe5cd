"""Pages: blocks whose bytes lie in several tensors, and their copies."""

import contextlib

import numpy as np
import pytest
import torch

from kvtier.errors import FormatMismatch
from kvtier.gpu import BlockMove, CopyEngine, Direction
from kvtier.gpu.pages import Pages

BLOCKS, LAYERS, PAGE = 6, 4, 96


def _values(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).integers(0, 256, shape, np.uint8))


def _layer_major() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Tensors of all layers, and the blocks that they hold."""
    layers = _values(LAYERS, BLOCKS, PAGE)
    return list(layers), layers.transpose(0, 1).reshape(BLOCKS, -1).clone()


def _padded() -> tuple[list[torch.Tensor], torch.Tensor]:
    layers = _values(LAYERS, BLOCKS, PAGE + 32)
    return [layer[:, :PAGE] for layer in layers], layers[:, :, :PAGE].transpose(0, 1).reshape(BLOCKS, -1).clone()


def _block_major() -> tuple[list[torch.Tensor], torch.Tensor]:
    blocks = _values(BLOCKS, LAYERS * PAGE)
    return [blocks[:, layer * PAGE : (layer + 1) * PAGE] for layer in range(LAYERS)], blocks.clone()


@pytest.mark.parametrize(("make", "pages"), [(_layer_major, LAYERS), (_padded, LAYERS), (_block_major, 1)])
def test_blocks_leave_and_come_back(make, pages):
    tensors, blocks = make()
    pool = Pages.of(tensors)
    assert (len(pool), pool.block_bytes, pool.num_blocks) == (pages, LAYERS * PAGE, BLOCKS)
    assert pool.sizes == (PAGE,) * LAYERS
    memory = np.zeros((BLOCKS, LAYERS * PAGE), np.uint8)
    with contextlib.closing(CopyEngine(pool)) as engine:
        order = [4, 0, 5, 2]
        assert engine.submit([(block, memory[block].data) for block in order], Direction.TO_HOST).wait(30) == 4
        assert (memory[order] == blocks[order].numpy()).all()
        assert not memory[[1, 3]].any()
        for tensor in tensors:
            tensor.zero_()
        # What was block 4 becomes block 1.
        assert engine.submit([(1, memory[4].data), (0, memory[0].data)], Direction.TO_DEVICE).wait(30) == 2
    held = torch.stack([torch.cat([tensor[block] for tensor in tensors]) for block in range(BLOCKS)])
    expected = torch.zeros_like(blocks)
    expected[1], expected[0] = blocks[4], blocks[0]
    assert torch.equal(held, expected)


def test_encoded_blocks_are_decoded_into_all_pages():
    tensors, _ = _layer_major()
    raw = _values(LAYERS * PAGE)

    def decode(source: memoryview, target: memoryview) -> None:
        np.frombuffer(target, np.uint8)[:] = np.frombuffer(source, np.uint8) ^ 0xFF

    with contextlib.closing(CopyEngine(Pages.of(tensors))) as engine:
        assert engine.submit([BlockMove(2, (raw ^ 0xFF).numpy().data, decode)], Direction.TO_DEVICE).wait(30) == 1
    assert torch.equal(torch.cat([tensor[2] for tensor in tensors]), raw)


def test_layers_that_share_memory_count_once():
    first, second = _values(2, BLOCKS, PAGE)
    assert Pages.of([first, second, first]).block_bytes == 2 * PAGE


def test_several_pages_have_no_slices():
    engine = CopyEngine(Pages.of(_layer_major()[0]))
    with contextlib.closing(engine), pytest.raises(FormatMismatch, match="4 pages"):
        engine.submit_layers([[]], LAYERS)


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [torch.zeros(4, 8)],
        [torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(5, 8, dtype=torch.uint8)],
        [torch.zeros(8, 4, dtype=torch.int8).t()],
    ],
)
def test_what_is_no_pool_is_refused(tensors):
    with pytest.raises(FormatMismatch, match="expected"):
        Pages.of(tensors)
