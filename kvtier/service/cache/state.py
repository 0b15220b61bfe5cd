"""What must outlive the process: each tenant's secret and namespaces, so that blocks on disk are found again.

<service.state>/lock             held by the process that uses the directory
<service.state>/<tenant>.json    {format, digest, tenant: {salt, namespaces}}; digest: sha256 of the tenant's text
"""

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kvtier.config import ServiceSettings, TieringSettings
from kvtier.errors import ConfigError, TierUnavailable
from kvtier.service.cache.errors import ServiceError
from kvtier.service.cache.files import replace_file
from kvtier.service.cache.namespaces import NamespaceSpec

__all__ = ["SALT_BYTES", "StateDirectory", "TenantState"]

SALT_BYTES = 32
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class TenantState:
    """Of one tenant.

    Args:
        salt: 32 random bytes that move its blocks into key spaces of their own.
        namespaces: spec and time of creation (seconds since 1970) by name.
    """

    salt: bytes = field(repr=False)
    namespaces: Mapping[str, tuple[NamespaceSpec, float]]


class StateDirectory:
    """Keeps `TenantState`s. One process at a time.

    Args:
        path: made if absent; None: nothing outlives the process.

    Raises:
        ConfigError: it cannot be made or read.
        TierUnavailable: another process uses it.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock: int | None = None
        if path is None:
            return
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise TierUnavailable(f"service.state = {path}: another cache service uses it: stop that one") from error
        except OSError as error:
            raise ConfigError(f"service.state = {path}: {error.strerror}: name a directory of your own") from error

    @classmethod
    def open(cls, settings: ServiceSettings, tiering: TieringSettings) -> Self:
        """The directory of a service with these tiers.

        Raises:
            ConfigError: it has none, and a tier outlives the process; or see above, as of TierUnavailable.
        """
        if settings.state is None and (tiering.nvme is not None or tiering.remote is not None):
            raise ConfigError(
                "service.state = none: what a tier keeps beyond this process is only found again with the tenants' "
                "secrets; name a directory for them"
            )
        return cls(settings.state)

    def load(self, tenant: str) -> TenantState:
        """What is known of a tenant; a new one gets a secret, which is kept before it is used.

        Raises:
            ConfigError: its file cannot be read, or is damaged: nothing is guessed then.
        """
        path = self._file(tenant)
        if path is None or not path.exists():
            fresh = TenantState(secrets.token_bytes(SALT_BYTES), {})
            self.save(tenant, fresh)
            return fresh
        try:
            return _decode(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}: make it readable for this process") from error
        except (KeyError, TypeError, ValueError, RecursionError, ServiceError) as error:
            raise ConfigError(
                f"{path} is damaged or of another version ({error}): restore it from a backup; or remove it, and "
                f"what the tiers hold of tenant {tenant} will never be found again"
            ) from error

    def save(self, tenant: str, state: TenantState) -> None:
        """Keep what is known of a tenant; it is on the disk when this returns.

        Raises:
            ConfigError: it cannot be written; what was kept before still is.
        """
        path = self._file(tenant)
        if path is None:
            return
        try:
            replace_file(path, _encode(state))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}: give service.state space and permissions") from error

    def _file(self, tenant: str) -> Path | None:
        return None if self._path is None else self._path / f"{tenant}.json"

    def close(self) -> None:
        """Let another process use the directory. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _encode(state: TenantState) -> bytes:
    rows = [{"spec": spec.as_data(), "created": created} for spec, created in state.namespaces.values()]
    text = json.dumps({"salt": state.salt.hex(), "namespaces": rows})
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"format": _FORMAT, "digest": digest, "tenant": text}).encode()


def _decode(data: bytes) -> TenantState:
    whole: Any = json.loads(data)
    if whole["format"] != _FORMAT:
        raise ValueError(f"format {whole['format']!r}, expected {_FORMAT}")
    text: str = whole["tenant"]
    if hashlib.sha256(text.encode()).hexdigest() != whole["digest"]:
        raise ValueError("its digest does not fit")
    tenant: Any = json.loads(text)
    specs = [(NamespaceSpec.from_data(row["spec"]), float(row["created"])) for row in tenant["namespaces"]]
    return TenantState(bytes.fromhex(tenant["salt"]), {spec.name: (spec, created) for spec, created in specs})
