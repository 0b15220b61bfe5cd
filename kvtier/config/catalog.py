"""The schema as a flat list: what there is to set, for look-up, suggestions and documentation."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

from kvtier.config.schema import Config

__all__ = ["ENV_PREFIX", "Setting", "settings", "suggestion"]

ENV_PREFIX = "KVTIER_"

_KINDS = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text"}


class Setting(NamedTuple):
    """One setting, or one section that `none` switches off.

    name: dotted. kind: for people; `size`, `table` and `path` are the special ones. required: has no default.
    """

    name: str
    kind: str
    default: Any
    meaning: str
    required: bool
    nullable: bool

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.name.replace(".", "__").upper()


@cache
def settings() -> Mapping[str, Setting]:
    """Every setting and section by its dotted name, in the order of the schema, sections before their members."""
    schema = Config.model_json_schema()
    return {setting.name: setting for setting in _walk(schema, schema["$defs"], "")}


def suggestion(name: str) -> str:
    """`; did you mean …?` for an unknown dotted name, empty if nothing comes close."""
    known = list(settings())
    leaf = name.rpartition(".")[2]
    # The whole name first, then the right word in the wrong section.
    close = get_close_matches(name, known, 1, 0.75) or [
        candidate for candidate in known if candidate.rpartition(".")[2] == leaf
    ]
    return f"; did you mean {' or '.join(close)}?" if close else "; `kvtier config` lists all settings"


def _walk(section: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str) -> Iterator[Setting]:
    for key, field in section["properties"].items():
        choices = field.get("anyOf", [field])
        types = [choice for choice in choices if choice.get("type") != "null"]
        table = next((definitions[one["$ref"].rpartition("/")[2]] for one in types if "$ref" in one), None)
        yield Setting(
            name=prefix + key,
            kind="table" if table else _kind(types[0]),
            default=field.get("default"),
            meaning=field.get("description") or (table or {}).get("description", ""),
            required=key in section.get("required", ()),
            nullable=len(types) < len(choices),
        )
        if table:
            yield from _walk(table, definitions, f"{prefix}{key}.")


def _kind(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return " | ".join(field["enum"])
    return str(field.get("format") or _KINDS[field["type"]])
