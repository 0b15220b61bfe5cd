"""What every format that codes row by row shares: a plan made once per layout, then two calls of the kernels."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier import native
from kvtier.errors import FormatMismatch
from kvtier.formats.base import check_encoded, check_room
from kvtier.formats.header import HEADER_BYTES, BlockHeader, describe, payload_bytes
from kvtier.formats.rotation import ROTATION_SEED, Rotation, rotation, span
from kvtier.layout import DTYPE_BYTES, GroupKind, LayerGroup, Layout
from kvtier.native.rows import DTYPE_CODES, MAX_WIDTH, Codec, Run, limit, record_bytes

__all__ = ["FLOATS", "Field", "RowFormat"]

FLOATS = ("float32", "bfloat16", "float16")

_AXES = "lphtd"


class Field(NamedTuple):
    """How one kind of row is coded.

    group: elements that share a scale, 0 for the whole row. rotation: 1 for none, 0 for the largest span.
    """

    codec: Codec
    group: int = 0
    rotation: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The rows of one field in a block: K, V, latents or rope keys."""

    name: str
    codec: Codec
    run: Run
    rotation: Rotation | None


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Everything about blocks of one layout that does not depend on their bytes."""

    header: BlockHeader
    packed: NDArray[np.uint8]
    dtype: int
    parts: tuple[_Part, ...]
    nbytes: int


class RowFormat:
    """Base of the formats that code a block row by row. Implements `kvtier.formats.Format`.

    A block is its header and then, in the order of the raw block, one record per row (`kvtier.native.rows`).
    A subclass says what it is called and how it codes its two kinds of rows: (K, V), or (latent, rope key).

    A value that is not finite, or too large for a float16 scale, makes `encode` raise `FormatMismatch`: store
    such a block as `raw`. Zeros stay zero; what is below a row's step decodes to zero. The records themselves carry no
    checksum: every tier keeps one over the whole encoded block.
    """

    id: str
    fidelity: int
    sink: str
    kind = GroupKind.GQA
    dtypes: tuple[str, ...] = FLOATS
    exact = False

    def fields(self, chosen: LayerGroup) -> tuple[Field, Field]:
        """How the two kinds of rows of this layer group are coded."""
        raise NotImplementedError

    def size(self, layout: Layout, group: int = 0) -> int:
        """Encoded bytes of one block. Raises `FormatMismatch` for a layout that this format cannot code."""
        return _plan(self, layout, group).nbytes

    def bound(self, layout: Layout, group: int = 0) -> int:
        """The same as `size`."""
        return self.size(layout, group)

    def exact_for(self, layout: Layout, group: int = 0) -> bool:
        """Whether blocks of this layout pass through untouched."""
        return all(part.codec is Codec.COPY for part in _plan(self, layout, group).parts)

    def encode(self, src: memoryview, layout: Layout, out: memoryview, group: int = 0) -> int:
        """Encode a raw block; `out` is undefined if this raises.

        Raises:
            FormatMismatch: wrong layout or lengths, or a value that this format cannot express.
        """
        plan = _plan(self, layout, group)
        check_encoded(self.id, src, layout, out, plan.nbytes, group)
        kernels = native.kernels()
        for part in plan.parts:
            signs = None if part.rotation is None else part.rotation.forward
            refused = kernels.encode_rows(part.codec, plan.dtype, src, out, part.run, signs)
            if refused >= 0:
                raise FormatMismatch(
                    f"{self.id}: row {refused} of the block's {part.name} holds a value that is not finite or beyond "
                    f"{limit(part.codec):.4g} in magnitude; store this block as raw"
                )
        np.frombuffer(out, np.uint8, HEADER_BYTES)[:] = plan.packed
        return plan.nbytes

    def decode(self, src: memoryview, layout: Layout, out: memoryview, group: int = 0) -> None:
        """Decode into a raw block.

        Raises:
            FormatMismatch: `src` is no block of this format and layout, or `out` is too small; nothing is written.
        """
        plan = _plan(self, layout, group)
        payload = payload_bytes(self.id, src, plan.header)
        if payload != plan.header.payload:
            raise FormatMismatch(f"{self.id}: payload of {payload} bytes, expected {plan.header.payload}; drop it")
        check_room(self.id, out, layout.block_bytes(group))
        kernels = native.kernels()
        for part in plan.parts:
            signs = None if part.rotation is None else part.rotation.backward
            kernels.decode_rows(part.codec, plan.dtype, src, out, part.run, signs)


@functools.lru_cache(maxsize=256)
def _plan(fmt: RowFormat, layout: Layout, group: int) -> _Plan:
    chosen = layout.groups[group]
    _refuse_unsuited(fmt, chosen)
    fields = [_resolved(field, width) for field, width in zip(fmt.fields(chosen), _widths(chosen), strict=True)]
    parts_of = _mla_parts if chosen.kind is GroupKind.MLA else _gqa_parts
    parts = parts_of(fields, layout, chosen)
    last = max(parts, key=lambda part: part.run.coded_offset).run
    nbytes = HEADER_BYTES + last.outer * last.coded_outer
    rotated = next((part.run.rotation for part in parts if part.rotation is not None), 0)
    header = describe(
        fmt.id,
        layout,
        group,
        nbytes - HEADER_BYTES,
        scale_group=parts[0].run.group,
        rotation=rotated,
        seed=ROTATION_SEED if rotated else 0,
    )
    return _Plan(header, np.frombuffer(header.pack(), np.uint8), DTYPE_CODES[chosen.dtype], parts, nbytes)


def _refuse_unsuited(fmt: RowFormat, chosen: LayerGroup) -> None:
    if chosen.kind is not fmt.kind:
        raise FormatMismatch(f"{fmt.id}: layer group of kind {chosen.kind}, expected {fmt.kind}; choose another format")
    if chosen.dtype not in fmt.dtypes:
        raise FormatMismatch(f"{fmt.id}: dtype {chosen.dtype}, expected {', '.join(fmt.dtypes)}; store it as raw")
    if sorted(chosen.order) != sorted(_AXES) or not chosen.order.endswith("d"):
        raise FormatMismatch(
            f"{fmt.id}: axis order {chosen.order!r}, expected an order of {_AXES!r} that ends with 'd' (head_dim "
            "contiguous); store it as raw or bitsplit"
        )
    if max(_widths(chosen)) > MAX_WIDTH:
        raise FormatMismatch(f"{fmt.id}: rows of {max(_widths(chosen))} elements, expected at most {MAX_WIDTH}")


def _widths(chosen: LayerGroup) -> tuple[int, int]:
    if chosen.kind is GroupKind.MLA:
        return chosen.head_dim, chosen.rope_dim
    return chosen.head_dim, chosen.head_dim


def _resolved(field: Field, width: int) -> Field:
    """The field with its numbers for this width: a group is the wanted one, or the largest divisor below it."""
    if width == 0:
        return field
    wanted = min(field.group or width, width)
    group = next(size for size in range(wanted, 0, -1) if width % size == 0)
    turned = 1 if field.rotation == 1 else span(width)
    return Field(field.codec, group, min(turned, field.rotation or turned))


def _part(name: str, field: Field, run: Run) -> _Part:
    return _Part(name, field.codec, run, rotation(run.width, run.rotation) if run.rotation > 1 else None)


def _gqa_parts(fields: Sequence[Field], layout: Layout, chosen: LayerGroup) -> tuple[_Part, ...]:
    sizes = dict(zip(_AXES, chosen.block_shape(layout.block_size), strict=True))
    before, _, after = chosen.order.partition("p")
    outer, inner, width = prod(sizes[axis] for axis in before), prod(sizes[axis] for axis in after[:-1]), sizes["d"]
    itemsize = DTYPE_BYTES[chosen.dtype]
    records = [record_bytes(field.codec, width, field.group, itemsize) for field in fields]
    row = width * itemsize
    return tuple(
        _part(
            name,
            field,
            Run(
                outer=outer,
                inner=inner,
                width=width,
                group=field.group,
                rotation=field.rotation,
                raw_offset=place * inner * row,
                raw_outer=2 * inner * row,
                raw_row=row,
                coded_offset=HEADER_BYTES + place * inner * records[0],
                coded_outer=inner * sum(records),
                coded_row=records[place],
            ),
        )
        for place, (name, field) in enumerate(zip(("K", "V"), fields, strict=True))
    )


def _mla_parts(fields: Sequence[Field], layout: Layout, chosen: LayerGroup) -> tuple[_Part, ...]:
    itemsize = DTYPE_BYTES[chosen.dtype]
    widths = _widths(chosen) if chosen.rope_dim else (chosen.head_dim,)
    records = [
        record_bytes(field.codec, width, field.group, itemsize) for field, width in zip(fields, widths, strict=False)
    ]
    rows = len(chosen.layers) * layout.block_size
    return tuple(
        _part(
            name,
            field,
            Run(
                outer=1,
                inner=rows,
                width=width,
                group=field.group,
                rotation=field.rotation,
                raw_offset=place * chosen.head_dim * itemsize,
                raw_outer=0,
                raw_row=sum(widths) * itemsize,
                coded_offset=HEADER_BYTES + place * records[0],
                coded_outer=rows * sum(records),
                coded_row=sum(records),
            ),
        )
        for place, (name, field, width) in enumerate(zip(("latents", "rope keys"), fields, widths, strict=False))
    )
