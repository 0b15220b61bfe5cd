"""A prefill server in a thread, over the tiny model and a real directory, and a peer that says what a test wants."""

import asyncio
import contextlib
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE, came_true
from tiny_model import TinyModel, tiny_model

from kvtier import AsyncLLM, api
from kvtier.disaggregated import PrefillServer
from kvtier.disaggregated.handover import Handover
from kvtier.disaggregated.identity import Side
from kvtier.disaggregated.messages import MAX_FRAME, FromDecode, FromPrefill, Identity, to_frame
from kvtier.store.lookup import present

PROMPT = [1 + at % 250 for at in range(100)]
BLOCKS = 24
CHUNK = 8


class GatedModel(TinyModel):
    """Computes no token beyond `limit`, as long as that is in force."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._limit = config.max_positions
        self._changed = threading.Condition()

    def forward(self, token_ids: Any, positions: Any, *rest: Any) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: int(positions.max()) < self._limit, PATIENCE)
        return super().forward(token_ids, positions, *rest)

    def let(self, limit: int) -> None:
        with self._changed:
            self._limit = limit
            self._changed.notify_all()


def tiny_prefill_llm(
    monkeypatch: pytest.MonkeyPatch, directory: Path, remote: dict[str, Any] | None = None, **nvme: Any
) -> AsyncLLM:
    loaded = tiny_model()
    gated = replace(loaded, model=GatedModel(loaded.config))
    monkeypatch.setattr(api, "_load", lambda config: gated)
    tiering = {
        "host": {"capacity": "1MiB"},
        "nvme": {"path": str(directory), "capacity": "1MiB", "segment_size": "1MiB", "min_free": 0, **nvme},
        "remote": remote,
        "recompute_gate": False,
    }
    return AsyncLLM(tiering=tiering, num_blocks=64, block_size=4, max_running=4, token_budget=CHUNK)


class RunningPrefill:
    """Serves from construction to `stop`; `llm` stays open."""

    def __init__(self, llm: AsyncLLM, path: Path) -> None:
        self.llm = llm
        self.model: GatedModel = llm.model.model
        self.side = Side.of(llm)
        self.path = path
        self.server = PrefillServer(llm, path)
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(20)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        await self.server.serve(self._stop, ready.set)

    @property
    def identity(self) -> Identity:
        return self.side.identity

    def visible(self, tokens: list[int]) -> list[bool]:
        return present(self.llm.store.lower[0], self.side.keys(tokens), 5.0, exact=True)

    def crawl(self, handover: Handover) -> int:
        """Let one chunk after the other through until the first blocks have come; tokens that were let through."""
        seconds = 0.2
        for limit in range(CHUNK, len(PROMPT) - 2 * CHUNK, CHUNK):
            self.model.let(limit)
            # A save is reported in a later step than the one that made it, as soon as its copy is done.
            if came_true(lambda: handover.blocks, seconds):
                return limit
            seconds *= 1.6  # a slow disk needs time, not steps
        raise AssertionError("no block has come")

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()


class ScriptedPeer:
    """Accepts connections at `path` and answers each with bytes; then it keeps silent."""

    def __init__(self, path: Path, *frames: bytes) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self._frames = frames
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            with contextlib.suppress(OSError):  # it has hung up by now
                connection.sendall(b"".join(self._frames))

    def say(self, *messages: FromPrefill) -> None:
        self._connections[-1].sendall(b"".join(map(to_frame, messages)))

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for connection in self._connections:
            connection.close()


def raw_exchange(path: Path, *sent: bytes | FromDecode) -> bytes:
    """All that a server answers to these bytes until it hangs up."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(20)
        peer.connect(str(path))
        peer.sendall(b"".join(one if isinstance(one, bytes) else to_frame(one) for one in sent))
        received = b""
        while len(received) < MAX_FRAME and (part := peer.recv(1 << 16)):
            received += part
        return received
