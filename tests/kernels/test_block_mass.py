"""Attention mass per block and bounds of keys, against float64."""

import pytest
import torch
from kernel_world import SHAPES, coded_kv, draw, raw_kv, spans_of

from kvtier.errors import FormatMismatch
from kvtier.gpu.kernels.block_mass import block_mass, key_bounds
from kvtier.gpu.kernels.reference import dense_rows, weights


def expected_mass(q, key, spans, columns, scale):
    size, heads = key.block_size, key.heads
    mass = torch.zeros(len(spans), heads, columns, dtype=torch.float64)
    for at, span in enumerate(spans):
        got = weights(q[at], dense_rows(key, span.block_ids, span.stop), span.stop - q.shape[1], scale)
        per_token = got.sum(1).view(heads, -1, span.stop).sum(1)
        for token in range(span.stop):
            mass[at, :, token // size] += per_token[:, token]
    return mass


def run(lengths, key, spans, *, queries, group):
    q = draw(len(lengths), queries, group * key.heads, key.width, seed=3)
    columns = max(len(span.block_ids) for span in spans)
    tables = torch.zeros(len(spans), columns, dtype=torch.int32)
    for row, span in zip(tables, spans, strict=True):
        row[: len(span.block_ids)] = torch.tensor(span.block_ids)
    mass = block_mass(q, key, tables, torch.tensor(lengths, dtype=torch.int32), scale=0.2)
    torch.testing.assert_close(mass.double(), expected_mass(q, key, spans, columns, 0.2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mass.sum(-1), torch.full(mass.shape[:2], float(queries * group)))


@pytest.mark.parametrize(
    ("queries", "group", "block_size"),
    [
        pytest.param(1, 2, 16, id="decode"),
        pytest.param(3, 3, 16, id="several queries"),
        pytest.param(3, 1, 5, id="blocks of no power of two"),
    ],
)
def test_equals_float64(queries, group, block_size):
    lengths = [33, 16, 3]
    spans = spans_of([(0, length) for length in lengths], block_size, 32)
    run(lengths, raw_kv(spans, block_size=block_size).key, spans, queries=queries, group=group)


def test_queries_of_several_tiles():
    spans = spans_of([(0, 40)], 16, 32)
    run([40], raw_kv(spans, kv_heads=1).key, spans, queries=37, group=3)


# Keys of k8v4 are those of int8.
@pytest.mark.parametrize("coding", [None, "int8", "int8r", "fp8", "int4r"])
@pytest.mark.parametrize(("head_dim", "group"), SHAPES)
def test_every_coding_and_shape(coding, head_dim, group):
    lengths = [2, 16, 17]
    spans = spans_of([(0, length) for length in lengths], 16, 32)
    kv = coded_kv(spans, coding, head_dim=head_dim) if coding else raw_kv(spans, head_dim=head_dim)
    run(lengths, kv.key, spans, queries=2, group=group)


@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (5, 80)])
def test_bounds_of_keys(block_size, head_dim):
    spans = spans_of([(0, 2 * block_size - 2)], block_size, 32)
    key = raw_kv(spans, block_size=block_size, head_dim=head_dim).key
    first, last = spans[0].block_ids[:2]
    ids = torch.tensor([last, first], dtype=torch.int32)
    least, most = key_bounds(key, ids, torch.tensor([block_size - 2, block_size], dtype=torch.int32))
    for at, (block, count) in enumerate(((last, block_size - 2), (first, block_size))):
        tokens = key.values[block, :, :count]
        assert torch.equal(least[at], tokens.amin(1))
        assert torch.equal(most[at], tokens.amax(1))


def test_refuses_what_does_not_belong_together():
    spans = spans_of([(0, 5)], 16, 32)
    raw, coded = raw_kv(spans).key, coded_kv(spans, "int8").key
    tables, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    with pytest.raises(FormatMismatch, match="multiple of 2 heads"):
        block_mass(torch.zeros(1, 1, 3, 64), raw, tables, lengths, scale=1.0)
    with pytest.raises(FormatMismatch, match="int64"):
        block_mass(torch.zeros(1, 1, 2, 64), raw, tables, lengths.long(), scale=1.0)
    with pytest.raises(FormatMismatch, match="before coding"):
        key_bounds(coded, lengths, lengths)
