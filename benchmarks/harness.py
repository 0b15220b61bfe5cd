"""What every benchmark shares: arguments, machine description, results as JSON and as a table."""

import argparse
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Report", "Result", "arguments"]


@dataclass(frozen=True)
class Result:
    """One figure. `ratio` > 1 means that kvtier is better than `peer`, measured in the same run."""

    name: str
    value: float
    unit: str
    params: Mapping[str, Any] = field(default_factory=dict)
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None


class Report:
    """Collects results, prints each as it comes, and writes the JSON file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._results: list[Result] = []

    def add(self, result: Result) -> None:
        self._results.append(result)
        beside = "" if result.peer is None else f"   {result.peer}: {result.peer_value:.4g}"
        ratio = "" if result.ratio is None else f"   ratio {result.ratio:.2f}"
        print(
            f"{result.name:32} {result.value:12.4g} {result.unit:10}{beside}{ratio}  {dict(result.params)}", flush=True
        )

    def write(self) -> None:
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
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="a smaller workload")
    return parser
