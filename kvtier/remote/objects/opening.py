"""From a URL and options to an open object store."""

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult

from obstore.exceptions import BaseError
from obstore.store import from_url

from kvtier.config.remote import RemoteSettings
from kvtier.errors import ConfigError
from kvtier.remote.counting import Counts
from kvtier.remote.objects.backend import ObjectBackend

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

__all__ = ["open_backend"]

_RUN = 8
_MOST_BLOCKS = 256
_REQUESTS_PER_CONNECTION = 8
# A request whose connection turned out to be closed is made once more; everything else is the deadline's business.
_RETRIES = 1
_CLIENT = ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes", "http1_only")
_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*:?")
_UNUSED = ("username", "password_file", "password_variable", "token_file", "cert_file", "key_file")


def open_backend(url: SplitResult, settings: RemoteSettings, counts: Counts) -> ObjectBackend:
    """Open `s3://bucket/prefix`, `gs://`, `az://container/prefix`, `file:///directory` or `memory:///`.

    Credentials come from where the store's own tools look for them: environment, instance metadata. `options` are
    obstore's (`region`, `endpoint`, `allow_http`, ...) and `run`: blocks per object, 8 by default; processes that share
    a store give it the same.

    Args:
        url: what `settings.url` was split into.
        settings: where, and with which options.
        counts: where is counted what happens to requests.

    Raises:
        ConfigError: a setting or option that an object store has no use for, or does not know.
    """
    _check(settings)
    options = _options(settings.options)
    run = _run(options.pop("run", str(_RUN)))
    return ObjectBackend(
        _store(url, settings, options),
        f"{url.scheme}://{url.netloc}{url.path}",
        counts,
        root=f"{settings.prefix.rstrip(':')}/r{run}",
        run=run,
        durable=url.scheme != "memory",
        concurrency=_REQUESTS_PER_CONNECTION * settings.connections,
    )


def _check(settings: RemoteSettings) -> None:
    given = settings.model_dump(include=set(_UNUSED))
    unused = next((name for name in _UNUSED if given[name] is not None), None)
    if unused is not None:
        raise ConfigError(
            f"tiering.remote.{unused} is set, which an object store has no use for; its credentials come from the "
            "environment, as its own tools read them"
        )
    if settings.ttl:
        raise ConfigError(
            f"tiering.remote.ttl = {settings.ttl}: objects do not expire by themselves; set 0, and give the bucket a "
            "lifecycle rule"
        )
    if not _PREFIX.fullmatch(settings.prefix):
        raise ConfigError(
            f"tiering.remote.prefix = {settings.prefix!r}: it names a folder of the store; expected letters, digits, "
            "'.', '_', '-' and '/' between them, each part beginning with a letter, digit or '_'"
        )


def _options(text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, found, value = item.partition("=")
        if not (found and name.strip() and value.strip()):
            raise ConfigError(f"tiering.remote.options: {item!r} is no option; expected name=value with commas between")
        options[name.strip()] = value.strip()
    return options


def _run(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= _MOST_BLOCKS):
        raise ConfigError(
            f"tiering.remote.options: run={text}: expected 1 to {_MOST_BLOCKS} blocks per object; 1 to 4 MiB are best"
        )
    return int(text)


def _store(url: SplitResult, settings: RemoteSettings, options: Mapping[str, str]) -> "ObjectStore":
    given: dict[str, Any] = {name: value for name, value in options.items() if name not in _CLIENT}
    if options and url.scheme in ("file", "memory"):
        raise ConfigError(
            f"tiering.remote.options = {settings.options!r}: with {url.scheme}:// the only option is run; remove "
            f"{', '.join(options)}"
        )
    plain = next((value for value in given.values() if value.startswith("http://")), None)
    if plain is not None and "allow_http" not in options:
        raise ConfigError(
            f"tiering.remote.options: {plain} has no TLS: add allow_http=true, or give an https:// address"
        )
    if url.scheme == "az" and not any("account_name" in name or "emulator" in name for name in given):
        # Without it, obstore panics where the environment has one, and does not say which option is missing otherwise.
        raise ConfigError(
            f"tiering.remote.url = {settings.url!r}: az://container/folder does not say whose the container is; set "
            "tiering.remote.options = 'account_name=NAME'"
        )
    try:
        if url.scheme == "file":
            return from_url(settings.url, mkdir=True)
        if url.scheme == "memory":
            return from_url(settings.url)
        return from_url(
            settings.url, client_options=_client(settings, options), retry_config=_retries(settings), **given
        )
    except (BaseError, TypeError, ValueError, OSError) as error:
        raise ConfigError(
            f"tiering.remote.url = {settings.url!r} with options {settings.options!r} cannot be opened: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _client(settings: RemoteSettings, options: Mapping[str, str]) -> "ClientConfig":
    client: dict[str, Any] = {name: value for name, value in options.items() if name in _CLIENT}
    client["connect_timeout"] = timedelta(seconds=settings.timeout)
    if settings.ca_file is not None:
        client["root_certificate"] = settings.ca_file.read_bytes()
    return client  # type: ignore[return-value]


def _retries(settings: RemoteSettings) -> Any:
    pause = timedelta(milliseconds=20)
    return {
        "max_retries": _RETRIES,
        "backoff": {"init_backoff": pause, "max_backoff": pause, "base": 2},
        "retry_timeout": timedelta(seconds=settings.timeout),
    }
