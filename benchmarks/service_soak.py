"""The cache service under clients that die: nothing stays held, memory stays flat, counters add up.

    python benchmarks/service_soak.py [--minutes 10] [--clients 64] [--capacity-mib 64] [--json PATH] [--dir PATH]

`kvtier cache serve` over host memory and NVMe; clients are processes that call mixed verbs over REST, the data port
(TCP and Unix socket) and shared memory, on four times the blocks that host holds. Half of them last, in a namespace of
their own, so that their tallies can be compared with the service's; the other half are killed at random and replaced.
It ends with 1 unless all of this holds:

    no fault          no answer of 5xx but 503 with Retry-After, 504 and 507; no byte of another block
    counters          of the lasting clients: puts = stored + exists + dropped, and as many stored as the service says;
                      gets = hits + misses, likewise
    nothing is held   no lease, reservation, pin or byte in flight is left
    as before         descriptors and threads are as many as after the first clients had gone
    memory is flat    RSS at the end is at most 5 % more than after 2 minutes (of a shorter run: after a third of it)
"""

import contextlib
import json
import multiprocessing
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import httpx
from harness import DIRECTORY, Report, Result, arguments, require
from soak_client import BLOCK, CHAIN, soak

from kvtier.client.data import DataClient
from kvtier.layout import GroupKind, LayerGroup, Layout

# Blocks of a known size are read in one window: what was asked for counts once, whatever of it is found.
LAYOUT = Layout(16, (LayerGroup(GroupKind.GQA, tuple(range(16)), 2, 2, 16, dtype="float32"),))
LASTING, MORTAL = "lasting", "mortal"
WAYS = ("rest", "tcp", "unix", "shm")
KILL_SECONDS = 0.3
SAMPLE_SECONDS = 1.0
WARM_SECONDS = 5.0
FLAT = 1.05
REST_SECONDS = 30.0
PATIENCE = 120.0
# Threads of tiers, and files of segments, are made when they are first needed.
MORE_THREADS = 4
MORE_FILES = 8
_LINES = re.MULTILINE


class Service:
    """`kvtier cache serve`, seen from outside.

    Args:
        process: its own.
        url, data: REST, and block bytes over TCP.
        socket: Unix socket.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, data: str, socket: Path) -> None:
        self.addresses = {"rest": url, "tcp": data, "unix": f"unix:{socket}", "shm": f"unix:{socket}"}
        self.process = process
        self._proc = Path(f"/proc/{process.pid}")
        self._http = httpx.Client(base_url=url, timeout=30)

    def memory(self) -> tuple[int, int]:
        """Bytes that are resident, and those of them that are no shared memory."""
        text = (self._proc / "status").read_text()
        rows = {name: int(value) << 10 for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, _LINES)}
        return rows["VmRSS"], rows["RssAnon"]

    def counts(self) -> Counter[str]:
        """Threads, and descriptors by what they are: files as `file`, `memfd:...`, `socket`, `pipe`."""
        counts = Counter(threads=len(list((self._proc / "task").iterdir())))
        for fd in (self._proc / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                counts[re.sub(r":\[?\d+\]?|^/(?!memfd).*", "", fd.readlink().as_posix()) or "file"] += 1
        return counts

    def tenant(self) -> dict[str, Any]:
        """What it says of its one tenant."""
        found: dict[str, Any] = self._http.get("/v1/stats").raise_for_status().json()["tenants"][0]
        return found

    def held(self) -> dict[str, int]:
        """Everything that clients could leave behind."""
        tenant = self.tenant()
        tiers = tenant["tiers"]
        leases = tenant["leases"] + sum(tier.get("leases", 0) for tier in tiers.values())
        reservations = sum(tier.get("reservations", 0) for tier in tiers.values())
        names = ("pins", "inflight_bytes", "prefetches")
        return {"leases": leases, "reservations": reservations} | {name: tenant[name] for name in names}

    def failures(self) -> list[str]:
        """Answers that nobody should have had, of all ports and clients, those that were killed included."""
        text = self._http.get("/metrics").raise_for_status().text
        http = re.findall(r'^kvtier_http_requests_total{path="([^"]*)",status="(5\d\d)"} (\S+)', text, _LINES)
        calls = re.findall(
            r'^kvtier_service_calls_total{verb="(\w+)",outcome="error",tenant="\w+"} (\S+)', text, _LINES
        )
        wrong = [f"{path}: {status} x {count}" for path, status, count in http if status not in ("503", "504", "507")]
        return wrong + [f"{verb}: error x {count}" for verb, count in calls]

    def at_rest(self) -> dict[str, int]:
        """What is still held once everybody is gone; waits for it to be nothing."""
        until = time.monotonic() + REST_SECONDS
        while any(held := self.held().values()) and time.monotonic() < until:
            time.sleep(0.2)
        return {name: count for name, count in self.held().items() if count} if any(held) else {}


@contextlib.contextmanager
def served(directory: Path, capacity: int) -> Iterator[Service]:
    """The service, in a directory of its own; it has to end with 0."""
    socket, log = directory / "data.sock", directory / "service.log"
    config = directory / "kvtier.toml"
    config.write_text(
        f'[tiering.host]\ncapacity = {capacity}\n[tiering.nvme]\npath = "{directory}/blocks"\n'
        f'capacity = {2 * capacity}\nsegment_size = "16MiB"\nmin_free = 0\n'
        f'[service]\nport = 0\ndata_port = 0\nsocket = "{socket}"\nstate = "{directory}/state"\n'
        'inflight_bytes = "96MiB"\nmax_batch = "32MiB"\nmax_block = "4MiB"\n'
        # Full soon: what is remembered of the past up to a bound is no leak.
        "max_events = 8192\n"
    )
    command = [str(Path(sys.executable).with_name("kvtier")), "--config", str(config), "cache", "serve"]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        url = _said(process, log, r"url=(http://[\d.:]+)")
        port = _said(process, log, r"address=\('127\.0\.0\.1', (\d+)\)")
        yield Service(process, url, f"127.0.0.1:{port}", socket)
        process.send_signal(signal.SIGTERM)
        require(process.wait(60) == 0, f"the service ended with {process.returncode}: {log.read_text()[-2000:]}")
    finally:
        process.kill()
        process.wait(10)


def _said(process: "subprocess.Popen[bytes]", log: Path, pattern: str) -> str:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        found = re.search(pattern, log.read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"the service did not start: {log.read_text()[-2000:]}")


class Clients:
    """The processes that call.

    Args:
        service: that they call.
        chains: that there are.
    """

    def __init__(self, service: Service, chains: int) -> None:
        self._service = service
        self._chains = chains
        self._processes: dict[str, list[tuple[ForkServerProcess, Connection, str]]] = {LASTING: [], MORTAL: []}
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["soak_client"])
        self._started = 0
        self._dice = random.Random(1)
        self.killed = 0

    def start(self, count: int) -> None:
        """So many, half of whom last; returns once all of them have called."""
        for number in range(count):
            self._add((LASTING, MORTAL)[number % 2], WAYS[number // 2 % len(WAYS)])
        for _, pipe, way in [one for some in self._processes.values() for one in some]:
            _told(pipe, way)

    def _add(self, kind: str, way: str) -> None:
        ours, theirs = self._context.Pipe()
        self._started += 1
        arguments = (way, self._service.addresses[way], kind, self._chains, self._started, theirs)
        process = self._context.Process(target=soak, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._processes[kind].append((process, ours, way))

    def kill(self) -> None:
        """One dies, and another one comes."""
        mortal = self._processes[MORTAL]
        process, pipe, way = mortal.pop(self._dice.randrange(len(mortal)))
        process.kill()
        process.join()
        pipe.close()
        self.killed += 1
        self._add(MORTAL, way)

    def stop(self) -> dict[str, Counter[str]]:
        """All leave; their tallies by kind."""
        tallies: dict[str, Counter[str]] = {LASTING: Counter(), MORTAL: Counter()}
        everybody = [(kind, *one) for kind, some in self._processes.items() for one in some]
        for _, _, pipe, _ in everybody:
            pipe.send("stop")
        for kind, process, pipe, way in everybody:
            tally = None
            while tally is None:
                tally = _told(pipe, way)
            tallies[kind].update(tally)
            process.join(30)
            pipe.close()
        self._processes = {LASTING: [], MORTAL: []}
        return tallies

    def close(self) -> None:
        """End whoever is left."""
        for process, _, _ in [one for some in self._processes.values() for one in some]:
            process.kill()


def _told(pipe: Connection, way: str) -> dict[str, int] | None:
    """What a client says next."""
    require(pipe.poll(PATIENCE), f"a client over {way} does not come back")
    told: dict[str, int] | None = pipe.recv()
    return told


def checked(service: Service, tallies: Mapping[str, Counter[str]]) -> list[str]:
    """What is wrong with counters and answers."""
    wrong = service.failures()
    for kind, tally in tallies.items():
        wrong += [f"{kind}: {what} ({count} times)" for what, count in tally.items() if what.startswith("wrong")]
        if tally["busy without retry_after"]:
            wrong.append(f"{kind}: {tally['busy without retry_after']} x 503 without Retry-After")
        if tally["put"] != tally["stored"] + tally["exists"] + tally["dropped"]:
            wrong.append(f"{kind}: puts do not add up: {dict(tally)}")
    ours = tallies[LASTING]
    theirs = next(row for row in service.tenant()["namespaces"] if row["name"] == LASTING)
    pairs = {
        "stored": (ours["stored"], theirs["stored"]),
        "stored bytes": (ours["stored"] * BLOCK, theirs["stored_bytes"]),
        "hits": (ours["hits"], theirs["hits"]),
        "gets": (ours["asked"], theirs["hits"] + theirs["misses"]),
        "matched": (ours["matched"], theirs["matched"]),
        "matches": (ours["match"], theirs["matched"] + theirs["unmatched"]),
    }
    wrong += [f"{name}: clients say {mine}, the service {its}" for name, (mine, its) in pairs.items() if mine != its]
    return wrong


def run(service: Service, clients: Clients, count: int, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole of it; what was seen."""
    clients.start(count)
    time.sleep(WARM_SECONDS)
    first = clients.stop()
    require(not service.at_rest(), f"after the first clients: {service.held()}")
    before = service.counts()
    clients.start(count)
    began, samples = time.monotonic(), []
    settled = min(120.0, seconds / 3)
    while (elapsed := time.monotonic() - began) < seconds:
        until = time.monotonic() + SAMPLE_SECONDS
        while time.monotonic() < until:
            clients.kill()
            time.sleep(KILL_SECONDS * random.random() * 2)
        samples.append((elapsed, *service.memory()))
        if len(samples) % 15 == 0:
            resident, anonymous = samples[-1][1:]
            say(f"{elapsed:6.0f} s: RSS {resident >> 20} MiB ({anonymous >> 20} anonymous), {clients.killed} killed")
    second = clients.stop()
    left = service.at_rest()
    after = service.counts()
    tallies = {kind: first[kind] + second[kind] for kind in first}
    wrong = checked(service, tallies) + [f"{count} {name} are left" for name, count in left.items()]
    more = after - before - Counter(threads=MORE_THREADS, file=MORE_FILES)
    if more:
        wrong.append(f"{dict(more)} more than before, which was {dict(before)}")
    # Medians of a few samples: a single one may fall into a large call.
    early, late = (_median(some[:5]) for some in ([row for row in samples if row[0] >= settled], samples[-5:]))
    growth = late / early
    if growth > FLAT:
        wrong.append(f"RSS grew to {growth:.3f} of what it was after {settled:.0f} s")
    return {
        "wrong": wrong,
        "growth": growth,
        "rss": late,
        "anonymous": samples[-1][2],
        "killed": clients.killed,
        "before": before,
        "after": after,
        "tally": {kind: dict(sorted(tally.items())) for kind, tally in tallies.items()},
    }


def _median(samples: list[tuple[float, int, int]]) -> int:
    resident = sorted(row[1] for row in samples)
    return resident[len(resident) // 2]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=64, help="at a time (default: %(default)s)")
    parser.add_argument("--capacity-mib", type=int, default=64, help="of host (default: %(default)s)")
    parser.add_argument("--dir", type=Path, default=DIRECTORY, help="where results go (default: %(default)s)")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    capacity = args.capacity_mib << 20
    chains = 4 * capacity // (BLOCK * CHAIN)
    # A socket's path is short.
    directory = Path(tempfile.mkdtemp(prefix="kvt"))
    try:
        with served(directory, capacity) as service:
            with DataClient(service.addresses["tcp"]) as client:
                for name in (LASTING, MORTAL):
                    client.create_namespace(name, LAYOUT)
            clients = Clients(service, chains)
            try:
                seen = run(service, clients, args.clients, 60 * args.minutes, lambda line: print(line, flush=True))
            finally:
                clients.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(seen, indent=1))
    report = Report(args.json, args.dir)
    params = {"minutes": args.minutes, "clients": args.clients, "killed": seen["killed"]}
    report.add(Result("service.soak.rss_growth", seen["growth"], "x", params))
    report.add(Result("service.soak.faults", len(seen["wrong"]), "", params))
    report.write()
    if seen["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
