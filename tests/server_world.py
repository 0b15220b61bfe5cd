"""A server in a thread, on a real socket: over the tiny model, or over any other that is loaded."""

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import PATIENCE, until
from tiny_model import tiny_model

from kvtier import AsyncLLM, api
from kvtier.http.listening import listen
from kvtier.server.run import LLMServer
from kvtier.server.served import Served

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class RunningServer:
    """Serves from construction to `stop`."""

    def __init__(self, llm: AsyncLLM, name: str = "tiny", api_keys: Sequence[str] = ()) -> None:
        self.llm = llm
        self.served = Served(llm, name)
        self.server = LLMServer(self.served, api_keys)
        taken = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        # A connection of its own each time: a kept one may be ended by the server's idle limit while it is taken up.
        # Nothing is encrypted here, and to read a machine's certificates takes longer than most of these tests.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, limits=limits, verify=False)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [taken]}, daemon=True)
        self._thread.start()
        until(lambda: self.server.started)

    def post(self, path: str, **body: Any) -> httpx.Response:
        # Not httpx's own JSON, which does not write lone surrogates.
        headers = {"Content-Type": "application/json"}
        return self.http.post(path, content=json.dumps(body), headers=headers)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def signal(self) -> None:
        self.server.handle_exit(15, None)

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        self.http.close()
        self.signal()
        self.join()
        self.llm.close()

    def at_rest(self) -> None:
        """All blocks came back, and all places in the queue."""
        until(lambda: self.llm.stats().free_blocks == self.llm.stats().num_blocks)
        until(lambda: self.served.admission.inflight == 0)


def tiny_llm(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncLLM:
    """The tiny model, with a chat template, in an `AsyncLLM`; `settings` are of the section `server`."""
    loaded = tiny_model()
    loaded = replace(loaded, tokenizer=replace(loaded.tokenizer, chat_template=CHAT_TEMPLATE))
    monkeypatch.setattr(api, "_load", lambda config: loaded)
    tiering = {"host": {"capacity": "1MiB"}, "recompute_gate": False}
    return AsyncLLM(tiering=tiering, config={"server": settings}, num_blocks=64, block_size=4, max_running=4)


@contextmanager
def isolated(home: Path) -> Iterator[None]:
    """No configuration but the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("KVTIER_", "XDG_")):
                patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.chdir(home)
        yield


def slow_down(monkeypatch: pytest.MonkeyPatch, llm: AsyncLLM) -> threading.Event:
    """Every step takes a tenth of a second, 200 tokens thus twenty seconds, until the event is set."""
    forward, hurry = llm.model.model.forward, threading.Event()

    def slowly(*arguments: Any) -> Any:
        hurry.wait(0.1)
        return forward(*arguments)

    monkeypatch.setattr(llm.model.model, "forward", slowly)
    return hurry
