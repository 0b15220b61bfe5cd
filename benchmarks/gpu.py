"""Everything that needs a GPU, in one command: every kernel and copy path against its reference, then measured.

    python benchmarks/gpu.py [--quick] [--json PATH] [--only NAME[,NAME]] [--limit SECONDS]
    python benchmarks/gpu.py --dry-run        without a GPU: compiles every kernel for sm_80 and sm_90, runs the copy
                                              paths on simulated streams, says what would be measured

Names: checks, copy_checks, identical, kernels, copies, overlap, graphs. Needs torch, numpy and, for kernels, Triton;
uses CuPy where it is installed. What is not there is left out and said so. Ends with 1 if a check failed.

Each runs in a process of its own: an access to memory that is not there leaves a process without a device, and what
hangs would take the others' time.
"""

import argparse
import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, NamedTuple

import torch
from gpu_copies import check_copies, every_streams, measure_copies, measure_overlap
from harness import Report, Result, arguments

from kvtier.gpu import kernels
from kvtier.gpu.streams import make_streams

LIMIT_SECONDS = 480
# The longest of all work that says nothing compiles, or is done on a CPU for comparison.
SILENT_SECONDS = 150


class Failure(NamedTuple):
    """What failed, and why no figure says so."""

    name: str
    why: str | None = None


class Told(Report):
    """A report that another process keeps."""

    def __init__(self, line: Connection) -> None:
        super().__init__(None)
        self._line = line

    def add(self, result: Result) -> None:
        """See `Report.add`."""
        self._line.send(result)

    def fail(self, name: str, error: Exception | None = None) -> None:
        """Something failed."""
        self._line.send(Failure(name, None if error is None else _short(error)))


class Run:
    """The sections, on a device.

    Args:
        report: takes the figures.
        device: with its index.
        quick: smaller workloads.
    """

    def __init__(self, report: Told, device: torch.device, *, quick: bool) -> None:
        self.report, self.device, self.quick = report, device, quick

    def check(self, name: str, work: Callable[[], tuple[float, float]]) -> None:
        """One check: its error, and what that may be."""
        try:
            error, tolerance = work()
            params = {"tolerance": tolerance, "passed": error <= tolerance}
        except Exception as failure:  # noqa: BLE001 - the next check may pass
            traceback.print_exc()
            error, params = float("inf"), {"passed": False, "error": _short(failure)}
        if not params["passed"]:
            self.report.fail(name)
        self.report.add(Result(f"gpu.check.{name}", min(1e30, error), "error", params))

    def checks(self) -> None:
        """Every kernel against its float64 reference."""
        for check in import_module("kvtier.gpu.kernels.cases").checks():

            def work(check: Any = check) -> tuple[float, float]:
                checked = check.run(self.device)
                return checked.error, checked.tolerance

            self.check(check.name, work)

    def copy_checks(self) -> None:
        """Every way to copy, byte for byte."""
        for name, make in every_streams(self.device):

            def work(make: Any = make) -> tuple[float, float]:
                wrong = check_copies(make(), self.device)
                print(f"wrong bytes: {wrong}")
                return float(sum(wrong.values())), 0.0

            self.check(f"copy.{name}", work)

    def identical(self) -> None:
        """A small decoder's tokens on this device and on the CPU."""
        if not import_module("gpu_engine").check_identical(self.report, self.device):
            self.report.fail("engine.identical")

    def kernels(self) -> None:
        """Decodes beside the device's own copy, what multiplies beside its matrix rate, the rest beside torch."""
        cases = import_module("kvtier.gpu.kernels.cases")
        copy_rate, matrix_rate = copied_bytes(self.device), matrix_flops(self.device)
        sizes = cases.Sizes(batch=16) if self.quick else cases.Sizes()
        for measure in cases.measures(sizes):
            try:
                work = measure.prepare(self.device)
                seconds = cases.seconds(work.run, self.device)
                peer = None if work.peer is None else cases.seconds(work.peer, self.device)
            except Exception as failure:  # noqa: BLE001 - the next measurement may work
                traceback.print_exc()
                self.report.fail(f"gpu.{measure.name}", failure)
                continue
            self.report.add(_figure(measure, work, seconds, peer, copy_rate, matrix_rate))
            del work
            torch.cuda.empty_cache()

    def copies(self) -> None:
        """Batched copies beside a pinned memcpy."""
        measure_copies(self.report, self.device, quick=self.quick)

    def overlap(self) -> None:
        """Loads that computing hides."""
        measure_overlap(self.report, self.device, make_streams(self.device), quick=self.quick)

    def graphs(self) -> None:
        """Decode steps by replay."""
        import_module("gpu_engine").measure_graphs(self.report, self.device, quick=self.quick)


SECTIONS = ("checks", "copy_checks", "identical", "kernels", "copies", "overlap", "graphs")
_NEED_TRITON = frozenset({"checks", "kernels"})


def _figure(
    measure: Any, work: Any, seconds: float, peer: float | None, copy_rate: float, matrix_rate: float
) -> Result:
    """A measurement as the row it belongs in."""
    name, params = f"gpu.{measure.name}", {"us": round(1e6 * seconds, 1)}
    if peer is not None:
        params |= {"torch": measure.peer, "torch_us": round(1e6 * peer, 1)}
    if measure.name in ("latent_decode", "prefill", "product.prefill"):
        rate = work.flops / seconds
        params["gb_per_s"] = round(work.nbytes / seconds / 1e9, 1)
        return Result(
            name, rate / 1e12, "TFLOP/s", params, "bfloat16 matrix product", matrix_rate / 1e12, rate / matrix_rate
        )
    rate = work.nbytes / seconds
    if measure.name == "gather.to_host" and peer is not None:
        peer_rate = work.nbytes / peer
        return Result(name, rate / 1e9, "GB/s", params, measure.peer, peer_rate / 1e9, rate / peer_rate)
    return Result(name, rate / 1e9, "GB/s", params, "copy inside the device", copy_rate / 1e9, rate / copy_rate)


def copied_bytes(device: torch.device) -> float:
    """Bytes a second that a copy inside of the device reads and writes."""
    cases = import_module("kvtier.gpu.kernels.cases")
    source = torch.empty(2 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / float(cases.seconds(lambda: target.copy_(source), device))


def matrix_flops(device: torch.device) -> float:
    """Operations a second of a large bfloat16 product."""
    cases = import_module("kvtier.gpu.kernels.cases")
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    return 2 * 8192**3 / float(cases.seconds(lambda: x @ x, device))


def describe(report: Report, device: torch.device) -> None:
    """What was measured on."""
    found = torch.cuda.get_device_properties(device)
    versions = {}
    for package in ("torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    params = {"name": found.name, "multiprocessors": found.multi_processor_count, "cuda": torch.version.cuda}
    report.add(Result("gpu.device", found.total_memory / 2**30, "GiB", params | versions))


def run(report: Report, names: Sequence[str], limit: float, *, quick: bool) -> int:
    """All sections in order; how many checks failed."""
    device, began = torch.device("cuda", torch.cuda.current_device()), monotonic()
    describe(report, device)
    failed: list[str] = []
    skipped: dict[str, str] = {}
    for name in names:
        if name in _NEED_TRITON and not kernels.available():
            skipped[name] = "Triton is not installed"
        elif monotonic() - began > limit:
            skipped[name] = f"the limit of {limit:.0f} s was over"
        else:
            print(f"--- {name}, {monotonic() - began:.0f} s after the start", flush=True)
            for failure in apart(report, section, name, device, quick):
                failed.append(failure.name)
                if failure.why is not None:
                    skipped[failure.name] = failure.why
        report.write()
    params = {"failed": failed, "skipped": skipped, "seconds": round(monotonic() - began)}
    report.add(Result("gpu.failed", len(failed), "checks", params))
    report.write()
    return len(failed)


def section(line: Connection, name: str, device: torch.device, quick: bool) -> None:  # noqa: FBT001
    """One section; tells figures and failures."""
    report = Told(line)
    try:
        getattr(Run(report, device, quick=quick), name)()
    except Exception as failure:  # noqa: BLE001 - it is told
        traceback.print_exc()
        report.fail(name, failure)


def apart(
    report: Report, work: Callable[..., None], name: str, *arguments: object, silent: float = SILENT_SECONDS
) -> list[Failure]:
    """`work(line, name, *arguments)` in a process of its own; what failed.

    Args:
        report: takes its figures as they come.
        work: tells figures and failures over the line.
        name: what fails where the process does.
        arguments: of the work.
        silent: seconds without a word after which it is given up.
    """
    context = multiprocessing.get_context("spawn")
    heard, line = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(line, name, *arguments))
    process.start()
    line.close()
    failures: list[Failure] = []
    try:
        while heard.poll(silent):
            told = heard.recv()
            if isinstance(told, Failure):
                failures.append(told)
            else:
                report.add(told)
        failures.append(Failure(name, f"said nothing for {silent:.0f} s and was ended"))
    except EOFError:
        process.join(silent)
        if process.exitcode != 0:
            failures.append(Failure(name, f"its process ended with {process.exitcode}"))
    finally:
        process.kill()
        process.join()
        heard.close()
    return failures


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def sections(text: str) -> list[str]:
    """Section names, in the order in which they run."""
    names = {name.strip() for name in text.split(",")}
    unknown = names - set(SECTIONS)
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: expected some of {','.join(SECTIONS)}")
    return [name for name in SECTIONS if name in names]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", type=sections, default=",".join(SECTIONS), help="sections to run, all by default")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="start no section later (default: 480 s)")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: compile, simulate, list")
    args = parser.parse_args()
    report = Report(args.json)
    if args.dry_run:
        raise SystemExit(import_module("gpu_dry").dry_run(report, quick=args.quick))
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device is visible; --dry-run checks what can be checked without one")
    raise SystemExit(1 if run(report, args.only, args.limit, quick=args.quick) else 0)


if __name__ == "__main__":
    main()
