"""Resource limits of this process against what the tiers will ask for."""

import resource
from collections.abc import Iterator

from kvtier.config import TieringSettings
from kvtier.doctor.findings import Finding, Subject, ok, problem, shown_size, warning
from kvtier.doctor.machine import nvidia_driver
from kvtier.nvme.index import map_bytes_for

__all__ = ["limits"]

_OTHER_FILES = 64
_OTHER_MEMORY = 4 << 30
_PAGE = 4096


def limits(subject: Subject) -> Iterator[Finding]:
    """Open files, locked memory, address space, file size."""
    tiering = subject.config.tiering
    found = [finding for check in (_files, _address_space, _file_size, _locked) for finding in check(tiering)]
    yield from found or [ok("limits", "open files, address space, file size and locked memory are enough")]


def _limit(which: int) -> float:
    soft, _ = resource.getrlimit(which)
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def _files(tiering: TieringSettings) -> Iterator[Finding]:
    nvme = tiering.nvme
    needed = _OTHER_FILES + (-(-nvme.capacity // nvme.segment_size) if nvme else 0)
    if _limit(resource.RLIMIT_NOFILE) < needed:
        yield problem(
            "limits",
            f"ulimit -n is {_limit(resource.RLIMIT_NOFILE):.0f}, the tiers open up to {needed} files: reads would fail",
            f"run `ulimit -n {needed}` before, or choose a larger tiering.nvme.segment_size",
        )


def _address_space(tiering: TieringSettings) -> Iterator[Finding]:
    host = tiering.host.capacity if tiering.host else 0
    index = map_bytes_for(tiering.nvme.capacity // _PAGE) if tiering.nvme else 0
    if _limit(resource.RLIMIT_AS) < host + index + _OTHER_MEMORY:
        yield problem(
            "limits",
            f"ulimit -v is {shown_size(_limit(resource.RLIMIT_AS))}: host memory ({shown_size(host)}) and the map of "
            f"the NVMe index ({shown_size(index)}) need address space beside the program",
            "run `ulimit -v unlimited` before",
        )


def _file_size(tiering: TieringSettings) -> Iterator[Finding]:
    nvme = tiering.nvme
    needed = min(nvme.segment_size, nvme.capacity) if nvme else 0
    if _limit(resource.RLIMIT_FSIZE) < needed:
        yield problem(
            "limits",
            f"ulimit -f is {shown_size(_limit(resource.RLIMIT_FSIZE))}, a segment file has {shown_size(needed)}: "
            "the NVMe tier cannot grow",
            "run `ulimit -f unlimited` before, or choose a smaller tiering.nvme.segment_size",
        )


def _locked(tiering: TieringSettings) -> Iterator[Finding]:
    host = tiering.host.capacity if tiering.host else 0
    if nvidia_driver() and _limit(resource.RLIMIT_MEMLOCK) < host:
        yield warning(
            "limits",
            f"ulimit -l is {shown_size(_limit(resource.RLIMIT_MEMLOCK))}, host memory is {shown_size(host)}: "
            "pinning may be refused, and copies to the device are then slower",
            "run `ulimit -l unlimited` before (in a container: --ulimit memlock=-1)",
        )
