"""Formats: GB/s of raw bytes that one core encodes and decodes, beside a memcpy of the same bytes.

Names: `format.<id>.encode` and `format.<id>.decode`. Values are raw bytes by CPU seconds of the one thread at work;
`compression` in params is raw bytes by encoded bytes. Blocks are bf16, Gaussian with a scale per channel, more of
them than fit a core's caches. `numpy_gb_per_s` is the same work without the compiled kernels.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from harness import Cost, Measure, Report, Result, interleaved, require
from numpy.typing import NDArray

from kvtier import formats, native
from kvtier.formats import Format
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.testing.formats import bytes_of

LAYOUTS = {
    "gqa 30 x 3 x 64": Layout(16, (LayerGroup(GroupKind.GQA, tuple(range(30)), 2, 3, 64, dtype="bfloat16"),)),
    "gqa 32 x 8 x 128": Layout(16, (LayerGroup(GroupKind.GQA, tuple(range(32)), 2, 8, 128, dtype="bfloat16"),)),
    "mla 61 x 512 + 64": Layout(
        16, (LayerGroup(GroupKind.MLA, tuple(range(61)), 1, 1, 512, rope_dim=64, dtype="bfloat16"),)
    ),
}
IDS = {
    GroupKind.GQA: ("raw", "bitsplit", "int8", "int8r", "fp8", "k8v4", "int4r"),
    GroupKind.MLA: ("bitsplit", "mla8", "mla4"),
}

Block = NDArray[np.uint8]


class Work(NamedTuple):
    """Blocks of one layout, encoded by one format."""

    fmt: Format
    layout: Layout
    raw: Sequence[Block]
    coded: Sequence[Block]
    decoded: Sequence[Block]
    sizes: Sequence[int]

    def encode(self) -> None:
        for raw, out in zip(self.raw, self.coded, strict=True):
            self.fmt.encode(raw.data, self.layout, out.data)

    def decode(self) -> None:
        for coded, size, out in zip(self.coded, self.sizes, self.decoded, strict=True):
            self.fmt.decode(coded[:size].data, self.layout, out.data)

    def copy(self) -> None:
        for raw, out in zip(self.raw, self.decoded, strict=True):
            np.copyto(out, raw)


def blocks(layout: Layout, nbytes: int) -> list[Block]:
    dice = np.random.default_rng(0)
    group = layout.groups[0]
    shape = group.block_shape(layout.block_size)
    scales = np.exp(0.7 * dice.standard_normal((shape[0], *(1 for _ in shape[1:-1]), shape[-1])))
    count = max(2, nbytes // layout.block_bytes())
    return [bytes_of(dice.standard_normal(shape) * scales, layout) for _ in range(count)]


def prepared(name: str, layout: Layout, raw: list[Block], decoded: list[Block]) -> Work:
    fmt = formats.get(name)
    coded = [np.zeros(fmt.bound(layout), np.uint8) for _ in raw]
    sizes = [fmt.encode(block.data, layout, out.data) for block, out in zip(raw, coded, strict=True)]
    work = Work(fmt, layout, raw, coded, decoded, sizes)
    work.decode()
    if fmt.exact:
        require(all(np.array_equal(a, b) for a, b in zip(raw, decoded, strict=True)), f"{name} is not exact")
    return work


def by_thread(work: Callable[[], None], implementation: str) -> Measure:
    """CPU seconds of the calling thread only: what else the process does is not this format's."""

    def measure() -> Cost:
        with native.using(implementation):
            cpu, wall = time.thread_time(), time.perf_counter()
            work()
            return Cost(time.perf_counter() - wall, time.thread_time() - cpu)

    return measure


def add_format(report: Report, shape: str, work: Work, rounds: int) -> None:
    best = native.implementations()[-1]
    raw_bytes = sum(block.size for block in work.raw)
    measures = {
        "encode": by_thread(work.encode, best),
        "decode": by_thread(work.decode, best),
        "memcpy": by_thread(work.copy, best),
    }
    result = interleaved(measures, rounds)
    numpy = interleaved(
        {"encode": by_thread(work.encode, "reference"), "decode": by_thread(work.decode, "reference")},
        max(1, rounds // 5),
    )
    peer = raw_bytes / result.median("memcpy").cpu_seconds / 1e9
    for verb in ("encode", "decode"):
        params = {
            "shape": shape,
            "compression": round(raw_bytes / sum(work.sizes), 3),
            "implementation": best,
            "rounds": rounds,
            "numpy_gb_per_s": round(raw_bytes / numpy.median(verb).cpu_seconds / 1e9, 2),
        }
        value = raw_bytes / result.median(verb).cpu_seconds / 1e9
        ratio = result.cpu_ratio(verb, "memcpy")
        report.add(Result(f"format.{work.fmt.id}.{verb}", value, "GB/s", params, "memcpy", peer, ratio))


def run(report: Report, quick: bool) -> None:  # noqa: FBT001  every section's signature
    """Add `format.<id>.encode` and `format.<id>.decode` of every format on the layouts that it takes."""
    rounds, nbytes = (5, 8 << 20) if quick else (25, 64 << 20)
    for shape, layout in LAYOUTS.items():
        raw = blocks(layout, nbytes)
        decoded = [np.zeros_like(block) for block in raw]
        for name in IDS[layout.groups[0].kind]:
            add_format(report, shape, prepared(name, layout, raw, decoded), rounds)
