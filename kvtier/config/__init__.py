"""Configuration: one schema, five sources, one precedence, and where each value came from.

fields    what settings are made of: sizes, counts, names, sections
schema    the settings, as frozen pydantic models
remote    those of the remote tier
service   those of the cache service
events    those of the engine's block events
router    those of the router
sizes     "8GiB"
catalog   the schema as a flat list of dotted names
sources   TOML file, environment, nested mappings -> entries
load      entries -> Config, by precedence
render    Config -> TOML
"""

from kvtier.config.catalog import Setting, settings
from kvtier.config.events import EventsSettings
from kvtier.config.load import LoadedConfig, load_config
from kvtier.config.remote import RemoteSettings
from kvtier.config.render import to_toml
from kvtier.config.router import RouterSettings
from kvtier.config.schema import (
    Config,
    EngineSettings,
    HostSettings,
    LogSettings,
    ModelSettings,
    NvmeSettings,
    ServerSettings,
    TieringSettings,
)
from kvtier.config.service import ServiceSettings
from kvtier.config.sizes import format_size, parse_size

__all__ = [
    "Config",
    "EngineSettings",
    "EventsSettings",
    "HostSettings",
    "LoadedConfig",
    "LogSettings",
    "ModelSettings",
    "NvmeSettings",
    "RemoteSettings",
    "RouterSettings",
    "ServerSettings",
    "ServiceSettings",
    "Setting",
    "TieringSettings",
    "format_size",
    "load_config",
    "parse_size",
    "settings",
    "to_toml",
]
