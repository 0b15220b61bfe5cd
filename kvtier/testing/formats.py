"""FormatSuite: what every `Format` must do."""

import dataclasses
import threading
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvtier import formats
from kvtier.errors import FormatMismatch
from kvtier.formats import Format
from kvtier.layout import GroupKind, LayerGroup, Layout

__all__ = ["FormatSuite", "bytes_of", "kv_values", "rows_of", "values_of"]

_CANARY = 0xA5
# What rounding to the element type costs: relative, and absolute below the smallest normal.
_ROUNDING = {"float32": (2.0**-22, 2.0**-140), "bfloat16": (2.0**-8, 2.0**-133), "float16": (2.0**-10, 2.0**-25)}


class FormatSuite:
    """Subclass it in a module that pytest collects, and say how to make the format.

    Attributes:
        kind: the layer groups that the format takes.
        dtypes: the element types that it takes.
        header_bytes: leading bytes of an encoded block of which every bit is checked on decoding; 0 for a format
            without a header, which then cannot tell layouts of equal size apart.
        idempotent: element types for which encoding a decoded block again changes nothing.
    """

    kind = GroupKind.GQA
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    header_bytes = 64
    idempotent: tuple[str, ...] = ()

    def make_format(self) -> Format:
        """The format."""
        raise NotImplementedError

    def row_error(self, rows: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        """The largest Euclidean error that rows may have, beside rounding to the element type: float64 [rows].

        Args:
            rows: the values before encoding, float64 [rows, width].
            name: "K", "V", "latent" or "rope".
        """
        return np.zeros(len(rows))

    def layouts(self) -> Iterator[Layout]:
        """Small layouts: head widths that are and are not powers of two, several axis orders."""
        for dtype in self.dtypes:
            if self.kind is GroupKind.MLA:
                for latent, rope in ((128, 16), (512, 64), (24, 8), (96, 0)):
                    group = LayerGroup(GroupKind.MLA, (0, 1), 1, 1, latent, rope_dim=rope, dtype=dtype)
                    yield Layout(4, (group,))
            else:
                for width, order in ((64, "lphtd"), (128, "lphtd"), (80, "ltphd"), (96, "plhtd"), (8, "lphtd")):
                    yield Layout(4, (LayerGroup(GroupKind.GQA, (0, 1), 2, 3, width, dtype=dtype, order=order),))

    def test_it_says_what_it_is(self) -> None:
        fmt = self.make_format()
        assert fmt.id.isascii()
        assert 1 <= len(fmt.id) <= 16
        assert fmt.fidelity > 0
        assert not fmt.exact or fmt.fidelity >= 100, "exact formats rank above all lossy ones"
        assert formats.get(fmt.sink).fidelity >= fmt.fidelity

    def test_round_trip_stays_within_the_error(self) -> None:
        fmt = self.make_format()
        for layout in self.layouts():
            for name, values in kv_values(layout).items():
                raw = bytes_of(values, layout)
                back = self._decoded(fmt, self._encoded(fmt, raw, layout), layout)
                self._assert_close(layout, values_of(raw, layout), values_of(back, layout), name)

    def test_an_exact_format_returns_the_very_bytes(self) -> None:
        fmt = self.make_format()
        dice = np.random.default_rng(3)
        for layout in self.layouts():
            if not fmt.exact_for(layout):
                assert not fmt.exact
                continue
            noise = dice.integers(0, 256, layout.block_bytes(), np.uint8)
            plain = bytes_of(kv_values(layout)["gaussian"], layout)
            for raw in (noise, np.minimum(noise, np.uint8(1)), np.zeros_like(noise), plain):
                assert self._decoded(fmt, self._encoded(fmt, raw, layout), layout).tobytes() == raw.tobytes()

    def test_the_size_is_what_it_said(self) -> None:
        fmt = self.make_format()
        for layout in self.layouts():
            raw = bytes_of(kv_values(layout)["gaussian"], layout)
            bound = fmt.bound(layout)
            out = np.full(bound + 9, _CANARY, np.uint8)
            used = fmt.encode(raw.data, layout, out.data[:-9])
            assert 0 < used <= bound
            assert fmt.size(layout) in (None, used)
            assert (out[bound:] == _CANARY).all(), "wrote beyond the buffer"
            larger = np.full(bound + 9, _CANARY, np.uint8)
            assert fmt.encode(raw.data, layout, larger.data) == used
            assert (larger[bound:] == _CANARY).all(), "wrote beyond what it may use"

    def test_encoding_depends_on_nothing_else(self) -> None:
        fmt = self.make_format()
        for layout in self.layouts():
            raw = bytes_of(kv_values(layout)["outliers"], layout)
            dirty = np.full(fmt.bound(layout), _CANARY, np.uint8)
            used = fmt.encode(raw.data, layout, dirty.data)
            assert dirty[:used].tobytes() == self._encoded(fmt, raw, layout).tobytes()
            # At an odd address, as in the middle of somebody's buffer.
            shifted = np.zeros(raw.size + 1, np.uint8)
            shifted[1:] = raw
            assert dirty[:used].tobytes() == self._encoded(fmt, shifted[1:], layout).tobytes()

    def test_a_second_generation_is_as_good(self) -> None:
        fmt = self.make_format()
        for layout in self.layouts():
            raw = bytes_of(kv_values(layout)["gaussian"], layout)
            first = self._decoded(fmt, self._encoded(fmt, raw, layout), layout)
            second = self._decoded(fmt, self._encoded(fmt, first, layout), layout)
            self._assert_close(layout, values_of(first, layout), values_of(second, layout), "second generation")
            if layout.groups[0].dtype in self.idempotent:
                assert first.tobytes() == second.tobytes()

    def test_another_length_is_refused_and_nothing_written(self) -> None:
        fmt, layout = self.make_format(), self._smallest()
        encoded = self._encoded(fmt, bytes_of(kv_values(layout)["gaussian"], layout), layout)
        for length in range(encoded.size):
            self._assert_refused(fmt, encoded[:length], layout)
        self._assert_refused(fmt, np.append(encoded, np.uint8(0)), layout)

    def test_every_bit_of_the_header_counts(self) -> None:
        fmt, layout = self.make_format(), self._smallest()
        encoded = self._encoded(fmt, bytes_of(kv_values(layout)["gaussian"], layout), layout)
        for bit in range(8 * self.header_bytes):
            damaged = encoded.copy()
            damaged[bit // 8] ^= 1 << bit % 8
            self._assert_refused(fmt, damaged, layout)

    def test_a_block_of_another_layout_is_refused(self) -> None:
        if not self.header_bytes:
            return
        fmt = self.make_format()
        dtypes = [dtype for dtype in self.dtypes if dtype in ("bfloat16", "float16")]
        layout = self._smallest()
        encoded = self._encoded(fmt, bytes_of(kv_values(layout)["gaussian"], layout), layout)
        for other in self._others(layout, dtypes):
            self._assert_refused(fmt, encoded, other)

    def test_unfit_buffers_are_refused_and_nothing_written(self) -> None:
        fmt, layout = self.make_format(), self._smallest()
        raw = bytes_of(kv_values(layout)["gaussian"], layout)
        bound = fmt.bound(layout)
        for src, room in ((raw[:-1], bound), (np.append(raw, np.uint8(0)), bound), (raw, bound - 1), (raw[:0], bound)):
            out = np.full(room, _CANARY, np.uint8)
            assert _refused(lambda src=src, out=out: fmt.encode(src.data, layout, out.data))  # type: ignore[misc]
            assert (out == _CANARY).all()
        encoded = self._encoded(fmt, raw, layout)
        out = np.full(raw.size - 1, _CANARY, np.uint8)
        assert _refused(lambda: fmt.decode(encoded.data, layout, out.data))
        assert (out == _CANARY).all()

    def test_pages_that_cannot_be_addressed_by_token(self) -> None:
        fmt, layout = self.make_format(), self._smallest()
        opaque = dataclasses.replace(layout, groups=(dataclasses.replace(layout.groups[0], order="opaque:engine/1"),))
        raw = bytes_of(kv_values(layout)["gaussian"], layout)
        out = np.empty(fmt.bound(layout) + raw.size, np.uint8)
        if fmt.exact:
            assert self._decoded(fmt, self._encoded(fmt, raw, opaque), opaque).tobytes() == raw.tobytes()
        else:
            assert _refused(lambda: fmt.size(opaque))
            assert _refused(lambda: fmt.encode(raw.data, opaque, out.data))

    def test_other_layer_groups_are_refused_or_served(self) -> None:
        fmt = self.make_format()
        gqa = LayerGroup(GroupKind.GQA, (0,), 2, 1, 16, dtype="bfloat16")
        mla = LayerGroup(GroupKind.MLA, (0,), 1, 1, 16, rope_dim=8, dtype="bfloat16")
        layout = Layout(4, (gqa, mla))
        for group, chosen in enumerate(layout.groups):
            if fmt.exact or chosen.kind is self.kind:
                raw = np.arange(layout.block_bytes(group)).astype(np.uint8) >> 2
                out, back = np.empty(fmt.bound(layout, group), np.uint8), np.empty_like(raw)
                used = fmt.encode(raw.data, layout, out.data, group)
                fmt.decode(out.data[:used], layout, back.data, group)
                assert used == (fmt.size(layout, group) or used)
            else:
                assert _refused(lambda group=group: fmt.size(layout, group))  # type: ignore[misc]

    def test_values_without_an_encoding_spoil_nothing(self) -> None:
        fmt = self.make_format()
        for layout in self.layouts():
            good = kv_values(layout)["gaussian"]
            itemsize = layout.block_bytes() // good.size
            for value in (np.nan, np.inf, -np.inf, 3e38):
                bad = good.copy()
                bad.flat[5] = value
                with np.errstate(over="ignore"):
                    raw = bytes_of(bad, layout)
                out = np.empty(fmt.bound(layout), np.uint8)
                if _refused(lambda raw=raw, out=out, layout=layout: fmt.encode(raw.data, layout, out.data)):  # type: ignore[misc]
                    assert not fmt.exact_for(layout)
                    continue
                back = self._decoded(fmt, self._encoded(fmt, raw, layout), layout)
                first = max(values.shape[-1] for values in rows_of(good, layout).values()) * itemsize
                plain = self._decoded(fmt, self._encoded(fmt, bytes_of(good, layout), layout), layout)
                assert back[first:].tobytes() == plain[first:].tobytes(), f"{value} reached other rows"

    def test_four_threads(self) -> None:
        fmt, layout = self.make_format(), next(self.layouts())
        raws = [bytes_of(kv_values(layout, seed)["outliers"], layout) for seed in range(4)]
        expected = [self._encoded(fmt, raw, layout).tobytes() for raw in raws]
        decoded = [self._decoded(fmt, self._encoded(fmt, raw, layout), layout).tobytes() for raw in raws]
        wrong: list[str] = []
        start = threading.Barrier(4)

        def work(which: int) -> None:
            start.wait()
            for _ in range(40):
                encoded = self._encoded(fmt, raws[which], layout)
                if encoded.tobytes() != expected[which]:
                    wrong.append(f"encode {which}")
                if self._decoded(fmt, encoded, layout).tobytes() != decoded[which]:
                    wrong.append(f"decode {which}")

        threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def _smallest(self) -> Layout:
        return min(self.layouts(), key=Layout.block_bytes)

    def _others(self, layout: Layout, dtypes: list[str]) -> Iterator[Layout]:
        group = layout.groups[0]
        changes: list[dict[str, object]] = [{"layers": (*group.layers, 7)}, {"head_dim": group.head_dim * 2}]
        changes += [{"dtype": dtype} for dtype in dtypes if dtype != group.dtype]
        if self.kind is GroupKind.GQA:
            changes += [{"order": "lpthd"}, {"kv_heads": group.kv_heads + 1}]
        for change in changes:
            yield Layout(layout.block_size, (dataclasses.replace(group, **change),))  # type: ignore[arg-type]
        yield Layout(layout.block_size * 2, (group,))
        # As many bytes, cut otherwise.
        yield Layout(layout.block_size // 2, (dataclasses.replace(group, layers=group.layers * 2),))

    def _encoded(self, fmt: Format, raw: NDArray[np.uint8], layout: Layout) -> NDArray[np.uint8]:
        out = np.zeros(fmt.bound(layout), np.uint8)
        return out[: fmt.encode(raw.data.toreadonly(), layout, out.data)]

    def _decoded(self, fmt: Format, encoded: NDArray[np.uint8], layout: Layout) -> NDArray[np.uint8]:
        out = np.full(layout.block_bytes(), _CANARY, np.uint8)
        fmt.decode(encoded.data.toreadonly(), layout, out.data)
        return out

    def _assert_refused(self, fmt: Format, encoded: NDArray[np.uint8], layout: Layout) -> None:
        out = np.full(layout.block_bytes(), _CANARY, np.uint8)
        assert _refused(lambda: fmt.decode(encoded.data, layout, out.data)), f"{encoded.size} bytes were decoded"
        assert (out == _CANARY).all(), "wrote before it had checked"

    def _assert_close(self, layout: Layout, before: NDArray[np.float64], after: NDArray[np.float64], what: str) -> None:
        relative, absolute = _ROUNDING.get(layout.groups[0].dtype, (0.0, 0.0))
        found = rows_of(after, layout)
        for name, rows in rows_of(before, layout).items():
            error = np.linalg.norm(found[name] - rows, axis=-1)
            # Rounding applies to what was decoded, which is the value and its error.
            allowed = self.row_error(rows, name) * (1 + relative)
            allowed += relative * np.linalg.norm(rows, axis=-1) + absolute * rows.shape[-1] ** 0.5
            over = error > allowed
            assert not over.any(), f"{what} {name} {layout}: {error[over][:3]} > {allowed[over][:3]}"


def kv_values(layout: Layout, seed: int = 0) -> dict[str, NDArray[np.float64]]:
    """Values of one block (group 0) by name, float64 in the block's axis order: what K and V look like, and worse."""
    dice = np.random.default_rng(seed)
    shape = _shape(layout)
    plain = dice.standard_normal(shape)
    outliers = plain * np.exp(dice.standard_normal(shape[-1]))
    outliers[..., 1] += 60
    rows = np.exp(4 * dice.standard_normal((*shape[:-1], 1)))
    return {
        "gaussian": plain,
        "outliers": outliers,
        "uneven rows": np.clip(plain * rows, -3e4, 3e4),
        "zeros": np.zeros(shape),
        "negative zeros": np.full(shape, -0.0),
        "constant": np.full(shape, -3.7),
        "one hot": np.where(np.arange(shape[-1]) == 3, 900.0, 0.0) * np.ones(shape),
        "tiny": plain * 1e-7,
        "denormal": plain * 1e-39,
    }


def bytes_of(values: NDArray[np.float64], layout: Layout) -> NDArray[np.uint8]:
    """Values as the bytes of a raw block, uint8 [block bytes]."""
    dtype = layout.groups[0].dtype
    if dtype == "bfloat16":
        bits = values.astype("<f4").view("<u4").astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2").reshape(-1).view(np.uint8)
    if dtype in ("float32", "float16"):
        return values.astype(dtype).reshape(-1).view(np.uint8)
    return np.clip(np.nan_to_num(values) * 10, 0, 120).astype(np.uint8).reshape(-1)


def values_of(raw: NDArray[np.uint8], layout: Layout) -> NDArray[np.float64]:
    """A raw block as float64, in its own axis order; one-byte types as integers."""
    dtype = layout.groups[0].dtype
    if dtype == "bfloat16":
        wide = (raw.view("<u2").astype("<u4") << 16).view("<f4")
    else:
        wide = raw.view({"float32": "<f4", "float16": "<f2"}.get(dtype, "u1"))
    return wide.astype(np.float64).reshape(_shape(layout))


def rows_of(values: NDArray[np.float64], layout: Layout) -> dict[str, NDArray[np.float64]]:
    """The rows of a block by name, float64 [rows, width] each: K and V, or latent and rope."""
    group = layout.groups[0]
    if group.kind is GroupKind.MLA:
        flat = values.reshape(-1, group.head_dim + group.rope_dim)
        both = {"latent": flat[:, : group.head_dim], "rope": flat[:, group.head_dim :]}
        return {name: rows for name, rows in both.items() if rows.size}
    planes = np.moveaxis(values, group.order.index("p"), 0)
    return {name: planes[at].reshape(-1, group.head_dim) for at, name in enumerate(("K", "V"))}


def _shape(layout: Layout) -> tuple[int, ...]:
    group = layout.groups[0]
    if group.kind is GroupKind.MLA:
        return group.block_shape(layout.block_size)
    sizes = dict(zip("lphtd", group.block_shape(layout.block_size), strict=True))
    return tuple(sizes[axis] for axis in group.order)


def _refused(verb: Callable[[], object]) -> bool:
    try:
        verb()
    except FormatMismatch:
        return True
    return False
