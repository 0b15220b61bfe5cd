"""Joins the sources of settings into one `Config`, and remembers where each value came from."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvtier.config.catalog import settings
from kvtier.config.schema import Config
from kvtier.config.sources import Entry, find_file, from_assignments, from_environ, from_file, from_mapping, shown
from kvtier.errors import ConfigError

__all__ = ["LoadedConfig", "load_config"]

_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and its provenance.

    Args:
        config: what is in force.
        origins: by dotted name, for every setting in force and every section that is off: the file, the variable,
            `command line`, `Python argument` or `default`.
        file: the TOML file that was read, None if there was none.
    """

    config: Config
    origins: Mapping[str, str]
    file: Path | None


def load_config(
    overrides: Mapping[str, Any] | None = None,
    cli: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
    file: Path | None = None,
    *,
    assigned: Sequence[str] = (),
    search: bool = True,
) -> LoadedConfig:
    """Read all sources; the first of these that has a setting decides it.

    1. `overrides`: Python arguments, as nested mappings. None or "none" unsets what can be unset.
    2. `cli`: command-line flags, likewise; then `assigned`: texts `section.field=value`, the last of a name first.
    3. `environ`: variables `KVTIER_<SECTION>__<FIELD>`.
    4. one TOML file: `file`, or else (`search`) `$KVTIER_CONFIG`, `./kvtier.toml`, `~/.config/kvtier/config.toml`.
    5. the defaults of the schema.

    Raises:
        ConfigError: one line that names the setting, its value, its source and what was expected.
    """
    chosen = file or (find_file(environ) if search else None)
    entries = chain(
        from_file(chosen) if chosen else (),
        from_environ(environ),
        from_assignments(assigned, "command line"),
        from_mapping(cli or {}, "command line"),
        from_mapping(overrides or {}, "Python argument"),
    )
    merged = _merge(entries)
    try:
        config = Config.model_validate(_nested(merged))
    except ValidationError as error:
        raise ConfigError(_one_line(error.errors(include_url=False)[0], merged)) from None
    return LoadedConfig(config, _origins(config, merged), chosen)


def _merge(entries: Iterable[Entry]) -> dict[str, Entry]:
    """The last entry of each name. Switching a section off forgets its settings; a setting switches its section on."""
    merged: dict[str, Entry] = {}
    for entry in entries:
        off = entry.value is None and settings()[entry.name].kind == "table"
        if off:
            merged = {name: other for name, other in merged.items() if not name.startswith(f"{entry.name}.")}
        for section in _sections(entry.name):
            merged[section] = Entry(section, {}, entry.origin)
        merged[entry.name] = entry
    return merged


def _sections(name: str) -> list[str]:
    """`a.b.c` -> `a`, `a.b`."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def _nested(merged: Mapping[str, Entry]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name in sorted(merged, key=lambda name: name.count(".")):
        *sections, leaf = name.split(".")
        node = tree
        for section in sections:
            node = node[section]
        value = merged[name].value
        node[leaf] = {} if settings()[name].kind == "table" and value is not None else value
    return tree


def _origins(config: Config, merged: Mapping[str, Entry]) -> dict[str, str]:
    in_force: dict[str, str] = {}
    off = "\0"
    for name, setting in settings().items():
        if name.startswith(off):
            continue
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        if setting.kind == "table" and value is None:
            off = f"{name}."
        elif setting.kind == "table":
            continue
        in_force[name] = merged[name].origin if name in merged else _DEFAULT
    return in_force


def _one_line(error: ErrorDetails, merged: Mapping[str, Entry]) -> str:
    name = ".".join(str(part) for part in error["loc"])
    context = error.get("ctx", {})
    match error["type"]:
        case "missing":
            return f"{name}: required, expected a {settings()[name].kind}: {settings()[name].meaning}"
        case "conflict":
            named = (f"{name}.{field}" for field in context["fields"])
            places = ", ".join(f"{one}: {merged[one].origin if one in merged else _DEFAULT}" for one in named)
            return f"{name}: {context['message']} ({places})"
        case "value_error":
            expected = str(context["error"])
        case kind:
            message = error["msg"].replace("Input should be", "expected")
            # "a valid integer, unable to parse string as an integer": the second half says nothing new.
            expected = message.partition(", unable")[0] if kind.endswith("_parsing") else message
    origin = merged[name].origin if name in merged else _DEFAULT
    return f"{name} = {shown(error['input'])} ({origin}): {expected}"
