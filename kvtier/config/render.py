"""Writes a configuration as TOML that `load_config` reads back."""

import json
from typing import Any

from kvtier.config.catalog import Setting, settings
from kvtier.config.load import LoadedConfig
from kvtier.config.sizes import format_size

__all__ = ["literal", "to_toml"]


def to_toml(loaded: LoadedConfig, *, explain: bool = False) -> str:
    """All settings in force.

    Args:
        loaded: the configuration.
        explain: each line ends with a comment that says where its value came from.
    """
    rows = [
        (name, f"{name.rpartition('.')[2]} = {literal(settings()[name], _value(loaded, name))}", origin)
        for name, origin in loaded.origins.items()
    ]
    width = max(len(line) for _, line, _ in rows)
    by_section: dict[str, list[str]] = {}
    for name, line, origin in rows:
        text = f"{line:<{width}}  # {origin}" if explain else line
        by_section.setdefault(name.rpartition(".")[0], []).append(text)
    order = list(settings())
    tables = ("\n".join([f"[{name}]", *by_section[name]]) for name in sorted(by_section, key=order.index))
    return "\n\n".join(tables) + "\n"


def literal(setting: Setting, value: Any) -> str:
    """A value as TOML: sizes with their unit, `"none"` for what is unset."""
    if value is None:
        return '"none"'
    if setting.kind == "size":
        return json.dumps(format_size(value))
    return json.dumps(value if isinstance(value, bool | int | float) else str(value), ensure_ascii=False)


def _value(loaded: LoadedConfig, name: str) -> Any:
    value: Any = loaded.config
    for part in name.split("."):
        value = getattr(value, part)
    return value
