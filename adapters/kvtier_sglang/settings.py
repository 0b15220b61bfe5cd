"""Settings: what SGLang hands over as extra config, as kvtier's `tiering` section and a salt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.config import TieringSettings, load_config
from kvtier.errors import ConfigError

__all__ = ["Settings", "read_settings"]

_FLAG = "--hicache-storage-backend-extra-config"
# What SGLang leaves in the mapping for itself.
_SGLANG = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
_SALT = "salt"


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one rank.

    Args:
        tiering: the tiers below SGLang's host cache, and kvtier's own host memory as staging.
        salt: what must match for pages to be reused and nobody else says: a revision of the weights, a tenant.
    """

    tiering: TieringSettings
    salt: str


def read_settings(extra: Mapping[str, Any] | None) -> Settings:
    """Validate the extra config; `KVTIER_…` variables and kvtier.toml fill in what it does not say.

    Raises:
        ConfigError: an unknown key, a bad value, or settings that are of no use below SGLang.
    """
    own = {name: value for name, value in (extra or {}).items() if name not in _SGLANG}
    salt = own.pop(_SALT, "")
    if not isinstance(salt, str):
        raise ConfigError(f"{_FLAG}: {_SALT} = {salt!r}: expected a text")
    try:
        tiering = load_config({"tiering": own}).config.tiering
    except ConfigError as error:
        raise ConfigError(f"{_FLAG}: {error}") from error
    _check(tiering)
    return Settings(tiering, salt)


def _check(tiering: TieringSettings) -> None:
    if tiering.nvme is None and tiering.remote is None:
        raise ConfigError(
            f"{_FLAG}: neither nvme.path nor remote.url is set: host memory is SGLang's own tier already; name a tier "
            "below it"
        )
    if tiering.prefetch != "none":
        raise ConfigError(f"{_FLAG}: prefetch = {tiering.prefetch!r}: SGLang says no sessions; set it to none")
