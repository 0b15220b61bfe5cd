"""Settings of the connector: the `tiering` section of kvtier's configuration, and a few of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

from kvtier.config import TieringSettings, load_config
from kvtier.errors import ConfigError

__all__ = ["FailurePolicy", "LoadRule", "Settings", "read_settings"]

LoadRule: TypeAlias = Literal["auto", "sync", "async"]
FailurePolicy: TypeAlias = Literal["recompute", "fail"]

_OWN = ("load", "salt", "model")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is in force.

    Args:
        tiering: which tiers, where, how large.
        load: blocks are copied by the step that needs them (`sync`), between steps (`async`), or as it takes less time.
        salt: separates engines that must not share KV.
        model: names the weights, where they are no files that could be read.
        policy: vLLM's `kv_load_failure_policy`.
    """

    tiering: TieringSettings
    load: LoadRule = "auto"
    salt: str = ""
    model: str | None = None
    policy: FailurePolicy = "recompute"


def read_settings(extra: Mapping[str, Any], policy: FailurePolicy = "recompute") -> Settings:
    """Settings from `kv_connector_extra_config`, which wins over the environment and the TOML file.

    Args:
        extra: settings of the `tiering` section, as nested mappings, beside `load`, `salt` and `model`.
        policy: see `Settings`.

    Raises:
        ConfigError: an unknown name, or a value that makes no sense here.
    """
    own = {name: extra[name] for name in _OWN if extra.get(name) is not None}
    bad = next((name for name, value in own.items() if not isinstance(value, str) or not value), None)
    if bad is not None or own.get("load", "auto") not in get_args(LoadRule):
        name = bad or "load"
        wanted = " or ".join(get_args(LoadRule)) if name == "load" else "a text"
        raise ConfigError(f"kv_connector_extra_config.{name} = {own[name]!r}: expected {wanted}")
    tiering = load_config(
        {"tiering": {name: value for name, value in extra.items() if name not in _OWN}}
    ).config.tiering
    if tiering.host is None:
        raise ConfigError("tiering.host is off: there is nothing to connect vLLM to; leave the connector out instead")
    if tiering.host.copies != "inclusive":
        raise ConfigError(
            f"tiering.host.copies = {tiering.host.copies!r}: vLLM does not say which blocks its device drops; "
            "use 'inclusive'"
        )
    return Settings(tiering, cast("LoadRule", own.get("load", "auto")), own.get("salt", ""), own.get("model"), policy)
