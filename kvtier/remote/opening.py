"""From the `tiering.remote` section of the configuration to an open tier."""

import importlib
import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast
from urllib.parse import SplitResult, urlsplit

from kvtier.config.remote import RemoteSettings
from kvtier.errors import ConfigError
from kvtier.keys import STORE_KEY_BYTES
from kvtier.metrics import Metrics
from kvtier.remote.backend import Backend
from kvtier.remote.counting import Counts
from kvtier.remote.envelope import record_name
from kvtier.remote.tier import RemoteOptions, RemoteTier

__all__ = ["Opener", "answer_seconds", "open_remote", "secret_of"]

Opener = Callable[[SplitResult, RemoteSettings, Counts], Backend]
"""What each kind of remote store brings: from its URL to a backend."""


class _Kind(NamedTuple):
    """opener: "module:function". extra: of this package, that it needs; "": none. probe, share: see `RemoteOptions`."""

    opener: str
    extra: str = ""
    probe: float = 0.05
    share: int = 16 << 20


_VALKEY = _Kind("kvtier.remote.valkey.opening:open_backend")
_OBJECTS = _Kind("kvtier.remote.objects.opening:open_backend", "objects", probe=0.5, share=4 << 20)
_PEER = _Kind("kvtier.remote.peer.opening:open_backend", "client", probe=0.25)
_KINDS: Mapping[str, _Kind] = {
    **{f"{name}{more}": _VALKEY for name in ("valkey", "redis") for more in ("", "s", "+cluster", "s+cluster")},
    **dict.fromkeys(("s3", "gs", "az", "file", "memory"), _OBJECTS),
    **dict.fromkeys(("kvtier", "kvtiers"), _PEER),
}
# Servers of small values hold everybody else up while they send a large one.
_LARGEST = 256 << 20


def open_remote(settings: RemoteSettings, metrics: Metrics | None = None, *, name: str = "remote") -> RemoteTier:
    """Open the configured remote tier. A server that is not up yet is waited for by nobody: until then all is a miss.

    Args:
        settings: where it is, and how it is used.
        metrics: where it counts.
        name: the tier's, in metrics and errors.

    Raises:
        ConfigError: the URL, an option or a file does not do, or an optional part is not installed.
        TierUnavailable: the server is up and refuses: password, certificate, protocol.
    """
    metrics = metrics or Metrics()
    kind, backend = _open(settings, Counts(metrics, name))
    options = RemoteOptions(
        timeout=settings.timeout,
        threads=settings.connections,
        absent_ttl=settings.absent_ttl,
        capacity_bytes=settings.capacity or 0,
        largest=_LARGEST,
        probe=kind.probe,
        share=kind.share,
    )
    return RemoteTier(backend, options, metrics=metrics, name=name)


def answer_seconds(settings: RemoteSettings) -> float:
    """Open the configured store and ask it for one record; seconds that the second of two questions took.

    Raises:
        ConfigError: see `open_remote`.
        TierUnavailable, TierTimeout: it cannot be reached, refuses, or does not answer within `settings.timeout`.
    """
    _, backend = _open(settings, Counts(Metrics(), "probe"))
    try:
        for _ in range(2):  # the first one connects
            asked = time.monotonic()
            backend.exists([record_name(bytes(STORE_KEY_BYTES), exact=True)], asked + settings.timeout)
        return time.monotonic() - asked
    finally:
        backend.close()


def _open(settings: RemoteSettings, counts: Counts) -> tuple[_Kind, Backend]:
    try:
        url = urlsplit(settings.url)
    except ValueError as error:
        raise ConfigError(f"tiering.remote.url = {settings.url!r}: {error}; expected scheme://host:port") from error
    kind = _KINDS.get(url.scheme)
    if kind is None:
        raise ConfigError(
            f"tiering.remote.url = {settings.url!r}: unknown scheme {url.scheme!r}; expected one of {', '.join(_KINDS)}"
        )
    if url.password is not None or url.username is not None:
        raise ConfigError(
            "tiering.remote.url holds a user name or password, which would show wherever it is printed; set "
            "tiering.remote.username, and password_file or password_variable"
        )
    return kind, _opener(kind)(url, settings, counts)


def secret_of(settings: RemoteSettings) -> str | None:
    """The password, read now.

    Raises:
        ConfigError: its file or variable is missing or empty.
    """
    if settings.password_variable is not None:
        secret = os.environ.get(settings.password_variable, "")
        where = f"tiering.remote.password_variable = {settings.password_variable!r}: the environment variable"
    elif settings.password_file is not None:
        where = f"tiering.remote.password_file = {str(settings.password_file)!r}: the file"
        try:
            secret = settings.password_file.read_text().partition("\n")[0].strip()
        except OSError as error:
            raise ConfigError(f"{where} cannot be read ({error.strerror}); name a readable one") from error
    else:
        return None
    if not secret:
        raise ConfigError(f"{where} is empty or missing; put the password there")
    return secret


def _opener(kind: _Kind) -> Opener:
    module, _, function = kind.opener.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not kind.extra:
            raise
        raise ConfigError(
            f"this kind of remote tier needs {error.name}: install the extra with `pip install 'kvtier[{kind.extra}]'`"
        ) from error
    return cast("Opener", vars(found)[function])
