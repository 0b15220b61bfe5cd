"""The router's process: its socket, its signals, and how it ends."""

import socket
from collections.abc import Sequence

from kvtier.http.draining import DrainingServer, adopt_log
from kvtier.http.exposure import tls_options
from kvtier.router.app import Router, make_app

__all__ = ["RouterServer", "serve"]


class RouterServer(DrainingServer):
    """Serves until nothing is under way any more, or `router.drain_timeout` is over.

    Args:
        router: started and closed by this.
        api_keys: see `make_app`.
    """

    def __init__(self, router: Router, api_keys: Sequence[str] = ()) -> None:
        fields: dict[str, object] = {"engines": [engine.url for engine in router.fleet.engines]}
        options = tls_options(router.settings)
        super().__init__(make_app(router, api_keys), router, path="/v1", fields=fields, **options)
        self._router = router

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Look after the engines, then listen."""
        await self._router.start()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no more, then let go of the engines."""
        await super().shutdown(sockets)
        await self._router.close()


def serve(router: Router, taken: socket.socket, api_keys: Sequence[str] = ()) -> None:
    """Serve until a signal ends it: what runs may end, nobody else is let in. A second one ends it at once.

    Args:
        router: what it serves.
        taken: from `kvtier.http.listening.listen`; closed at the end.
        api_keys: see `make_app`.
    """
    adopt_log()
    RouterServer(router, api_keys).run(sockets=[taken])
