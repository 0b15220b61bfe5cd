"""API keys: read from a file, known in constant time."""

import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.types import Scope

from kvtier.errors import ConfigError

__all__ = ["knows_key", "read_api_keys"]


def read_api_keys(path: Path, setting: str = "server.api_key_file") -> tuple[str, ...]:
    """Keys of a file, one a line; empty lines and those that begin with # are none.

    Args:
        path: of the file.
        setting: that names it, for errors.

    Raises:
        ConfigError: it cannot be read, or holds no key.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} {path}: {error}: name a readable text file") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{setting} {path}: expected at least one key, one a line")
    return keys


def knows_key(scope: Scope, keys: Sequence[bytes]) -> bool:
    """Whether a request has `Authorization: Bearer KEY` with one of the keys; compares with every one of them."""
    sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, key = sent.partition(b" ")
    matches = [hmac.compare_digest(key.strip(), known) for known in keys]
    return scheme.lower() == b"bearer" and any(matches)
