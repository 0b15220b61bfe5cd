"""Cache services as processes of their own, which can be killed and frozen.

They are forked from one process that has imported everything: a service is there in a tenth of a second.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_LINE = re.compile(r"address=\('127\.0\.0\.1', (\d+)\)|url=https?://(127\.0\.0\.1:\d+)")


class Nursery:
    """Where services are forked; all of them end with it."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def fork(self, log: Path, config: dict[str, Any]) -> int:
        """The process id of a service with these settings."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"log": str(log), "config": config}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate("", timeout=20)


class Daemon:
    """One service. It is reached through its Unix socket, which stays the same, or through ports, which do not."""

    def __init__(self, nursery: Nursery, path: Path, *, host: str = "64MiB", **service: Any) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.socket = path / "data.sock"
        self._log = path / "log"
        self._nursery = nursery
        ports = {
            "port": 0,
            "data_port": 0,
            "socket": str(self.socket),
            "state": str(path / "state"),
            "drain_timeout": 1,
        }
        self._config = {"service": ports | service, "tiering": {"host": {"capacity": host}}}
        self.pid = 0
        self.start()

    def start(self) -> None:
        """Again without blocks; state, and with it namespaces, stays."""
        self._log.unlink(missing_ok=True)
        self.pid = self._nursery.fork(self._log, self._config)
        end = time.monotonic() + 30
        while not self._told():
            assert time.monotonic() < end, self._log.read_text() if self._log.exists() else "no log"
            time.sleep(0.01)

    def _told(self) -> dict[str, str]:
        """Port of block bytes and URL, as the log has them once both are there."""
        found = list(_LINE.finditer(self._log.read_text())) if self._log.exists() else []
        values = {("data" if match[1] else "url"): match[1] or match[2] for match in found}
        return values if len(values) == 2 else {}

    @property
    def url(self) -> str:
        scheme = "http" if self._config["service"].get("tls_cert") is None else "https"
        return f"{scheme}://{self._told()['url']}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._told()['data']}"

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            while Path(f"/proc/{self.pid}").exists():
                time.sleep(0.005)
            self.pid = 0
            self.socket.unlink(missing_ok=True)


@contextmanager
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    try:
        yield made
    finally:
        made.close()


def _serve(order: dict[str, Any]) -> None:
    from kvtier.cli.logs import setup_logging
    from kvtier.config import load_config
    from kvtier.service.run import serve

    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    setup_logging("info", "text")
    config = load_config(order["config"], environ={}, search=False).config
    os._exit(serve(config.service, config.tiering))


def _main() -> None:
    import kvtier.service.run  # noqa: F401 - what every service needs

    children: list[int] = []
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                _serve(json.loads(line))
            finally:
                # Its traceback is in the log; the parent's loop is not its own.
                traceback.print_exc()
                os._exit(9)
        children.append(pid)
        print(pid, flush=True)
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _main()
