"""Headers of a request as a model: checked, and documented, by one declaration.

FastAPI does the same by itself, in a millisecond for ten headers; that is longer than most blocks take to be sent.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.types import Scope

__all__ = ["documented", "read_headers"]

_M = TypeVar("_M", bound=BaseModel)


@cache
def _names(model: type[BaseModel]) -> Mapping[bytes, str]:
    """Names as they travel, in lower case -> as the model has them."""
    aliases = [field.alias for field in model.model_fields.values() if field.alias is not None]
    return {alias.lower().encode(): alias for alias in aliases}


def read_headers(model: type[_M], scope: Scope) -> _M:
    """The headers of a request that a model has, by its fields' aliases; the last one of a name counts.

    Raises:
        RequestValidationError: one is malformed.
    """
    names = _names(model)
    sent = {names[name]: value.decode("latin-1") for name, value in scope["headers"] if name in names}
    try:
        return model.model_validate(sent)
    except ValidationError as error:
        found = [{**one, "loc": ("header", *one["loc"])} for one in error.errors(include_context=False)]
        raise RequestValidationError(found) from error


def documented(model: type[BaseModel]) -> list[dict[str, Any]]:
    """The model's headers as parameters of an OpenAPI operation."""
    properties = model.model_json_schema(by_alias=True)["properties"]
    return [
        {
            "name": name,
            "in": "header",
            "required": False,
            "schema": schema,
            "description": schema.get("description", ""),
        }
        for name, schema in properties.items()
    ]
