"""Plug-ins: policies and formats by name, from this package, from others, or as "module:Class"."""

import difflib
import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Generic, TypeVar, cast

from kvtier.errors import ConfigError

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Finds the class (or factory) behind a name, and imports it no sooner than it is asked for.

    Args:
        group: entry-point group in which other distributions offer theirs, such as `kvtier.formats`.
        builtin: name -> "module:Class". A built-in name cannot be taken over by another distribution.
    """

    def __init__(self, group: str, builtin: Mapping[str, str]) -> None:
        self._group = group
        self._builtin = dict(builtin)
        self._targets: dict[str, str] | None = None
        self._loaded: dict[str, type[T]] = {}

    def names(self) -> tuple[str, ...]:
        """Every known name, built-in ones first."""
        return tuple(self._known())

    def get(self, name: str) -> type[T]:
        """The class behind a known name or a "module:Class" string.

        Raises:
            ConfigError: nothing has this name, or what it names cannot be imported.
        """
        found = self._loaded.get(name)
        if found is None:
            found = self._loaded[name] = self._load(name)
        return found

    def _known(self) -> dict[str, str]:
        if self._targets is None:
            offered = importlib.metadata.entry_points(group=self._group)
            self._targets = self._builtin | {e.name: e.value for e in offered if e.name not in self._builtin}
        return self._targets

    def _load(self, name: str) -> type[T]:
        target = name if ":" in name else self._known().get(name)
        if target is None:
            raise ConfigError(self._unknown(name))
        module, _, path = target.partition(":")
        try:
            found: object = importlib.import_module(module.strip())
            for attribute in path.strip().split("."):
                found = getattr(found, attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"{self._group} {name!r}: cannot load {target!r} ({error})") from error
        if not callable(found):
            raise ConfigError(f"{self._group} {name!r}: {target!r} is no class or factory; expected 'module:Class'")
        return cast("type[T]", found)

    def _unknown(self, name: str) -> str:
        known = self.names()
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"{self._group} {name!r}: unknown, expected one of {', '.join(known)} or 'module:Class'{hint}"
