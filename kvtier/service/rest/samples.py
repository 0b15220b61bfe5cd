"""What the examples of the OpenAPI document show."""

from typing import Any

from pydantic.config import JsonDict

__all__ = ["KEY", "example"]

KEY = "3f1ae6c08d6c5f4b9d0c5f0e7b1a2c3d"
"""A chain key."""


def example(**fields: Any) -> JsonDict:
    """A body, as pydantic's `json_schema_extra` takes it."""
    return {"examples": [fields]}
