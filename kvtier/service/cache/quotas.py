"""Quotas: which tenants there are, and how much of each tier is whose."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, TypeAdapter, ValidationError

from kvtier.config import ServiceSettings, TieringSettings
from kvtier.config.fields import Section, Size
from kvtier.errors import CapacityError, ConfigError
from kvtier.service.cache.callers import DEFAULT_TENANT
from kvtier.service.cache.files import check_tenant

__all__ = ["Quota", "read_quotas", "tiering_of"]


class _Row(Section):
    """A tenant's table in the file."""

    host: Size = Field(description="Bytes of host memory")
    nvme: Size | None = Field(default=None, description="Bytes on NVMe; none: this tenant has none there")


_ROWS = TypeAdapter(dict[str, _Row])


@dataclass(frozen=True, slots=True)
class Quota:
    """Of one tenant: bytes by tier; nvme None: nothing there."""

    host: int
    nvme: int | None


def read_quotas(settings: ServiceSettings, tiering: TieringSettings) -> dict[str, Quota]:
    """The tenants and their quotas.

    Raises:
        ConfigError: the file cannot be read or makes no sense, or there is no tier to share.
        CapacityError: the quotas add up to more than the tiers have, and `service.overcommit` is off.
    """
    if tiering.host is None:
        raise ConfigError("tiering.host = none: the cache service keeps blocks in host memory; give it a capacity")
    capacities = {"host": tiering.host.capacity, "nvme": 0 if tiering.nvme is None else tiering.nvme.capacity}
    if settings.tenants is None:
        return {DEFAULT_TENANT: Quota(capacities["host"], capacities["nvme"] or None)}
    rows = _read(settings.tenants)
    for tier, capacity in capacities.items():
        wanted = [getattr(row, tier) or 0 for row in rows.values()]
        if max(wanted) > capacity or (sum(wanted) > capacity and not settings.overcommit):
            raise CapacityError(
                f"{settings.tenants}: the tenants' {tier} quotas add up to {sum(wanted)} bytes, the largest is "
                f"{max(wanted)}, and tiering.{tier}.capacity = {capacity}: lower them, raise it, or, if only the sum "
                "is beyond it, set service.overcommit = true"
            )
    return {name: Quota(row.host, row.nvme) for name, row in rows.items()}


def _read(path: Path) -> Mapping[str, _Row]:
    try:
        with path.open("rb") as file:
            rows = _ROWS.validate_python(tomllib.load(file))
    except OSError as error:
        raise ConfigError(f"service.tenants = {path}: {error.strerror}: name a readable TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"service.tenants = {path}: not TOML: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f'{path}: {where}: {first["msg"]}: expected tables [tenant] with host = "4GiB"') from None
    if not rows:
        raise ConfigError(f"service.tenants = {path}: expected at least one tenant")
    for name in rows:
        check_tenant(name)
    return rows


def tiering_of(tenant: str, quota: Quota, tiering: TieringSettings) -> TieringSettings:
    """The tiers of one tenant: its share of host, and a directory of its own on NVMe."""
    share: dict[str, object] = {"host": tiering.host and tiering.host.model_copy(update={"capacity": quota.host})}
    nvme = tiering.nvme
    share["nvme"] = None
    if nvme is not None and quota.nvme is not None:
        share["nvme"] = nvme.model_copy(update={"capacity": quota.nvme, "path": nvme.path / tenant})
    return tiering.model_copy(update=share)
