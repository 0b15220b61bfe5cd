"""Every kernel, compiled ahead of time and without a GPU: finds what the interpreter does not, such as a wrong type.

The launches are prepared by the launchers themselves, from tensors without memory (device "meta"), and specialised as
Triton does at run time: 1 and None are compiled in, pointers and multiples of 16 are known to be aligned. Needs a
process without TRITON_INTERPRET.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtier.errors import ConfigError
from kvtier.gpu.kernels.batch import DecodeBatch, PrefillBatch, tile_shape
from kvtier.gpu.kernels.block_mass import bounds_launch, mass_launches
from kvtier.gpu.kernels.gather import copy_launch
from kvtier.gpu.kernels.int8_product import product_launches
from kvtier.gpu.kernels.latent_decode import latent_launches
from kvtier.gpu.kernels.launch import INTERPRETED, Launch
from kvtier.gpu.kernels.paged_decode import decode_launches
from kvtier.gpu.kernels.paged_prefill import most_rows, prefill_launch
from kvtier.gpu.kernels.quantized_pool import CODINGS, QuantizedPool
from kvtier.gpu.kernels.rows import LayerKV, raw_layer, raw_rows
from kvtier.gpu.kernels.write_kv import write_launch
from kvtier.layout import GroupKind, LayerGroup, Layout

__all__ = ["Compiled", "Entry", "compile_all", "compile_launch", "entries"]

_META = torch.device("meta")
_SIGNS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_TOKENS, _BLOCKS, _BLOCK_SIZE, _LAYERS = 64, 4096, 16, 2


class Entry(NamedTuple):
    """A case of a launcher. Names are unique and say what it is of; `prepare` makes its launches."""

    name: str
    prepare: Callable[[], list[Launch]]


class Compiled(NamedTuple):
    """One compiled kernel.

    name: of the entry, with the kernel's own. shared: bytes of shared memory. ptx: the code.
    """

    name: str
    shared: int
    ptx: str


def entries() -> Iterator[Entry]:
    """Every kernel in the types and shapes that models use."""
    for dtype, width, group in (
        (torch.bfloat16, 128, 8),
        (torch.bfloat16, 64, 3),
        (torch.float16, 80, 1),
        (torch.bfloat16, 96, 1),
        (torch.bfloat16, 192, 8),
        (torch.bfloat16, 256, 16),
        (torch.float32, 128, 4),
        (torch.float32, 256, 16),
    ):
        yield from _attention(f"{_name(dtype)}.{width}x{group}", _raw, dtype, width, group)
    for coding in CODINGS:
        for width, group in ((128, 8), (256, 16)):
            yield from _attention(f"{coding}.{width}x{group}", _coded(coding), torch.bfloat16, width, group)
    for dtype in (torch.bfloat16, torch.float32):
        for heads in (16, 128):
            yield Entry(f"latent.{_name(dtype)}.{heads}", _bound(_latent, dtype, heads))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows in (16, 64, 512):
            yield Entry(f"product.{_name(dtype)}.{rows}", _bound(_product, dtype, rows))
    yield Entry("gather", _bound(_gather, True))
    yield Entry("scatter", _bound(_gather, False))
    yield Entry("bounds", _bounds)


def compile_all(arch: int, chosen: Callable[[str], bool] = bool) -> list[Compiled]:
    """Compile for a compute capability: 80 (A100), 89 (L4, RTX 40), 90 (H100, H200) and the like.

    Args:
        arch: ten times the compute capability.
        chosen: takes an entry's name; False leaves it out.

    Raises:
        ConfigError: this process interprets kernels.
    """
    return [
        compile_launch(f"{entry.name}.{launch.kernel.fn.__name__.strip('_')}", launch, arch)
        for entry in entries()
        if chosen(entry.name)
        for launch in entry.prepare()
    ]


def compile_launch(name: str, launch: Launch, arch: int) -> Compiled:
    """Compile one launch for a compute capability. Raises `ConfigError` if this process interprets kernels."""
    if INTERPRETED:
        raise ConfigError("TRITON_INTERPRET is set: this process interprets kernels; unset it to compile them")
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for at, argument in enumerate(launch.kernel.arg_names):
        value = launch.constants.get(argument, launch.arguments.get(argument))
        if argument in launch.constants or value is None or (isinstance(value, int) and value == 1):
            signature[argument], constants[argument] = "constexpr", value
            continue
        signature[argument], aligned = _signature(value)
        if aligned:
            attributes[at,] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(launch.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        options=launch.options,
    )
    return Compiled(name, compiled.metadata.shared, compiled.asm["ptx"])


def _signature(value: Tensor | int | float) -> tuple[str, bool]:  # noqa: PYI041 - mypy tells int from float here
    """Triton's name of a type, and whether the compiler may take the value for a multiple of 16."""
    if isinstance(value, Tensor):
        return _SIGNS[value.dtype], True
    if isinstance(value, float):
        return "fp32", False
    return ("i32" if -(1 << 31) <= value < 1 << 31 else "i64"), value % 16 == 0


def _attention(
    name: str,
    make: Callable[[torch.dtype, int, int], LayerKV],
    dtype: torch.dtype,
    width: int,
    group: int,
) -> Iterator[Entry]:
    kv_heads = 2

    def queries() -> Tensor:
        return _empty(_TOKENS, group * kv_heads, width, dtype=dtype)

    def kv() -> LayerKV:
        return make(dtype, width, kv_heads)

    def decode(splits: int, window: int | None) -> list[Launch]:
        batch = _decode_batch(4096)
        return decode_launches(queries(), kv(), batch, queries(), scale=0.1, window=window, splits=splits)

    def prefill(tokens: int) -> list[Launch]:
        batch = _prefill_batch(tile_shape(tokens, group, most_rows(kv(), dtype))[0])
        return [prefill_launch(queries(), kv(), batch, queries(), scale=0.1, window=None)]

    def mass() -> list[Launch]:
        asked, tables = _empty(8, 4, group * kv_heads, width, dtype=dtype), _ints(8, 64)
        return mass_launches(asked, kv().key, tables, _ints(8), _empty(8, kv_heads, 64), scale=0.1)

    def write() -> list[Launch]:
        new = _empty(_TOKENS, kv_heads, width, dtype=dtype)
        return [write_launch(new, new, kv(), _empty(_TOKENS, dtype=torch.int64))]

    yield Entry(f"decode.{name}", lambda: decode(1, None))
    yield Entry(f"decode.split.{name}", lambda: decode(8, 1024))
    yield Entry(f"prefill.{name}", lambda: prefill(512))
    yield Entry(f"prefill.short.{name}", lambda: prefill(4))
    yield Entry(f"mass.{name}", mass)
    yield Entry(f"write.{name}", write)


def _raw(dtype: torch.dtype, width: int, kv_heads: int) -> LayerKV:
    pool = _empty(_BLOCKS, _LAYERS, 2, kv_heads, _BLOCK_SIZE, width, dtype=dtype)
    return raw_layer(pool[:, 1, 0], pool[:, 1, 1])


def _coded(coding: str) -> Callable[[torch.dtype, int, int], LayerKV]:
    def make(_: torch.dtype, width: int, kv_heads: int) -> LayerKV:
        group = LayerGroup(GroupKind.GQA, tuple(range(_LAYERS)), 2, kv_heads, width)
        return QuantizedPool(Layout(_BLOCK_SIZE, (group,)), _BLOCKS, coding, _META).layer(1)

    return make


def _latent(dtype: torch.dtype, heads: int) -> list[Launch]:
    q, out = _empty(_TOKENS, heads, 576, dtype=dtype), _empty(_TOKENS, heads, 512, dtype=dtype)
    cache = _empty(_BLOCKS, _LAYERS, _BLOCK_SIZE, 576, dtype=dtype)[:, 1]
    rows = raw_rows(cache.unsqueeze(1))
    new = _empty(_TOKENS, 1, 576, dtype=dtype)
    return [
        *latent_launches(q, cache, _decode_batch(4096), out, scale=0.1, splits=1),
        *latent_launches(q, cache, _decode_batch(4096), out, scale=0.1, splits=8),
        write_launch(new, None, LayerKV(rows, rows), _empty(_TOKENS, dtype=torch.int64)),
    ]


def _product(dtype: torch.dtype, rows: int) -> list[Launch]:
    """Split and whole of few rows, the latter with a bias."""
    x, weight = _empty(rows, 4096, dtype=dtype), _empty(1024, 4096, dtype=torch.int8)
    scales, out = _empty(1024, dtype=dtype), _empty(rows, 1024, dtype=dtype)
    few = product_launches(x, weight, scales, None, out, 8) if rows <= 64 else []
    return [*few, *product_launches(x, weight, scales, scales, out, 1)]


def _gather(gather: bool) -> list[Launch]:  # noqa: FBT001
    pool = _empty(_BLOCKS, 1, 1 << 16, dtype=torch.uint8)
    return [copy_launch(pool, _ints(64), _empty(64, 1, 1 << 16, dtype=torch.uint8), gather=gather)]


def _bounds() -> list[Launch]:
    key = _raw(torch.bfloat16, 128, 2).key
    least = _empty(64, 2, 128)
    return [bounds_launch(key, _ints(64), _ints(64), least, least)]


def _decode_batch(longest: int) -> DecodeBatch:
    return DecodeBatch(_ints(_TOKENS), _ints(_TOKENS, 512), _ints(_TOKENS), longest)


def _prefill_batch(rows: int) -> PrefillBatch:
    return PrefillBatch(_ints(8, 2), _ints(4), _empty(8, dtype=torch.int64), _ints(4), _ints(4, 512), _ints(4), rows)


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=_META)


def _ints(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int32)


def _bound(function: Callable[..., list[Launch]], *arguments: object) -> Callable[[], list[Launch]]:
    return lambda: function(*arguments)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
