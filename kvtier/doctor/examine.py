"""All checks, one after the other."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from kvtier.doctor import disk, fit, hashing, limits, machine, remote, speed
from kvtier.doctor.findings import Finding, Subject, problem
from kvtier.errors import KVTierError

__all__ = ["CHECKS", "Check", "examine"]

Check: TypeAlias = Callable[[Subject], Iterator[Finding]]

CHECKS: dict[str, Check] = {
    "hashing": hashing.hashing,
    "dtype": fit.dtype,
    "layout": fit.layout,
    "encoding": fit.encoding,
    "policy": fit.policy,
    "capacity": fit.capacity,
    "memory": machine.memory,
    "memfd": machine.memfd,
    "hugepages": machine.hugepages,
    "page_size": machine.page_size,
    "limits": limits.limits,
    "directory": disk.directory,
    "space": disk.space,
    "filesystem": disk.filesystem,
    "direct_io": disk.direct_io,
    "index_map": disk.index_map,
    "remote": remote.remote,
    "clock": machine.clock,
    "cpu": machine.cpu,
    "threads": machine.threads,
    "gpu": machine.gpu,
    "speed": speed.speed,
}


def examine(subject: Subject, names: Sequence[str] = tuple(CHECKS)) -> Iterator[Finding]:
    """Run checks and yield what each finds, as soon as it is found.

    A check that this machine does not let run (a file of /proc is missing, the disk refuses) is a problem of its own.
    """
    for name in names:
        try:
            yield from CHECKS[name](subject)
        except (OSError, KVTierError) as error:
            yield problem(name, f"could not be checked: {error}", "mend what the message names, then run it again")
