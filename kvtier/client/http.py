"""Calls over REST: address, token, deadline, breaker, retries."""

import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple, TypeVar
from urllib.parse import SplitResult, urlsplit

import httpx

from kvtier.client.bearer import bearer
from kvtier.client.errors import ClientError, DeadlineExceeded, Interrupted, ProtocolError, Unreachable
from kvtier.client.exchange import Call, pieces, refusal
from kvtier.client.line import Line
from kvtier.client.options import ClientOptions
from kvtier.client.retrying import Attempts
from kvtier.errors import ConfigError

__all__ = ["HttpCaller", "Session", "session", "translated"]

_T = TypeVar("_T")


@contextmanager
def translated(address: str) -> Iterator[None]:
    """Errors of httpx become those of the tree."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise Unreachable(f"{address}: {error or 'no connection in time'}: is the service up?") from error
    except httpx.TimeoutException as error:
        raise DeadlineExceeded(
            f"{address} did not answer in time: give the call more, or look at the service"
        ) from error
    except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
        raise Interrupted(f"{address} ended the connection before its answer was whole: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ProtocolError(f"{address}: {error}") from error


class Session(NamedTuple):
    """Whom a client speaks to, and how; see `session`."""

    url: str
    token: str | None
    options: ClientOptions
    context: ssl.SSLContext | None

    def arguments(self) -> dict[str, Any]:
        """Arguments of `httpx.Client` and `httpx.AsyncClient`.

        Raises:
            ConfigError: no header can carry the token.
        """
        connections = self.options.connections
        return {
            "base_url": self.url,
            "headers": bearer(self.token),
            "limits": httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            "verify": self.context or False,
            "follow_redirects": False,
            "trust_env": False,
        }


def session(url: str, token: str | None, options: ClientOptions) -> Session:
    """How to speak to the service at `url`.

    Raises:
        ConfigError: it is no URL of one, or the certificates cannot be read.
    """
    parts = _address(url)
    context = None
    if parts.scheme == "https":
        # Not for plain HTTP: to read a machine's certificates takes longer than many a call.
        try:
            context = ssl.create_default_context(cafile=options.ca_file)
        except OSError as error:
            raise ConfigError(f"ca_file {options.ca_file}: {error}: expected certificates as PEM") from error
    return Session(url.rstrip("/"), token, options, context)


def _address(url: str) -> SplitResult:
    try:
        parts, _ = urlsplit(url), httpx.URL(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        known = False
    if not known or parts.query or parts.fragment:
        raise ConfigError(f"url {url!r}: expected http://host:port or https://host:port")
    return parts


class HttpCaller:
    """Makes calls, each within its deadline. Thread-safe.

    Args:
        session: address, token, options.
        transport: instead of the network.
    """

    def __init__(self, session: Session, transport: httpx.BaseTransport | None = None) -> None:
        self._options = session.options
        self._http = httpx.Client(transport=transport, **session.arguments())
        self.line = Line(session.url, session.options)

    def run(self, call: Call[_T], timeout: float | None = None) -> _T:
        """Make a call.

        Raises:
            ClientError: it failed, and trying again did not help or was not allowed.
        """
        attempts = Attempts(self._options, timeout, idempotent=call.idempotent)
        while True:
            try:
                return self._attempt(call, attempts)
            except ClientError as error:
                time.sleep(attempts.pause(error))

    def _attempt(self, call: Call[_T], attempts: Attempts) -> _T:
        left = attempts.remaining()
        with self.line.attempt(attempts.timeout), translated(self.line.address):
            request = call.request(self._http, left, pieces(call.body) if call.body else None)
            with closing(self._http.send(request, stream=True)) as response:
                reader = call.answer(response.status_code, response.headers)
                for piece in response.iter_raw():
                    reader.take(piece)
                    attempts.remaining()
                return reader.result()

    @contextmanager
    def stream(self, path: str, params: Mapping[str, str], silence: float) -> Iterator[httpx.Response]:
        """An answer that does not end by itself; errors of its connection are those of the tree.

        Args:
            path: of the request.
            params: its query.
            silence: seconds after which a server that says nothing is taken for gone.
        """
        with (
            self.line.attempt(silence),
            translated(self.line.address),
            self._http.stream("GET", path, params=params, timeout=silence) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise refusal(response.status_code, response.headers, response.read())
            yield response

    def close(self) -> None:
        """End its connections. Idempotent."""
        self._http.close()
