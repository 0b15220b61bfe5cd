"""The server's process: its socket, its signals, and how it ends."""

import socket
from collections.abc import Sequence

from kvtier.api import AsyncLLM
from kvtier.http.draining import DrainingServer, adopt_log
from kvtier.server.app import make_app
from kvtier.server.served import Served

__all__ = ["LLMServer", "serve"]


def serve(llm: AsyncLLM, name: str, taken: socket.socket, api_keys: Sequence[str] = ()) -> None:
    """Serve until a signal ends it. The first one drains: what runs may end, nobody else is let in. The second kills.

    Args:
        llm: stays the caller's.
        name: what clients call the model.
        taken: from `kvtier.http.listening.listen`; closed at the end.
        api_keys: see `make_app`.
    """
    adopt_log()
    LLMServer(Served(llm, name), api_keys).run(sockets=[taken])


class LLMServer(DrainingServer):
    """Serves a model until nothing is under way any more, or `server.drain_timeout` is over.

    Args:
        served: what it serves.
        api_keys: see `make_app`.
    """

    def __init__(self, served: Served, api_keys: Sequence[str] = ()) -> None:
        app = make_app(served, api_keys)
        super().__init__(app, _Sequences(served), path="/v1", fields={"model": served.name})


class _Sequences:
    """What drains: the sequences of the engine."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.drain_timeout = served.llm.config.server.drain_timeout

    @property
    def underway(self) -> int:
        return self._served.admission.inflight

    async def drain(self) -> None:
        await self._served.admission.drain()

    def abandon(self) -> None:
        self._served.llm.close()
