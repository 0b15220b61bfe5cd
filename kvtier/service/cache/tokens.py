"""Tokens: secrets that name a caller. The file keeps their hashes only.

token   kvt_<id, 16 hex>_<secret, 64 hex>: the id is public and finds the entry, the secret is 256 random bits
entry   {sha256 of the secret, tenant, scopes, namespaces, created, expires}

A hash without salt or stretching is enough for a secret that nobody can guess.
"""

import fcntl
import hashlib
import hmac
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.service.cache.callers import LOCAL, Caller, Scope
from kvtier.service.cache.errors import ServiceError
from kvtier.service.cache.files import check_tenant, replace_file

__all__ = ["TokenEntry", "Tokens"]

_FORMAT = 1
_TOKEN = re.compile(r"kvt_([0-9a-f]{16})_([0-9a-f]{64})")
_PATTERN = re.compile(r"[A-Za-z0-9._*?\[\]!-]{1,128}")
_NO_HASH = "0" * 64


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """What the file says of one token.

    Args:
        id: public.
        hash: sha256 of the secret, hex.
        tenant, scopes, namespaces: see `Caller`.
        created: seconds since 1970.
        expires: likewise; None: never.
    """

    id: str
    hash: str
    tenant: str
    scopes: tuple[str, ...]
    namespaces: tuple[str, ...] | None
    created: float
    expires: float | None

    @property
    def caller(self) -> Caller:
        """Whom it names."""
        return Caller(self.tenant, frozenset(map(Scope, self.scopes)), self.namespaces, self.id)


class Tokens:
    """The tokens of a service. Thread-safe.

    Args:
        path: the file; None: none are configured, and everybody is `LOCAL`.
        clock: seconds since 1970.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._entries: Mapping[str, TokenEntry] = {}

    @classmethod
    def open(cls, path: Path | None, clock: Callable[[], float] = time.time) -> "Tokens":
        """The tokens of a file.

        Raises:
            ConfigError: it cannot be read, or is damaged.
        """
        tokens = cls(path, clock)
        tokens.reload()
        return tokens

    @property
    def required(self) -> bool:
        """Whether callers need one."""
        return self._path is not None

    def reload(self) -> None:
        """Read the file again; on failure what was read before stays in force.

        Raises:
            ConfigError: it cannot be read, or is damaged.
        """
        if self._path is not None:
            self._entries = _read(self._path)

    def caller(self, secret: str | None) -> Caller:
        """Who holds this token. Takes as long for an unknown one as for a wrong one.

        Raises:
            ServiceError: unauthorized.
        """
        if self._path is None:
            return LOCAL
        match = _TOKEN.fullmatch(secret or "")
        named, given = match.groups() if match else ("", "")
        entry = self._entries.get(named)
        known = entry.hash if entry is not None else _NO_HASH
        good = hmac.compare_digest(known, hashlib.sha256(given.encode()).hexdigest())
        if entry is None or not good:
            raise ServiceError("unauthorized", "no valid token: send one as `Authorization: Bearer kvt_...`")
        if entry.expires is not None and entry.expires <= self._clock():
            raise ServiceError("unauthorized", f"token {entry.id} has expired: have a new one made")
        return entry.caller

    def entries(self) -> list[TokenEntry]:
        """All of them, oldest first."""
        return sorted(self._entries.values(), key=lambda entry: entry.created)

    def create(
        self,
        tenant: str,
        scopes: Iterable[Scope],
        namespaces: Iterable[str] | None = None,
        *,
        lifetime: float | None = None,
    ) -> str:
        """Make a token, and write its hash.

        Args:
            tenant: whose.
            scopes: at least one.
            namespaces: patterns of those that it opens; None: all of the tenant's.
            lifetime: seconds until it expires.

        Returns:
            The token. Nobody can find it out again.

        Raises:
            ConfigError: it makes no sense, or the file cannot be written.
        """
        check_tenant(tenant)
        chosen = tuple(sorted({Scope(scope).value for scope in scopes}))
        patterns = None if namespaces is None else tuple(namespaces)
        if not chosen or patterns == ():
            raise ConfigError("token: without a scope or with an empty list of namespaces it would open nothing")
        if lifetime is not None and not lifetime > 0:
            raise ConfigError(f"token: a lifetime of {lifetime:g} s: expected more than 0, or none for ever")
        for pattern in patterns or ():
            if _PATTERN.fullmatch(pattern) is None:
                raise ConfigError(
                    f"token: namespace pattern {pattern!r}: expected 1 to 128 of A-Z a-z 0-9 . _ - * ? [ ]"
                )
        secret, now = secrets.token_hex(32), self._clock()
        hashed = hashlib.sha256(secret.encode()).hexdigest()
        expires = None if lifetime is None else now + lifetime
        entry = TokenEntry(secrets.token_hex(8), hashed, tenant, chosen, patterns, now, expires)
        with self._changing() as entries:
            entries[entry.id] = entry
        return f"kvt_{entry.id}_{secret}"

    def revoke(self, token_id: str) -> None:
        """Forget a token. A running service knows at its next SIGHUP.

        Raises:
            ConfigError: there is none of this id, or the file cannot be written.
        """
        with self._changing() as entries:
            if entries.pop(token_id, None) is None:
                raise ConfigError(f"token {token_id!r}: unknown id; `kvtier cache token list` shows them")

    @contextmanager
    def _changing(self) -> Iterator[dict[str, TokenEntry]]:
        """The entries, to be changed and written back; two processes that do so take turns."""
        if self._path is None:
            raise ConfigError("tokens: no file is configured: set service.tokens to a path")
        with _turn(self._path):
            entries = dict(_read(self._path))
            yield entries
            rows = [asdict(entry) for entry in entries.values()]
            replace_file(self._path, json.dumps({"format": _FORMAT, "tokens": rows}, indent=1).encode())
            self._entries = entries


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f"{path.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise ConfigError(f"service.tokens = {path}: {error.strerror}: name a file that can be written") from error


def _read(path: Path) -> dict[str, TokenEntry]:
    """Entries by id; an absent file has none: then nobody is let in."""
    try:
        data: Any = json.loads(path.read_bytes())
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']!r}")  # noqa: TRY301  told below, with the rest
        return {row["id"]: _entry(row) for row in data["tokens"]}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"service.tokens = {path}: {error.strerror}: name a readable file") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"service.tokens = {path}: damaged or of another version ({error}): restore it, or remove it and make new "
            "tokens with `kvtier cache token create`"
        ) from error


def _entry(row: Mapping[str, Any]) -> TokenEntry:
    namespaces = row["namespaces"]
    if not (isinstance(row["scopes"], list) and (namespaces is None or isinstance(namespaces, list))):
        raise TypeError(f"scopes or namespaces of entry {row['id']!r}")
    entry = TokenEntry(
        **{**row, "scopes": tuple(row["scopes"]), "namespaces": None if namespaces is None else tuple(namespaces)}
    )
    if not (re.fullmatch(r"[0-9a-f]{16}", entry.id) and re.fullmatch(r"[0-9a-f]{64}", entry.hash)):
        raise ValueError(f"entry {entry.id!r}")
    # What is wrong here would come out when somebody calls, and a token that should be narrow or over be neither.
    if not all(_PATTERN.fullmatch(pattern) for pattern in entry.namespaces or ()) or namespaces == []:
        raise ValueError(f"namespaces {namespaces!r} of entry {entry.id}")
    if not (_is_time(entry.created) and (entry.expires is None or _is_time(entry.expires))):
        raise ValueError(f"times of entry {entry.id}")
    _ = entry.caller.scopes
    check_tenant(entry.tenant)
    return entry


def _is_time(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
