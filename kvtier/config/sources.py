"""The sources of settings: each becomes a list of entries (dotted name, value, where it was written)."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from kvtier.config.catalog import ENV_PREFIX, Setting, settings, suggestion
from kvtier.errors import ConfigError

__all__ = ["Entry", "find_file", "from_assignments", "from_environ", "from_file", "from_mapping", "shown"]

_FILE_VARIABLE = "KVTIER_CONFIG"
# What Kubernetes sets for a service of that name: no slips of the pen.
_OTHERS = {"KVTIER_SERVICE_HOST", "KVTIER_SERVICE_PORT"}


class Entry(NamedTuple):
    """One value. For a section the value is None (off) or an empty mapping (on)."""

    name: str
    value: object
    origin: str


def from_mapping(values: Mapping[str, object], origin: str, prefix: str = "") -> Iterator[Entry]:
    """Entries of nested mappings.

    Raises:
        ConfigError: an unknown name, a value where a section belongs, or the other way round.
    """
    for key, value in values.items():
        if "." in str(key):
            raise ConfigError(f"{prefix}{key} ({origin}): expected nested tables, not a name with dots")
        setting = _known(f"{prefix}{key}", origin)
        if setting.kind != "table":
            yield _leaf(setting, value, origin)
        elif isinstance(value, Mapping):
            yield Entry(setting.name, {}, origin)
            yield from from_mapping(value, origin, f"{setting.name}.")
        else:
            yield _switch(setting, value, origin)


def from_environ(environ: Mapping[str, str]) -> Iterator[Entry]:
    """Entries of the variables `KVTIER_<SECTION>__<FIELD>`.

    Other variables that begin with KVTIER_ are not ours to judge (Kubernetes sets KVTIER_PORT for a service of that
    name), except those that only lack an underscore.
    """
    by_variable = {setting.variable: setting for setting in settings().values()}
    flat = {variable.replace("__", "_"): variable for variable in by_variable if "__" in variable}
    for variable in sorted(environ):
        setting = by_variable.get(variable)
        if setting is not None and "__" in variable:
            yield _written(setting, environ[variable], variable)
        elif variable in flat and variable not in _OTHERS:
            raise ConfigError(f"{variable}: unknown variable; did you mean {flat[variable]}?")
        elif variable.startswith(ENV_PREFIX) and "__" in variable:
            _known(variable.removeprefix(ENV_PREFIX).replace("__", ".").lower(), variable)


def from_assignments(texts: Iterable[str], origin: str) -> Iterator[Entry]:
    """Entries of texts `section.field=value`, in their order; values are written as in the environment.

    Raises:
        ConfigError: a text without `=`, or what `from_mapping` refuses.
    """
    for text in texts:
        name, assigns, value = text.partition("=")
        if not assigns:
            raise ConfigError(f"{shown(text)} ({origin}): expected section.field=value, such as engine.order=priority")
        yield _written(_known(name.strip(), origin), value.strip(), origin)


def from_file(path: Path) -> Iterator[Entry]:
    """Entries of a TOML file.

    Raises:
        ConfigError: the file cannot be read or is not TOML.
    """
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}: name a readable TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: not TOML: {error}") from error
    yield from from_mapping(values, str(path))


def find_file(environ: Mapping[str, str]) -> Path | None:
    """`$KVTIER_CONFIG`, else the first that exists of ./kvtier.toml and the user's kvtier/config.toml."""
    if named := environ.get(_FILE_VARIABLE):
        return Path(named).expanduser()
    candidates = [Path("kvtier.toml")]
    if home := environ.get("XDG_CONFIG_HOME"):
        candidates.append(Path(home, "kvtier", "config.toml"))
    elif home := environ.get("HOME"):
        candidates.append(Path(home, ".config", "kvtier", "config.toml"))
    return next((path for path in candidates if path.is_file()), None)


def shown(value: object) -> str:
    """A value in an error: quoted, on one line, not endless."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _known(name: str, origin: str) -> Setting:
    setting = settings().get(name)
    if setting is None:
        raise ConfigError(f"{name} ({origin}): unknown setting{suggestion(name)}")
    return setting


def _written(setting: Setting, text: str, origin: str) -> Entry:
    return (_switch if setting.kind == "table" else _leaf)(setting, text, origin)


def _leaf(setting: Setting, value: object, origin: str) -> Entry:
    return Entry(setting.name, None if setting.nullable and _is_none(value) else value, origin)


def _switch(setting: Setting, value: object, origin: str) -> Entry:
    if not setting.nullable:
        raise ConfigError(f"{setting.name} = {shown(value)} ({origin}): expected a table of settings")
    if not _is_none(value):
        raise ConfigError(f'{setting.name} = {shown(value)} ({origin}): expected a table, or "none" to switch it off')
    return Entry(setting.name, None, origin)


def _is_none(value: object) -> bool:
    # TOML and the environment have no null.
    return value is None or (isinstance(value, str) and value.lower() == "none")
