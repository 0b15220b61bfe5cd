"""What settings are made of: sizes, counts, names, and the section they stand in."""

from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvtier.config.sizes import parse_size

__all__ = [
    "GIB",
    "MIB",
    "AnySize",
    "Count",
    "FilePath",
    "ModelSource",
    "Name",
    "Port",
    "Seconds",
    "Section",
    "Seed",
    "Share",
    "Size",
    "Whole",
    "conflict",
    "require_tls_pair",
]

MIB = 1 << 20
GIB = 1 << 30
_MAX = (1 << 63) - 1


def _whole(value: object) -> object:
    # pydantic takes True for 1 and 16.0 for 16.
    if isinstance(value, bool | float):
        raise ValueError("expected a whole number")  # noqa: TRY004 - pydantic collects ValueErrors
    return value


def _filled(value: object) -> object:
    if value == "":
        raise ValueError("expected a path, not an empty text")
    return value


def _named(value: object) -> object:
    if value == "":
        raise ValueError("expected a name, not an empty text")
    return value


# A shell expands ~ for flags and variables; nobody does for a TOML file.
_SizeText = WithJsonSchema({"type": "string", "format": "size"})
AnySize: TypeAlias = Annotated[int, Field(le=_MAX), BeforeValidator(parse_size), _SizeText]
Size: TypeAlias = Annotated[int, Field(ge=1, le=_MAX), BeforeValidator(parse_size), _SizeText]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 64), BeforeValidator(_whole)]
Count: TypeAlias = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Whole: TypeAlias = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Port: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 16), BeforeValidator(_whole)]
Seconds: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share: TypeAlias = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Name: TypeAlias = Annotated[str, BeforeValidator(_named)]
FilePath: TypeAlias = Annotated[Path, BeforeValidator(_filled), AfterValidator(Path.expanduser)]
ModelSource: TypeAlias = Annotated[
    str,
    BeforeValidator(_filled),
    BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value),
    AfterValidator(lambda text: str(Path(text).expanduser())),
    WithJsonSchema({"type": "string", "format": "path"}),
]


def conflict(message: str, *fields: str) -> PydanticCustomError:
    """An illegal combination of `fields` of one section; whoever knows where they were set can say so."""
    return PydanticCustomError("conflict", "{message}", {"message": message, "fields": list(fields)})


def require_tls_pair(cert: Path | None, key: Path | None) -> None:
    """Let the `tls_cert` and `tls_key` of a section pass that are both there or both none."""
    if (cert is None) != (key is None):
        raise conflict("a certificate and its key belong together; name both or neither", "tls_cert", "tls_key")


class Section(BaseModel):
    """One section of the configuration: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
