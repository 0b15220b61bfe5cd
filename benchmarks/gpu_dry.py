"""What of `gpu.py` can be checked without a GPU: kernels compile, copy paths keep their order, and what is to come."""

import multiprocessing
import os
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from typing import Any, NamedTuple

import torch
from gpu_copies import check_copies
from harness import Report, Result

from kvtier.gpu import kernels
from kvtier.gpu.streams import HostStreams
from kvtier.testing.streams import SimulatedStreams

__all__ = ["dry_run"]

# Shared memory that one program may have, in bytes.
_SHARED_LIMITS = {80: 163 << 10, 90: 227 << 10}
# Kernels whose products belong on tensor cores, unless their operands are float32.
_MULTIPLY = frozenset({"decode", "prefill", "log_sums", "mass", "product"})
_SEEDS = 8


class _Compiled(NamedTuple):
    """What compiling for one architecture came to: kernels, what is wrong with them, CPU seconds."""

    count: int
    wrong: list[str]
    cpu_seconds: float


def dry_run(report: Report, *, quick: bool) -> int:
    """Everything; 1 if something failed."""
    failed = [*_compile(report), *_copy(report), *_engine(report)]
    _announce(quick=quick)
    report.add(Result("gpu.dry.failed", len(failed), "checks", {"failed": failed}))
    report.write()
    return 1 if failed else 0


def _compile(report: Report) -> list[str]:
    """`gpu.dry.compiled`: kernels by architecture, each in a process of its own."""
    if not kernels.available():
        print("kernels: Triton is not installed (extra gpu); nothing is compiled")
        return []
    failed, spawn = [], multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(_SHARED_LIMITS), mp_context=spawn) as processes:
        for arch, compiled in zip(_SHARED_LIMITS, processes.map(_compile_for, _SHARED_LIMITS), strict=True):
            failed += compiled.wrong
            params = {"arch": f"sm_{arch}", "cpu_s": round(compiled.cpu_seconds, 1)}
            report.add(Result("gpu.dry.compiled", compiled.count, "kernels", params))
    return failed


def _compile_for(arch: int) -> _Compiled:
    catalog, gather = import_module("kvtier.gpu.kernels.catalog"), import_module("kvtier.gpu.streams.gather")
    table, began = torch.empty(3, 64, dtype=torch.int64, device="meta"), os.times()
    try:
        compiled = catalog.compile_all(arch)
        compiled.append(catalog.compile_launch("runs", gather.runs_launch(table, 4096), arch))
    except Exception:  # noqa: BLE001 - the other architecture may compile
        traceback.print_exc()
        return _Compiled(0, [f"compile.sm_{arch}"], 0.0)
    # With those of Triton's assembler, which is a program of its own.
    cpu_seconds = sum(os.times()[:4]) - sum(began[:4])
    return _Compiled(len(compiled), [f"{name}.sm_{arch}" for name in _wrong(compiled, arch)], cpu_seconds)


def _wrong(compiled: list[Any], arch: int) -> Iterator[str]:
    """Kernels for another device, for more shared memory than there is, whose products miss the tensor cores, or that
    round otherwise than the host does.
    """
    for one in compiled:
        multiplies = one.name.rpartition(".")[2] in _MULTIPLY and ".float32." not in one.name
        fits = f".target sm_{arch}" in one.ptx and one.shared <= _SHARED_LIMITS[arch]
        # What codes new KV rounds after every step, as the formats do.
        rounds = not one.name.endswith(".write_kv") or "fma.rn" not in one.ptx
        if not fits or not rounds or (multiplies and "mma" not in one.ptx):
            yield one.name


def _copy(report: Report) -> list[str]:
    """`gpu.dry.copies`: wrong bytes of the copy checks, on host memory and on simulated streams in several orders."""
    failed, cpu = [], torch.device("cpu")
    candidates = [("host", HostStreams())]
    candidates += [
        (f"simulated.{seed}", SimulatedStreams(seed, eager=True, piece_bytes=2048)) for seed in range(_SEEDS)
    ]
    for name, streams in candidates:
        wrong = check_copies(streams, cpu, 8 << 10)
        if any(wrong.values()):
            failed.append(f"copies.{name}")
        report.add(Result("gpu.dry.copies", sum(wrong.values()), "wrong bytes", {"streams": name} | wrong))
    return failed


def _engine(report: Report) -> list[str]:
    """`gpu.dry.engine`: what `gpu.engine.identical` runs, the CPU beside itself."""
    same = import_module("gpu_engine").check_identical(report, torch.device("cpu"), "gpu.dry.engine")
    return [] if same else ["engine.identical"]


def _announce(*, quick: bool) -> None:
    print("on a GPU machine these would be checked and measured" + (" (--quick):" if quick else ":"))
    if kernels.available():
        cases = import_module("kvtier.gpu.kernels.cases")
        print("  checks   ", ", ".join(check.name for check in cases.checks()))
        print("  kernels  ", ", ".join(f"gpu.{measure.name}" for measure in cases.measures()))
    print("  copies    gpu.copy.to_host, gpu.copy.to_device, by torch and CuPy, single, batch and gather")
    print("  overlap   gpu.load.hidden")
    print("  engine    gpu.engine.identical, gpu.graph.decode")
