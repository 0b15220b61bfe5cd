"""The compiled kernels against numpy's, byte for byte, on every CPU level; and what both refuse."""

import sys
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import native
from kvtier.formats.rotation import rotation, span
from kvtier.native import Codec, Run
from kvtier.native.rows import DTYPE_CODES, limit, record_bytes

ITEMSIZE = {0: 4, 1: 2, 2: 2, 3: 1, 4: 1}
LOSSY = [Codec.INT8, Codec.FP8, Codec.INT4, Codec.LLOYD4]
WIDTHS = [1, 2, 7, 8, 16, 24, 31, 33, 64, 80, 96, 128, 192, 256, 512, 576]


def divisors(width):
    return [size for size in range(1, width + 1) if width % size == 0]


@st.composite
def runs(draw, codecs=tuple(Codec)):
    """A codec, an element type, and rows that lie anywhere in their buffers."""
    codec = draw(st.sampled_from(codecs))
    dtype = draw(st.sampled_from([0, 1, 2] if codec is not Codec.COPY else [0, 1, 2, 3, 4]))
    width = draw(st.sampled_from(WIDTHS))
    group = draw(st.sampled_from(divisors(width)))
    turns = [1 << bit for bit in range(span(width).bit_length())]
    turn = 1 if codec is Codec.COPY else draw(st.sampled_from(turns))
    outer, inner = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    raw_row = width * ITEMSIZE[dtype] + draw(st.integers(0, 3))
    coded_row = record_bytes(codec, width, group, ITEMSIZE[dtype]) + draw(st.integers(0, 3))
    gaps = [draw(st.integers(0, 5)) for _ in range(4)]
    run = Run(
        outer,
        inner,
        width,
        group,
        turn,
        gaps[0],
        inner * raw_row + gaps[1],
        raw_row,
        gaps[2],
        inner * coded_row + gaps[3],
        coded_row,
    )
    return codec, dtype, run


def ends(codec, dtype, run):
    """Bytes that the raw and the coded buffer must have."""
    raw = run.raw_offset + (run.outer - 1) * run.raw_outer + (run.inner - 1) * run.raw_row
    coded = run.coded_offset + (run.outer - 1) * run.coded_outer + (run.inner - 1) * run.coded_row
    record = record_bytes(codec, run.width, run.group, ITEMSIZE[dtype])
    return raw + run.width * ITEMSIZE[dtype], coded + record


def signs(run):
    return rotation(run.width, run.rotation) if run.rotation > 1 else None


def kv_like(dice, dtype, nbytes, run):
    """Bytes of finite rows over many magnitudes, zeros of both signs among them."""
    raw = dice.integers(0, 256, nbytes, np.uint8)
    shape = (run.outer, run.inner, run.width)
    values = dice.standard_normal(shape) * np.exp(dice.choice([0.01, 1.0, 4.0]) * dice.standard_normal(shape))
    values *= dice.choice([1e-42, 1e-8, 1e-3, 1.0, 100.0])
    values[dice.random(shape) < 0.1] = dice.choice([0.0, -0.0])
    kind = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8][dtype]
    rows = torch.from_numpy(np.clip(values, -900, 900)).to(kind).view(torch.uint8).numpy()
    for outer, inner in np.ndindex(shape[:2]):
        at = run.raw_offset + outer * run.raw_outer + inner * run.raw_row
        raw[at : at + rows.shape[-1]] = rows[outer, inner]
    return raw


def on_every(verb):
    found = {}
    for name in native.implementations():
        with native.using(name):
            found[name] = verb(native.kernels())
    return found


def assert_all_equal(found):
    reference = found.pop("reference")
    for name, result in found.items():
        for have, want in zip(result, reference, strict=True):
            assert np.array_equal(have, want), name


@settings(max_examples=250)
@given(case=runs(), seed=st.integers(0, 2**32 - 1))
def test_all_implementations_agree_byte_for_byte(case, seed):
    codec, dtype, run = case
    dice = np.random.default_rng(seed)
    raw_end, coded_end = ends(codec, dtype, run)
    raw = kv_like(dice, dtype, raw_end, run)
    both = signs(run)

    def round_trip(kernels):
        coded, back = np.full(coded_end, 0xA5, np.uint8), np.full(raw_end, 0xA5, np.uint8)
        refused = kernels.encode_rows(codec, dtype, raw, coded, run, both and both.forward)
        assert refused == -1
        kernels.decode_rows(codec, dtype, coded, back, run, both and both.backward)
        return coded, back

    assert_all_equal(on_every(round_trip))


@settings(max_examples=120)
@given(case=runs(tuple(LOSSY)), seed=st.integers(0, 2**32 - 1))
def test_all_implementations_decode_any_codes_alike(case, seed):
    """Codes that no encoder writes (-128, fp8's NaN) behind sound scales."""
    codec, dtype, run = case
    dice = np.random.default_rng(seed)
    raw_end, coded_end = ends(codec, dtype, run)
    coded = dice.integers(0, 256, coded_end, np.uint8)
    split = run.width // run.group * (4 if codec is Codec.INT4 else 2)
    for outer in range(run.outer):
        for inner in range(run.inner):
            at = run.coded_offset + outer * run.coded_outer + inner * run.coded_row
            coded[at : at + split] = dice.uniform(0, 30, split // 2).astype("<f2").view(np.uint8)
    both = signs(run)

    def decode(kernels):
        back = np.full(raw_end, 0xA5, np.uint8)
        kernels.decode_rows(codec, dtype, coded, back, run, both and both.backward)
        return (back,)

    assert_all_equal(on_every(decode))


@settings(max_examples=100)
@given(case=runs(tuple(LOSSY)), bits=st.sampled_from(["nan", "inf", "-inf", "big"]), data=st.data())
def test_all_implementations_refuse_the_same_row(case, bits, data):
    codec, _, run = case
    run = run._replace(raw_offset=0, raw_row=run.width * 4, raw_outer=run.inner * run.width * 4)
    raw = np.random.default_rng(0).standard_normal((run.outer * run.inner, run.width)).astype(np.float32)
    bad = data.draw(st.integers(0, len(raw) - 1))
    raw[bad, data.draw(st.integers(0, run.width - 1))] = float(bits) if bits != "big" else limit(codec) * 600
    flat, both = raw.view(np.uint8).reshape(-1), signs(run)
    coded = np.zeros(ends(codec, 0, run)[1], np.uint8)
    found = on_every(lambda kernels: (kernels.encode_rows(codec, 0, flat, coded, run, both and both.forward),))
    assert set(found.values()) == {(bad,)}


@pytest.mark.parametrize("codec", LOSSY)
def test_every_float16_and_bfloat16_value(codec):
    """All finite 16-bit patterns as raw elements, then every decoded value rounded back."""
    for dtype in (1, 2):
        patterns = np.arange(1 << 16).astype("<u2")
        exponent = patterns & (0x7F80 if dtype == 1 else 0x7C00)
        finite = patterns[exponent != (0x7F80 if dtype == 1 else 0x7C00)]
        finite = finite[: finite.size // 64 * 64]
        # Rows of neighbouring magnitudes; those beyond the codec's reach are refused, and left out here.
        rows = finite.reshape(-1, 64)
        if dtype == 1:
            largest = (rows.astype(np.uint32) << 16).view(np.float32)
            rows = rows[np.abs(largest).max(axis=1) <= limit(codec)]
        else:
            rows = rows[np.abs(rows.view("<f2").astype(np.float64)).max(axis=1) <= limit(codec)]
        raw = np.ascontiguousarray(rows).view(np.uint8).reshape(-1)
        record = record_bytes(codec, 64, 64, 2)
        run = Run(1, len(rows), 64, 64, 1, 0, 0, 128, 0, 0, record)

        def round_trip(kernels, raw=raw, run=run, dtype=dtype):
            coded, back = np.zeros(run.inner * run.coded_row, np.uint8), np.zeros_like(raw)
            assert kernels.encode_rows(codec, dtype, raw, coded, run, None) == -1
            kernels.decode_rows(codec, dtype, coded, back, run, None)
            return coded, back

        assert_all_equal(on_every(round_trip))


@settings(max_examples=60)
@given(width=st.sampled_from([1, 2, 4]), count=st.integers(0, 300), seed=st.integers(0, 99), shift=st.integers(0, 3))
def test_planes(width, count, seed, shift):
    raw = np.random.default_rng(seed).integers(0, 256, count * width + shift, np.uint8)[shift:]

    def round_trip(kernels):
        planes = tuple(np.zeros(count, np.uint8) for _ in range(width))
        kernels.split_planes(raw, planes)
        back = np.zeros_like(raw)
        kernels.join_planes(planes, back)
        return (*planes, back)

    found = on_every(round_trip)
    bits = np.unpackbits(raw.reshape(count, width)[:, ::-1], axis=1)
    turned = np.packbits(np.roll(bits, -1, axis=1) if width > 1 else bits, axis=1)
    assert np.array_equal(np.stack(found["reference"][:-1], axis=1), turned)
    assert np.array_equal(found["reference"][-1], raw)
    assert_all_equal(found)


GOOD = Run(2, 3, 64, 32, 64, 1, 3 * 128, 128, 2, 3 * 68, 68)


@pytest.mark.parametrize(
    "change",
    [
        {"outer": 0},
        {"inner": 0},
        {"width": 0},
        {"width": 9000, "group": 9000, "rotation": 8},
        {"group": 0},
        {"group": 48},
        {"rotation": 0},
        {"rotation": 48},
        {"rotation": 128},
        {"rotation": 1},
        {"outer": 3},
        {"inner": 4},
        {"outer": 2**62, "inner": 2**62},
        {"raw_offset": -1},
        {"raw_offset": 2},
        {"raw_offset": 2**62},
        {"raw_row": -128},
        {"raw_row": 129},
        {"raw_outer": 2**62},
        {"coded_offset": 3},
        {"coded_offset": -2},
        {"coded_row": 69},
        {"coded_outer": 2**62, "coded_row": 2**62},
        # Products that come to nothing in 64 bits.
        {"outer": 2**33 + 1, "raw_outer": 2**31, "coded_outer": 2**31},
        {"outer": 2**33 + 1, "raw_outer": 0, "coded_outer": 2**31},
        {"inner": 2**33 + 1, "raw_row": 2**31, "coded_row": 2**31},
        {"inner": 2**33 + 1, "raw_row": 0, "coded_row": 2**31},
        {"group": 16},
        {"codec": 9},
        {"codec": -1},
        {"dtype": 5},
        {"dtype": -1},
        {"dtype": 0},
        {"dtype": DTYPE_CODES["int8"]},
        {"signs": None},
        {"signs": 63},
        {"signs": 65},
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", native.implementations())
def test_rows_outside_their_buffers_are_refused_before_a_byte_moves(implementation, change):
    change = dict(change)
    codec, dtype = change.pop("codec", Codec.INT8), change.pop("dtype", 1)
    count = change.pop("signs", 64)
    given_signs = None if count is None else np.ones(count, np.float32)
    run = GOOD._replace(**change)
    raw, coded = np.zeros(1 + 6 * 128, np.uint8), np.full(2 + 6 * 68, 0xA5, np.uint8)
    with native.using(implementation):
        kernels = native.kernels()
        assert kernels.encode_rows(Codec.INT8, 1, raw, coded.copy(), GOOD, np.ones(64, np.float32)) == -1
        with pytest.raises((ValueError, OverflowError)):
            kernels.encode_rows(codec, dtype, raw, coded, run, given_signs)
        with pytest.raises((ValueError, OverflowError)):
            kernels.decode_rows(codec, dtype, coded, raw, run, given_signs)
    assert (coded == 0xA5).all()
    assert not raw.any()


@pytest.mark.parametrize("implementation", native.implementations())
def test_planes_of_other_lengths_are_refused(implementation):
    raw = np.arange(12, dtype=np.uint8)

    def planes(*lengths):
        return tuple(np.full(length, 0xA5, np.uint8) for length in lengths)

    with native.using(implementation):
        for wrong in ((), planes(4, 4, 4), planes(6, 5), planes(7, 6), planes(2, 2, 2, 2), planes(11)):
            for verb in (
                lambda wrong=wrong: native.kernels().split_planes(raw, wrong),
                lambda wrong=wrong: native.kernels().join_planes(wrong, raw),
            ):
                with pytest.raises(ValueError, match="planes"):
                    verb()
            assert all((plane == 0xA5).all() for plane in wrong)
    assert np.array_equal(raw, np.arange(12))


@pytest.mark.parametrize("implementation", native.implementations())
def test_a_read_only_output_is_refused(implementation):
    raw, coded = np.zeros(1 + 6 * 128, np.uint8), np.zeros(2 + 6 * 68, np.uint8)
    with native.using(implementation), pytest.raises((ValueError, TypeError, BufferError)):
        native.kernels().encode_rows(Codec.INT8, 1, raw.data, coded.data.toreadonly(), GOOD, np.ones(64, np.float32))


@pytest.mark.skipif(not native.available(), reason="the extension is not built")
def test_other_threads_run_while_rows_are_encoded():
    """Nobody is made to let go of the GIL in this test: another thread gets on only if the call does it."""
    rows = 60_000
    raw, coded = np.zeros(rows * 128, np.uint8), np.zeros(rows * 68, np.uint8)
    run = Run(1, rows, 64, 64, 1, 0, 0, 128, 0, 0, 66)
    ticks, seen = [0], []

    def work():
        before = ticks[0]
        for _ in range(300):
            native.kernels().encode_rows(Codec.INT8, 1, raw, coded, run, None)
            if ticks[0] > before:
                seen.append(ticks[0])
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(600)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            ticks[0] += 1
            time.sleep(0)
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen
