"""Two hosts and a server, each a network namespace of this machine: what they share goes through a wire.

    a  10.77.1.2 ---- 10.77.1.1  server  10.77.2.1 ---- 10.77.2.2  b

The hosts see the server and nobody else.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["SERVER", "Hosts", "hosts", "unavailable"]

SERVER = {"a": "10.77.1.1", "b": "10.77.2.1"}
"""The server's address, as each host knows it."""
_OWN = {"a": "10.77.1.2", "b": "10.77.2.2"}


class Hosts:
    """The namespaces, from `open` to `close`."""

    def __init__(self) -> None:
        self._names = {role: f"kvt-{os.getpid()}-{role}" for role in ("a", "b", "server")}
        self._processes: list[subprocess.Popen[bytes]] = []

    def open(self) -> None:
        """Make and wire them.

        Raises:
            OSError, subprocess.CalledProcessError: this is not permitted here.
        """
        for name in self._names.values():
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        for role, address in _OWN.items():
            # Made within the namespaces: the machine's own network never sees them.
            wire = (
                "eth0",
                "netns",
                self._names[role],
                "type",
                "veth",
                "peer",
                f"eth-{role}",
                "netns",
                self._names["server"],
            )
            _ip("link", "add", *wire)
            for place, device, at in ((role, "eth0", address), ("server", f"eth-{role}", SERVER[role])):
                _ip("-n", self._names[place], "address", "add", f"{at}/24", "dev", device)
                _ip("-n", self._names[place], "link", "set", device, "up")

    def command(self, role: str, command: Sequence[str]) -> list[str]:
        """The command that runs another one on a host."""
        return ["ip", "netns", "exec", self._names[role], *command]

    def serve(self, command: Sequence[str], port: int) -> None:
        """Start a server; returns once it takes connections at this port of its own host."""
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(self.command("server", command), stdout=quiet, stderr=quiet)
        self._processes.append(process)
        probe = self.command("server", ["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}"])
        end = time.monotonic() + 60
        while subprocess.run(probe, stderr=quiet, check=False).returncode:
            assert process.poll() is None, command
            assert time.monotonic() < end, command
            time.sleep(0.1)

    def close(self) -> None:
        """End what runs on them, and let go of them. Idempotent."""
        for process in self._processes:
            process.kill()
            process.wait(20)
        self._processes.clear()
        for name in self._names.values():
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


@contextmanager
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    try:
        made.open()
        yield made
    finally:
        made.close()


def unavailable() -> str | None:
    """Why there can be no such hosts here; None: there can."""
    if shutil.which("ip") is None:
        return "no network namespaces: the command `ip` (iproute2) is missing"
    try:
        with hosts():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces: {error}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stderr=subprocess.DEVNULL)
