"""Clients of the cache service: `Client` (sync) and `AsyncClient`. Need the extra `client` (httpx).

client, async_client   the verbs, over REST; block bytes over the data port or shared memory where they can be had
calls                  what each verb sends and how its answer is read: no sockets
http, async_http       one call: deadline, retries, breaker, digest
retrying               whether to try again, and when
bearer                 the header that shows a token
sse, events            the event stream, resumed where it broke
data, shared           the data port and shared memory
errors                 what can go wrong, one tree for all of them
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtier.client.errors import ClientError
from kvtier.client.options import ClientOptions
from kvtier.client.results import Block, Event, Found, Gap, Match, Namespace, Pin, Prefetch

if TYPE_CHECKING:
    from kvtier.client.async_client import AsyncClient as AsyncClient
    from kvtier.client.client import Client as Client

__all__ = [
    "AsyncClient",
    "Block",
    "Client",
    "ClientError",
    "ClientOptions",
    "Event",
    "Found",
    "Gap",
    "Match",
    "Namespace",
    "Pin",
    "Prefetch",
]

_LAZY = {"AsyncClient": "kvtier.client.async_client", "Client": "kvtier.client.client"}


def __getattr__(name: str) -> Any:
    # A peer tier uses the data port alone, without httpx.
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_LAZY[name])
    except ModuleNotFoundError as error:
        raise ImportError(f"kvtier.client: {error.name} is missing: pip install 'kvtier[client]'") from error
    return getattr(module, name)
