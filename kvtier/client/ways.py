"""Ways: how block bytes reach the service: shared memory, Unix socket, data port; REST where none of them is there."""

import ipaddress
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from kvtier.client.data import DataClient
from kvtier.client.errors import ClientError, Unreachable
from kvtier.client.exchange import Call, read_json
from kvtier.client.http import Session
from kvtier.client.line import Line
from kvtier.client.retrying import Attempts

__all__ = ["Offer", "Ways", "offered"]

_T = TypeVar("_T")

# Where nothing was offered, or nothing of it answered, it is asked for again after so many seconds.
_PAUSE = 30.0
# A port that takes connections and answers nothing must not use up the time of the call that tries it.
_HELLO_SECONDS = 1.0


class Offer(NamedTuple):
    """What a service says of its other ports."""

    port: int | None
    socket: str | None


def offered() -> Call[Offer]:
    """Ask for them; a service that does not know the question has none."""
    return Call(
        "GET",
        "/v1/data",
        read_json(lambda told: Offer(told["port"], told["socket"])),
        missing={"unknown_path": Offer(None, None)},
    )


class Ways:
    """The fastest way that can be had. Thread-safe.

    A Unix socket is tried on the own machine only: a token is not sent to whatever listens at a path that a service
    elsewhere names.

    Args:
        session: of the REST port: the data port is at the same host, has TLS where that has, and takes the same token.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._client: DataClient | None = None
        self._line: Line | None = None
        self._asked_at = -math.inf

    @property
    def name(self) -> str:
        """The way that is in use: shared memory, unix, data or rest."""
        client = self._client
        if client is None:
            return "rest"
        if client.shares_memory:
            return "shared memory"
        return "unix" if client.address.startswith("unix:") else "data"

    @property
    def due(self) -> bool:
        """Whether to ask what the service offers."""
        if self._session.options.data == "never" or self._client is not None:
            return False
        return time.monotonic() - self._asked_at >= _PAUSE

    def choose(self, offer: Offer, timeout: float) -> None:
        """Connect to the fastest of the ports that answers."""
        with self._lock:
            if not self.due:
                return
            self._asked_at = time.monotonic()
            for address in self._addresses(offer):
                client = self._made(address)
                try:
                    client.connect(timeout=min(timeout, _HELLO_SECONDS))
                except ClientError:
                    client.close()
                else:
                    self._client, self._line = client, Line(address, self._session.options)
                    return

    def _addresses(self, offer: Offer) -> list[str]:
        host = urlsplit(self._session.url).hostname or ""
        addresses = []
        if offer.socket is not None and _is_loopback(host) and Path(offer.socket).is_socket():
            addresses.append(f"unix:{offer.socket}")
        if offer.port is not None:
            addresses.append(f"[{host}]:{offer.port}" if ":" in host else f"{host}:{offer.port}")
        return addresses

    def _made(self, address: str) -> DataClient:
        options = self._session.options
        return DataClient(
            address,
            self._session.token,
            timeout=options.timeout,
            context=None if address.startswith("unix:") else self._session.context,
            shared=False if options.data == "socket" else None,
            verify=True,
        )

    def move(self, verb: Callable[[DataClient, float], _T], attempts: Attempts) -> _T:
        """One attempt of a verb.

        Raises:
            Unreachable: there is no such way now: take REST. The next call looks for another one.
        """
        client, line = self._client, self._line
        if client is None or line is None:
            raise Unreachable("no port but REST's answers")
        try:
            with line.attempt(attempts.timeout):
                return verb(client, attempts.remaining())
        except Unreachable:
            self._lose(client)
            raise

    def _lose(self, client: DataClient) -> None:
        with self._lock:
            if self._client is client:
                self._client, self._asked_at = None, -math.inf
        client.close()

    def close(self) -> None:
        """End its connection. Idempotent."""
        with self._lock:
            if self._client is not None:
                self._client.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
