"""The machine: memory, clock, processors, accelerators."""

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from kvtier import native
from kvtier.cpu.region import PAGE, MemoryRegion
from kvtier.doctor.findings import Finding, Subject, ok, problem, shown_size, warning
from kvtier.errors import KVTierError

__all__ = [
    "clock",
    "cpu",
    "gpu",
    "hugepages",
    "memfd",
    "memory",
    "nvidia_driver",
    "page_size",
    "threads",
    "usable_cores",
]

_PROC = Path("/proc")
_SYS = Path("/sys")
_EXTRAS = {"triton": "gpu", "cupy": "cuda12 or cuda13"}
_SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "jiffies"})
_COARSE_SECONDS = 1e-5
_WANTED_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")


def memory(subject: Subject) -> Iterator[Finding]:
    """Host capacity against what this machine, or this container, has and has free."""
    host = subject.config.tiering.host
    if host is None:
        return
    total, available = _memory_total(), _meminfo("MemAvailable")
    if host.capacity > total:
        yield problem(
            "memory",
            f"tiering.host.capacity is {shown_size(host.capacity)}, this machine or container has {shown_size(total)}",
            "lower tiering.host.capacity; leave room for the model and the page cache",
        )
    elif host.capacity > available:
        yield warning(
            "memory",
            f"tiering.host.capacity is {shown_size(host.capacity)}, {shown_size(available)} are available now: "
            "the kernel may end the process when the tier fills",
            "lower tiering.host.capacity, or free memory",
        )
    else:
        yield ok("memory", f"host capacity {shown_size(host.capacity)} of {shown_size(available)} available")


def _memory_total() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = _SYS / "fs/cgroup/memory.max"
    text = group.read_text().strip() if group.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def _meminfo(name: str) -> int:
    lines = (_PROC / "meminfo").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)


def memfd(_: Subject) -> Iterator[Finding]:
    """Maps a region as the host tier does: a sealed memfd, which a worker process can map read-only."""
    try:
        with contextlib.closing(MemoryRegion(PAGE, name="doctor", writable=False)):
            pass
    except KVTierError as error:
        yield problem(
            "memfd",
            f"shared memory cannot be made: {error}",
            "allow memfd_create with sealing (a seccomp profile or a kernel below 5.1 forbids it)",
        )
    else:
        yield ok("memfd", "shared memory with seals works; the size of /dev/shm does not matter")


def hugepages(_: Subject) -> Iterator[Finding]:
    """Whether the kernel backs shared memory with huge pages where it is asked to."""
    switch = _SYS / "kernel/mm/transparent_hugepage/shmem_enabled"
    text = switch.read_text() if switch.is_file() else ""
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("", "never", "deny"):
        yield warning(
            "hugepages",
            f"huge pages for shared memory are {chosen or 'absent'}: copies from a large host tier are slower",
            f"as root: echo advise > {switch}",
        )
    else:
        yield ok("hugepages", f"shared memory may use huge pages ({chosen})")


def page_size(_: Subject) -> Iterator[Finding]:
    """Tiers align to 4 KiB."""
    size = os.sysconf("SC_PAGE_SIZE")
    if size != PAGE:
        yield warning(
            "page_size",
            f"memory pages have {size} bytes: tiers align to {PAGE}, and direct I/O may fall back to the page cache",
            "choose engine.block_size so that a block is a multiple of the page size",
        )
    else:
        yield ok("page_size", f"{size} bytes")


def clock(_: Subject) -> Iterator[Finding]:
    """Deadlines and speeds come from the monotonic clock: it must be fine and cheap to read."""
    resolution = time.get_clock_info("monotonic").resolution
    source = _SYS / "devices/system/clocksource/clocksource0/current_clocksource"
    name = source.read_text().strip() if source.is_file() else "unknown"
    if resolution > _COARSE_SECONDS or name in _SLOW_CLOCKS:
        yield warning(
            "clock",
            f"the clock source is {name}, resolution {resolution:g} s: measured speeds are unreliable",
            "let the kernel use tsc or the hypervisor's clock (kernel parameter clocksource=)",
        )
    else:
        yield ok("clock", f"{name}, resolution {resolution:g} s")


def cpu(_: Subject) -> Iterator[Finding]:
    """What the processor can do, and whether the compiled kernels are there to do it."""
    found = _cpu_flags() & set(_WANTED_FLAGS)
    flags = ", ".join(flag for flag in _WANTED_FLAGS if flag in found) or "no vector extensions"
    what = f"{platform.machine()} with {flags}"
    if not native.available():
        yield warning(
            "cpu",
            f"{what}; the compiled codecs are not installed: formats other than raw run in numpy, much slower",
            "install kvtier again, from its sources and with a C compiler at hand",
        )
    else:
        yield ok("cpu", f"{what}; compiled codecs: {native.selected()}")


def _cpu_flags() -> set[str]:
    lines = (_PROC / "cpuinfo").read_text().splitlines()
    return next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), set())


def usable_cores() -> float:
    """Cores that this process may use: its affinity, and its container's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = _SYS / "fs/cgroup/cpu.max"
    words = quota.read_text().split() if quota.is_file() else []
    return min(cores, int(words[0]) / int(words[1])) if words and words[0].isdigit() else cores


def threads(_: Subject) -> Iterator[Finding]:
    """More compute threads than cores slow every step down."""
    cores, asked = usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    computing = int(asked) if asked.isdigit() else len(os.sched_getaffinity(0))
    if computing > cores:
        yield warning(
            "threads",
            f"{computing} compute threads on {cores:g} usable cores: they wait for each other",
            f"set OMP_NUM_THREADS={max(1, int(cores))}",
        )
    else:
        yield ok("threads", f"{computing} compute threads on {cores:g} usable cores")


def nvidia_driver() -> bool:
    """Whether a CUDA driver is loaded; asks no library."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))


def gpu(subject: Subject) -> Iterator[Finding]:
    """CUDA, and the packages that make use of it."""
    wanted, usable = subject.config.model.device, nvidia_driver() and _cuda_works()
    if wanted == "cuda" and not usable:
        yield problem("gpu", 'model.device = "cuda", and no CUDA device can be used', 'set model.device = "auto"')
    elif nvidia_driver() and not usable:
        yield warning(
            "gpu", "a CUDA driver is loaded, but torch cannot use it", "install a torch build for this CUDA version"
        )
    elif not usable:
        yield ok("gpu", "no CUDA device; everything runs on the CPU")
    else:
        missing = [name for name in _EXTRAS if find_spec(name) is None]
        yield from (
            warning("gpu", f"CUDA works, {name} is missing", f'pip install "kvtier[{_EXTRAS[name].split()[0]}]"')
            for name in missing
        )
        if not missing:
            yield ok("gpu", f"CUDA works; {' and '.join(_EXTRAS)} are installed")


def _cuda_works() -> bool:
    import torch  # noqa: PLC0415 - seconds, needed only where there is a driver

    return torch.cuda.is_available()
