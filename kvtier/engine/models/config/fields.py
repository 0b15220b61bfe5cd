"""Fields: typed access to the entries of model files; a bad entry is an error that names file and entry."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.errors import ModelError

__all__ = ["Fields", "eos_ids_from_hf", "read_json"]


class Fields:
    """Typed access to a mapping read from a file; a bad entry is a ModelError that names file and entry.

    Args:
        values: the entries.
        origin: the file they came from, for messages.
    """

    __slots__ = ("origin", "values")

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values = values
        self.origin = origin

    def number(self, name: str, default: float | None = None) -> float:
        """A finite or infinite float; `default` where the entry is absent or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.origin}: {name} = {value!r}, expected a number: the file is incomplete or damaged")
        return float(value)

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer; `default` where the entry is absent or null."""
        value = self.number(name, default)
        if value != int(value):
            raise ModelError(f"{self.origin}: {name} = {value!r}, expected an integer")
        return int(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false; `default` where the entry is absent or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"{self.origin}: {name} = {value!r}, expected true or false")
        return value

    def entries(self, name: str) -> list[Any]:
        """A list; empty where the entry is absent or null."""
        value = self.values.get(name)
        value = [] if value is None else value
        if not isinstance(value, list):
            raise ModelError(f"{self.origin}: {name} = {value!r}, expected a list")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError where the file is unreadable or no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}: expected a readable model file") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON ({error}): download the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: {type(value).__name__}, expected a JSON object: download the file again")
    return value


def eos_ids_from_hf(directory: Path) -> frozenset[int]:
    """Token ids that end a generation: those of generation_config.json, else those of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        value = read_json(path).get("eos_token_id") if path.is_file() else None
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) for item in ids):
            raise ModelError(f"{path}: eos_token_id = {value!r}, expected a token id or a list of token ids")
        return frozenset(ids)
    return frozenset()
