"""Small files that must be whole or absent, and names that become directories."""

import os
import re
import secrets
from pathlib import Path

from kvtier.errors import ConfigError

__all__ = ["check_tenant", "replace_file"]

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def check_tenant(name: str) -> None:
    """Let a proper name of a tenant pass: it becomes the name of a directory.

    Raises:
        ConfigError: it is none.
    """
    if _TENANT.fullmatch(name) is None:
        raise ConfigError(f"tenant {name!r}: expected 1 to 64 of A-Z a-z 0-9 _ -, a letter or digit first")


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, readable by its owner alone, so that after a crash at any instant it is the old one or the new.

    Raises:
        OSError: it cannot be written; the old one is untouched.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
