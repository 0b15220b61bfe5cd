"""Bodies of requests, as JSON. Unknown fields are refused; types are not bent.

Of what is wrong in a list or an object one thing, or a few, are told: to find out everything that is wrong with
millions of values takes a minute, in which nobody else is served.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from kvtier.hints import PRIORITY_SECONDS, RequestHints
from kvtier.keys import KEY_SCHEME
from kvtier.layout import DTYPE_BYTES
from kvtier.service.cache import NamespaceSpec, layout_from_data
from kvtier.service.rest.heads import KEY_PATTERN, NAME_PATTERN
from kvtier.service.rest.samples import KEY, example

__all__ = [
    "TENANT_PATTERN",
    "CapacityBody",
    "HintBody",
    "Keys",
    "KeysBody",
    "LayoutBody",
    "MatchBody",
    "NamespaceBody",
    "PinBody",
    "PolicyBody",
    "PrefetchBody",
    "ReadBody",
]

TENANT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
"""Of a tenant's name."""

_MOST_FIELDS = 64
_MOST_EXTRAS = 8192

Keys: TypeAlias = Annotated[
    list[Annotated[str, Field(pattern=KEY_PATTERN)]],
    Field(min_length=1, fail_fast=True, description="Chain keys in lower-case hex, 16 to 32 bytes each, parents first"),
]


def _integral(value: object) -> object:
    # JSON knows numbers alone: 16.0 is an integer (JSON Schema, 6.1.1).
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _few_extras(data: object) -> object:
    if isinstance(data, dict) and len(data) > _MOST_EXTRAS:
        raise ValueError(f"{len(data)} extras: expected at most {_MOST_EXTRAS}")
    return data


def _besides(**keywords: JsonValue) -> Callable[[dict[str, Any]], None]:
    """Further keywords of the list or object that a field is, where it is not null."""

    def add(schema: dict[str, Any]) -> None:
        schema["anyOf"][0] |= keywords

    return add


_INTEGRAL = BeforeValidator(_integral)
_Part: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 16), _INTEGRAL]
_Seconds: TypeAlias = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
# Less than the least is over before a look-up is.
_Timeout: TypeAlias = Annotated[
    Annotated[float, Field(ge=0.01, le=1e9, allow_inf_nan=False)] | None,
    Field(description="Seconds that it may take; null: `service.request_timeout`, the longest"),
]
_Whole: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 31), _INTEGRAL]
_Depth: TypeAlias = Annotated[_Whole, Field(description="Of the first key in its chain")]
_Count: TypeAlias = Annotated[int, Field(ge=1, lt=1 << 31), _INTEGRAL]
_Text: TypeAlias = Annotated[str, Field(max_length=1024)]
_Name: TypeAlias = Annotated[str, Field(pattern=NAME_PATTERN)]
_Tenant: TypeAlias = Annotated[str, Field(pattern=TENANT_PATTERN)]
_Lossy: TypeAlias = Annotated[bool, Field(description="Whether blocks that went through a lossy format will do")]
_DTYPES: list[JsonValue] = [*sorted(DTYPE_BYTES)]
_Reuse: TypeAlias = Literal["unknown", "none", "likely"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, data: object) -> object:
        if isinstance(data, dict) and len(data) > _MOST_FIELDS:
            raise ValueError(f"an object of {len(data)} fields: expected at most {_MOST_FIELDS}")
        return data


# ---- requests


class KeysBody(_Body):
    """Some blocks."""

    model_config = ConfigDict(json_schema_extra=example(keys=[KEY]))

    keys: Keys

    def packed(self) -> list[bytes]:
        """The keys as bytes."""
        return [bytes.fromhex(key) for key in self.keys]


class ReadBody(KeysBody):
    """Blocks to be read."""

    model_config = ConfigDict(json_schema_extra=example(keys=[KEY], each=False))

    depth: _Depth = 0
    parts: Annotated[
        Annotated[list[_Part], Field(fail_fast=True)] | None,
        Field(
            min_length=1,
            max_length=4096,
            description="Parts of every block, each once; null: all",
            json_schema_extra=_besides(uniqueItems=True),
        ),
    ] = None
    each: bool = Field(default=False, description="Whatever is there, instead of the leading run")
    lossy: _Lossy = False
    timeout: _Timeout = None


_ONE_WAY: list[JsonValue] = [
    {
        "required": ["keys"],
        "properties": {"keys": {"type": "array"}, "tokens": {"type": "null"}, "extras": {"type": "null"}},
    },
    {"required": ["tokens"], "properties": {"tokens": {"type": "array"}, "keys": {"type": "null"}}},
]


class MatchBody(_Body):
    """A prefix, as chain keys or as token ids."""

    model_config = ConfigDict(json_schema_extra=example(namespace="smollm2", keys=[KEY]) | {"oneOf": _ONE_WAY})

    namespace: Annotated[_Name, Field(description="Whose blocks they are")]
    keys: Keys | None = None
    tokens: Annotated[
        Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32), _INTEGRAL]], Field(fail_fast=True)] | None,
        Field(min_length=1, description=f"Token ids, where the namespace's scheme is {KEY_SCHEME}"),
    ] = None
    extras: Annotated[
        dict[
            Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[str, Field(pattern=r"^(?:[0-9a-f]{2}){0,4096}$")]
        ]
        | None,
        BeforeValidator(_few_extras),
        Field(
            description="With tokens: block index -> what the block holds besides tokens, packed, in hex",
            json_schema_extra=_besides(additionalProperties=False, maxProperties=_MOST_EXTRAS),
        ),
    ] = None
    lossy: _Lossy = False
    depth: _Depth = 0

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.keys is None) == (self.tokens is None):
            raise ValueError("expected keys or tokens, and not both")
        if self.extras is not None and self.tokens is None:
            raise ValueError("extras belong to tokens: leave them out, or send tokens")
        return self


class HintBody(KeysBody):
    """What is known of consecutive blocks' future; see `kvtier.hints.RequestHints`."""

    model_config = ConfigDict(json_schema_extra=example(keys=[KEY], first=0, ttl=600.0, session="chat-1"))

    first: _Whole = Field(default=0, description="Depth of the first key, which `dead_from_depth` counts by")
    priority: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 1.0
    priority_ttl: _Seconds = PRIORITY_SECONDS
    ttl: Annotated[float | None, Field(ge=0, le=1e9, allow_inf_nan=False)] = None
    reuse: _Reuse = "unknown"
    dead_from_depth: _Whole | None = None
    session: _Name | None = None

    def hints(self) -> RequestHints:
        """As the store takes them."""
        return RequestHints(
            self.priority,
            self.priority_ttl,
            self.ttl,
            self.reuse,
            self.dead_from_depth,
            self.session,
        )


class PinBody(KeysBody):
    """Blocks to be kept in host."""

    model_config = ConfigDict(json_schema_extra=example(keys=[KEY], ttl=60.0))

    ttl: _Seconds = Field(description="Seconds until the pin ends by itself; `service.max_pin_ttl` at most")


class PrefetchBody(KeysBody):
    """Blocks to be brought into host."""

    model_config = ConfigDict(json_schema_extra=example(keys=[KEY], timeout=5.0))

    depth: _Depth = 0
    timeout: _Timeout = None


class _Group(_Body):
    layers: Annotated[list[_Whole], Field(fail_fast=True, min_length=1, max_length=4096)]
    kv_heads: _Count
    head_dim: _Count
    rope_dim: _Whole = 0
    dtype: str = Field(default="float32", json_schema_extra={"enum": _DTYPES})
    window: _Count | None = None
    order: Annotated[str, Field(max_length=128)] = "lphtd"


class GqaGroupBody(_Group):
    """Layers that keep K and V for each KV head; see `kvtier.layout.LayerGroup`."""

    kind: Literal["gqa"]
    planes: Literal[2] = 2


class MlaGroupBody(_Group):
    """Layers that keep one latent row for each token; see `kvtier.layout.LayerGroup`."""

    kind: Literal["mla"]
    planes: Literal[1] = 1


_AnyGroup: TypeAlias = Annotated[GqaGroupBody | MlaGroupBody, Field(discriminator="kind")]


class LayoutBody(_Body):
    """What the bytes of one block mean; see `kvtier.layout.Layout`."""

    block_size: _Count
    groups: Annotated[list[_AnyGroup], Field(fail_fast=True, min_length=1, max_length=4096)]
    shards: Annotated[int, Field(ge=1, le=4096), _INTEGRAL] = 1


_LAYOUT = {
    "block_size": 16,
    "groups": [
        {"kind": "gqa", "layers": [0, 1], "planes": 2, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"},
    ],
}


class NamespaceBody(_Body):
    """A namespace to be made."""

    model_config = ConfigDict(json_schema_extra=example(name="smollm2", layout=_LAYOUT, model="sha256:9f2c"))

    name: _Name
    layout: LayoutBody | None = Field(default=None, description="Null: opaque: blocks of any size, stored as they are")
    model: _Text = Field(default="", description="Fingerprint of weights and revision")
    numerics: _Text = Field(default="", description="What changes values without changing shapes")
    lora: _Text = Field(default="", description="Adapter, empty for none")
    scheme: _Text = Field(default=KEY_SCHEME, description="How chain keys are made")

    def spec(self) -> NamespaceSpec:
        """As the cache takes it."""
        layout = None if self.layout is None else layout_from_data(self.layout.model_dump())
        return NamespaceSpec(self.name, layout, self.model, self.numerics, self.lora, self.scheme)


class CapacityBody(_Body):
    """A tenant's quota."""

    model_config = ConfigDict(json_schema_extra=example(tenant="default", tier="host", bytes=1 << 30))

    tenant: _Tenant
    tier: Literal["host"] = Field(description="The one whose quota changes at run time")
    # The largest integer that every reader of JSON has exactly (RFC 7493, 2.2).
    bytes: Annotated[int, Field(ge=1, lt=1 << 53), _INTEGRAL]


class PolicyBody(_Body):
    """Which block leaves a tenant's host tier first."""

    model_config = ConfigDict(json_schema_extra=example(tenant="default", policy="arc"))

    tenant: _Tenant
    policy: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$", description="lru, arc, clock2, s3fifo, or a plug-in's")]
