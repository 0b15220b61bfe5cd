"""Sequences in shuffled blocks of a pool whose other slots hold NaN: what the kernel tests run on."""

import random
from typing import NamedTuple

import torch

from kvtier.gpu.kernels.quantized_pool import QuantizedPool
from kvtier.gpu.kernels.rows import Code, raw_layer
from kvtier.layout import GroupKind, LayerGroup, Layout

CPU = torch.device("cpu")
# Head_dim and query heads per KV head, as models have them: powers of two and not, the smallest group and the largest.
SHAPES = [(64, 3), (80, 1), (128, 8), (192, 2), (256, 16)]


class Span(NamedTuple):
    block_ids: tuple[int, ...]
    start: int
    stop: int


def layout(*, kv_heads=2, head_dim=64, block_size=16, layers=2, dtype="float32"):
    group = LayerGroup(GroupKind.GQA, tuple(range(layers)), 2, kv_heads, head_dim, dtype=dtype)
    return Layout(block_size, (group,))


def spans_of(lengths, block_size, blocks, seed=0):
    """Spans for (start, stop) pairs, in shuffled blocks; tables may be longer than the tokens need."""
    shuffled = random.Random(seed)
    ids = shuffled.sample(range(blocks), blocks)
    return [
        Span(tuple(ids.pop() for _ in range(-(-stop // block_size) + shuffled.randint(0, 1))), start, stop)
        for start, stop in lengths
    ]


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def all_slots(spans, block_size):
    """Slots of all tokens of all spans, in order."""
    return torch.tensor(
        [span.block_ids[at // block_size] * block_size + at % block_size for span in spans for at in range(span.stop)]
    )


def raw_kv(spans, *, kv_heads=2, head_dim=64, block_size=16, blocks=32, dtype=torch.float32, seed=1):
    """Layer 1 of a raw pool of two layers, in this project's layout; everything but the spans' tokens is NaN."""
    pool = torch.full((blocks, 2, 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    slots = all_slots(spans, block_size)
    for plane in (0, 1):
        rows = draw(len(slots), kv_heads, head_dim, seed=seed + plane, dtype=dtype)
        pool[slots // block_size, 1, plane, :, slots % block_size] = rows
    return raw_layer(pool[:, 1, 0], pool[:, 1, 1])


def coded_kv(spans, coding, *, kv_heads=2, head_dim=64, block_size=16, blocks=32, seed=1):
    """Layer 1 of a coded pool of random codes and scales; everything but the spans' tokens is NaN."""
    pool = QuantizedPool(layout(kv_heads=kv_heads, head_dim=head_dim, block_size=block_size), blocks, coding, "cpu")
    pool.memory.fill_(255)
    slots = all_slots(spans, block_size)
    block, inside = slots // block_size, slots % block_size
    for at, rows in enumerate(pool.layer(1)):
        random_bytes = torch.Generator().manual_seed(seed + at)
        codes = torch.randint(256, (len(slots), kv_heads, rows.values.shape[3]), generator=random_bytes)
        codes = codes.to(torch.uint8)
        # NaN in float8_e4m3fn.
        codes[(codes & 127) == 127] = 0
        rows.values[block, :, inside] = codes
        largest = {Code.INT8: 127, Code.FP8: 448, Code.INT4: 15}[rows.code]
        scale = (torch.rand(len(slots), kv_heads, generator=random_bytes) + 0.5) * 2 / largest
        rows.meta[block, :, 0, inside] = scale.half()
        if rows.code is Code.INT4:
            rows.meta[block, :, 1, inside] = (-7 * scale).half()
    return pool.layer(1)
