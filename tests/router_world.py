"""A router in a thread, on a real socket, and engines in processes of their own."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from patience import PATIENCE, until

from kvtier.config import RouterSettings
from kvtier.http.listening import listen
from kvtier.router.app import Router
from kvtier.router.fleet import Address
from kvtier.router.run import RouterServer


@contextmanager
def serving(server: uvicorn.Server) -> Iterator[tuple[str, int]]:
    """Where a server listens that runs in a thread; whoever uses it ends it."""
    taken = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    assert thread.is_alive(), "the server did not start"
    yield taken.getsockname()[:2]
    thread.join(PATIENCE)
    assert not thread.is_alive()


class RunningRouter:
    """Serves from construction to `stop`."""

    def __init__(self, places: list[Address], api_keys: tuple[str, ...] = (), **settings: Any) -> None:
        # An engine that is slow to answer on a busy machine is not down.
        settings = {"health_interval": 0.2, "connect_timeout": PATIENCE, "tokenize_timeout": PATIENCE} | settings
        self.router = Router(places, RouterSettings(**settings))
        self.server = RouterServer(self.router, api_keys)
        taken = listen("127.0.0.1", 0)
        scheme = "http" if self.router.settings.tls_cert is None else "https"
        self.url = f"{scheme}://127.0.0.1:{taken.getsockname()[1]}"
        # A connection of its own each time: a kept one may be ended by the idle limit while it is taken up.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, limits=limits, verify=False, trust_env=False)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [taken]}, daemon=True)
        self._thread.start()
        until(lambda: self.server.started or not self._thread.is_alive())
        assert self._thread.is_alive(), "the router did not start"

    @property
    def fleet(self) -> Any:
        return self.router.fleet

    def value(self, name: str, **labels: str) -> float:
        return self.router.telemetry.value(name, **labels)

    def complete(self, prompt: Any, **body: Any) -> httpx.Response:
        answer = self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2} | body)
        assert answer.status_code == 200, answer.text
        return answer

    def engine_of(self, answer: httpx.Response) -> str:
        return "http://" + answer.headers["x-kvtier-engine"]

    def at_rest(self) -> None:
        until(lambda: all((one.active, one.computing) == (0, 0) for one in self.fleet.engines))

    def stop(self) -> None:
        self.http.close()
        self.server.handle_exit(15, None)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@contextmanager
def engine_processes(
    script: Path, *arguments: Sequence[str], stderr: int | None = None
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Processes of a script that prints its URL, by these; `arguments` of each. Killed in the end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[str]] = []
    try:
        for own in arguments:
            command = [sys.executable, str(script), *own]
            processes.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
            )
        urls = [process.stdout.readline().strip() for process in processes]
        assert all(urls), "an engine did not start"
        yield dict(zip(urls, processes, strict=True))
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@contextmanager
def routed(places: list[Address], **settings: Any) -> Iterator[RunningRouter]:
    """A router that has found all of its engines up."""
    router = RunningRouter(places, **settings)
    try:
        until(lambda: all(one.up for one in router.fleet.engines))
        yield router
    finally:
        router.stop()
