"""What of `gpu.py` can be checked without a GPU: kernels compile, copy paths keep their order, and what is to come."""

import time
import traceback
from importlib import import_module

import torch
from gpu_copies import check_copies
from harness import Report, Result

from kvtier.gpu import kernels
from kvtier.gpu.streams import HostStreams
from kvtier.testing.streams import SimulatedStreams

__all__ = ["dry_run"]

_ARCHES = (80, 90)
_SEEDS = 8
# Of these, `--quick` compiles a few kernels; of int8r and k8v4 none, which differ from them outside of the kernels, or
# are one half of int8 and one of int4r.
_SHAPES = ("int8.128x8", "fp8.128x8", "int4r.128x8", "bfloat16.96x1", "bfloat16.192x8")


def dry_run(report: Report, *, quick: bool) -> int:
    """Everything; 1 if something failed."""
    failed = [*_compile(report, quick=quick), *_copy(report), *_engine(report)]
    _announce(quick=quick)
    report.add(Result("gpu.dry.failed", len(failed), "checks", {"failed": failed}))
    report.write()
    return 1 if failed else 0


def _compile(report: Report, *, quick: bool) -> list[str]:
    """`gpu.dry.compiled`: kernels by architecture. Quick: those that are written differently."""
    if not kernels.available():
        print("kernels: Triton is not installed (extra gpu); nothing is compiled")
        return []
    catalog, gather = import_module("kvtier.gpu.kernels.catalog"), import_module("kvtier.gpu.streams.gather")
    table, failed = torch.empty(3, 64, dtype=torch.int64, device="meta"), []
    for arch in _ARCHES:
        began, count = time.process_time(), 0
        try:
            compiled = catalog.compile_all(arch, _few if quick else bool)
            compiled.append(catalog.compile_launch("runs", gather.runs_launch(table, 4096), arch))
            count = len(compiled)
        except Exception:  # noqa: BLE001 - the other architecture may compile
            traceback.print_exc()
            failed.append(f"compile.sm_{arch}")
        params = {"arch": f"sm_{arch}", "cpu_s": round(time.process_time() - began, 1)}
        report.add(Result("gpu.dry.compiled", count, "kernels", params))
    return failed


def _few(name: str) -> bool:
    kernel, *case = name.rsplit(".", 2)
    shape = ".".join(case)
    return (
        shape in ("", "bfloat16.128x8")
        or (kernel == "product" and shape in ("bfloat16.16", "bfloat16.512"))
        or (kernel in ("decode.split", "prefill", "write") and shape in _SHAPES)
    )


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
