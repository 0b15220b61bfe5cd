"""What every benchmark shares: arguments, machine description, interleaved rounds, results as JSON and as a table."""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "DIRECTORY",
    "Cost",
    "Measure",
    "Report",
    "Result",
    "Rounds",
    "arguments",
    "forget_pages",
    "interleaved",
    "require",
    "timed",
]


DIRECTORY = Path(__file__).parents[1] / "build/bench"
"""Where benchmarks put their files unless told otherwise."""


class Cost(NamedTuple):
    """What one piece of work took: wall seconds, and CPU seconds of all threads of its process."""

    seconds: float
    cpu_seconds: float


Measure: TypeAlias = Callable[[], Cost]
"""Does one round of work and says what it took; preparation that is not to be measured is its own."""


def timed(work: Callable[[], object]) -> Cost:
    """Run `work` and measure it."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def require(truth: bool, otherwise: str) -> None:  # noqa: FBT001  reads as an assertion that -O keeps
    """Stop where the work that is measured was not done."""
    if not truth:
        raise RuntimeError(otherwise)


def forget_pages(directory: Path) -> None:
    """Make every file under `directory` durable and drop it from the page cache, so that reads come from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


@dataclass(frozen=True)
class Rounds:
    """Costs by name, one per round; round i of every name was run side by side."""

    costs: Mapping[str, Sequence[Cost]]

    def median(self, name: str) -> Cost:
        """The median wall and the median CPU seconds of a round."""
        return Cost(*(statistics.median(column) for column in zip(*self.costs[name], strict=True)))

    def fastest(self, *names: str) -> str:
        """Whose median round took the least wall time."""
        return min(names, key=lambda name: self.median(name).seconds)

    def ratio(self, name: str, peer: str) -> float:
        """How many times faster than `peer`: the median of the rounds' ratios of wall seconds."""
        pairs = zip(self.costs[name], self.costs[peer], strict=True)
        return statistics.median(theirs.seconds / ours.seconds for ours, theirs in pairs)

    def cpu_ratio(self, name: str, peer: str) -> float:
        """How many times less CPU than `peer`: the median of the rounds' ratios of CPU seconds."""
        pairs = zip(self.costs[name], self.costs[peer], strict=True)
        return statistics.median(theirs.cpu_seconds / ours.cpu_seconds for ours, theirs in pairs)


def interleaved(measures: Mapping[str, Measure], rounds: int) -> Rounds:
    """Run all measures in every round, in alternating order, after one round that is thrown away.

    What else the machine does then hits all of them alike, and a ratio within a round holds where the times do not.
    """
    names = list(measures)
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names if number % 2 else reversed(names):
            cost = measures[name]()
            if number:
                costs[name].append(cost)
    return Rounds(costs)


@dataclass(frozen=True)
class Result:
    """One figure. `ratio` > 1 means that kvtier is better than `peer`, measured in the same run.

    A peer without a value could not be measured here; its name says why.
    """

    name: str
    value: float
    unit: str
    params: Mapping[str, Any] = field(default_factory=dict)
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None


class Report:
    """Collects results, prints each as it comes, and writes the JSON file.

    Args:
        path: the JSON file, or None.
        directory: where benchmarks put their files: it should lie on the disk that is to be measured.
    """

    def __init__(self, path: Path | None, directory: Path = DIRECTORY) -> None:
        self._path = path
        self._results: list[Result] = []
        self.directory = directory

    def add(self, result: Result) -> None:
        """Take one figure."""
        self._results.append(result)
        theirs = "" if result.peer_value is None else f": {result.peer_value:.4g}"
        beside = "" if result.peer is None else f"   {result.peer}{theirs}"
        ratio = "" if result.ratio is None else f"   ratio {result.ratio:.2f}"
        print(
            f"{result.name:32} {result.value:12.4g} {result.unit:10}{beside}{ratio}  {dict(result.params)}", flush=True
        )

    def add_bandwidth(
        self, name: str, params: Mapping[str, Any], rounds: Rounds, ours: str, peer: str | None, nbytes: int
    ) -> None:
        """Take GB/s of rounds that moved `nbytes` each; `peer` is another name in `rounds`, shown as it is."""
        cost = rounds.median(ours)
        values = {
            **params,
            "rounds": len(rounds.costs[ours]),
            "cpu_s_per_gb": round(1e9 * cost.cpu_seconds / nbytes, 4),
        }
        if peer is None:
            self.add(Result(name, nbytes / cost.seconds / 1e9, "GB/s", values))
            return
        theirs = rounds.median(peer)
        values["peer_cpu_s_per_gb"] = round(1e9 * theirs.cpu_seconds / nbytes, 4)
        values["cpu_ratio"] = round(rounds.cpu_ratio(ours, peer), 3)
        gb_per_s, peer_gb_per_s = nbytes / cost.seconds / 1e9, nbytes / theirs.seconds / 1e9
        self.add(Result(name, gb_per_s, "GB/s", values, peer, peer_gb_per_s, rounds.ratio(ours, peer)))

    def write(self) -> None:
        """Write what was collected so far."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = {"machine": machine(), "results": [asdict(result) for result in self._results]}
            self._path.write_text(json.dumps(content, indent=1) + "\n")


def machine() -> dict[str, Any]:
    model = next((line for line in _cpuinfo() if line.startswith("model name")), ": unknown").split(":", 1)[1].strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="a smaller workload")
    return parser
