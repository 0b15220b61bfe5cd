"""Bodies of answers, as JSON."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from kvtier.keys import KEY_SCHEME
from kvtier.service.cache import NamespaceInfo, PinInfo, PrefetchInfo, PutOutcome, layout_as_data
from kvtier.service.rest.samples import example

__all__ = [
    "Answer",
    "CapacityAnswer",
    "CompactAnswer",
    "DataAnswer",
    "DeleteAnswer",
    "ErrorAnswer",
    "HistoryAnswer",
    "MatchAnswer",
    "NamespaceAnswer",
    "NamespacesAnswer",
    "PinAnswer",
    "PrefetchAnswer",
    "PutAnswer",
    "PutsAnswer",
    "StateAnswer",
    "TenantAnswer",
    "TenantsAnswer",
    "TierHistoryAnswer",
]


class Answer(BaseModel):
    """An answer; frozen."""

    model_config = ConfigDict(frozen=True)


class _Error(Answer):
    code: str = Field(description="What programs tell errors apart by")
    message: str = Field(description="Names the value, what was expected and what to do")
    param: str | None = Field(
        default=None, description="The field, header or part of the path that is wrong, if it is one"
    )


class ErrorAnswer(Answer):
    """A refusal."""

    error: _Error


class PutAnswer(Answer):
    """What became of one block."""

    model_config = ConfigDict(json_schema_extra=example(outcome="stored"))

    outcome: PutOutcome


class PutsAnswer(Answer):
    """What became of each record, in order."""

    model_config = ConfigDict(json_schema_extra=example(outcomes=["stored", "exists"]))

    outcomes: list[PutOutcome]


class MatchAnswer(Answer):
    """The leading run that is there."""

    model_config = ConfigDict(json_schema_extra=example(blocks=2, tiers=["host", "nvme"], keys=None))

    blocks: int
    tiers: list[str] = Field(description="Where each of them lies")
    keys: list[str] | None = Field(description="With tokens: chain keys of all full blocks")


class DeleteAnswer(Answer):
    """How many blocks were there."""

    model_config = ConfigDict(json_schema_extra=example(deleted=1))

    deleted: int


class PinAnswer(Answer):
    """A pin."""

    model_config = ConfigDict(json_schema_extra=example(id="pin-1", blocks=1, expires=1790000000.0))

    id: str
    blocks: int = Field(description="Leading ones that stay in host")
    expires: float = Field(description="Seconds since 1970")

    @classmethod
    def of(cls, pin: PinInfo) -> Self:
        """From the cache's."""
        return cls(id=pin.id, blocks=pin.blocks, expires=pin.expires)


class PrefetchAnswer(Answer):
    """A prefetch."""

    model_config = ConfigDict(json_schema_extra=example(id="prefetch-1", state="running", blocks=0))

    id: str
    state: str = Field(description="running, done, no_space, timeout, cancelled or closed")
    blocks: int = Field(description="Leading ones that are in host, once it is over")

    @classmethod
    def of(cls, prefetch: PrefetchInfo) -> Self:
        """From the cache's."""
        return cls(id=prefetch.id, state=prefetch.state, blocks=prefetch.blocks)


_NAMESPACE = {
    "name": "smollm2",
    "layout": {
        "block_size": 16,
        "groups": [
            {
                "kind": "gqa",
                "layers": [0, 1],
                "planes": 2,
                "kv_heads": 2,
                "head_dim": 64,
                "rope_dim": 0,
                "dtype": "bfloat16",
                "window": None,
                "order": "lphtd",
            }
        ],
        "shards": 1,
    },
    "model": "sha256:9f2c",
    "numerics": "",
    "lora": "",
    "scheme": KEY_SCHEME,
    "created": 1790000000.0,
    "fingerprint": "ab" * 32,
    "parts": 1,
    "block_bytes": [16384],
    "stored": 2,
    "stored_bytes": 32768,
    "hits": 2,
    "misses": 1,
    "host_blocks": 2,
    "host_bytes": 32768,
}


class NamespaceAnswer(Answer):
    """A namespace and its figures since the process began."""

    model_config = ConfigDict(json_schema_extra=example(**_NAMESPACE))

    name: str
    layout: dict[str, Any] | None
    model: str
    numerics: str
    lora: str
    scheme: str
    created: float = Field(description="Seconds since 1970")
    fingerprint: str | None = Field(description="Of the layout, hex; null for opaque ones")
    parts: int = Field(description="That make one block ready")
    block_bytes: list[int] = Field(description="Of a raw block, by part; none for opaque ones")
    stored: int
    stored_bytes: int
    hits: int
    misses: int
    host_blocks: int = Field(description="Parts of blocks in host now")
    host_bytes: int

    @classmethod
    def of(cls, info: NamespaceInfo) -> Self:
        """From the cache's."""
        spec = info.spec
        return cls(
            name=spec.name,
            layout=None if spec.layout is None else layout_as_data(spec.layout),
            model=spec.model,
            numerics=spec.numerics,
            lora=spec.lora,
            scheme=spec.scheme,
            created=info.created,
            fingerprint=None if info.fingerprint is None else info.fingerprint.hex(),
            parts=info.parts,
            block_bytes=list(info.block_bytes),
            stored=info.stored,
            stored_bytes=info.stored_bytes,
            hits=info.hits,
            misses=info.misses,
            host_blocks=info.host_blocks,
            host_bytes=info.host_bytes,
        )


class NamespacesAnswer(Answer):
    """Those that the caller may use."""

    model_config = ConfigDict(json_schema_extra=example(namespaces=[_NAMESPACE]))

    namespaces: list[NamespaceAnswer]


_TENANT = {
    "name": "default",
    "quotas": {"host": 1 << 30},
    "occupied": {"host": 4096},
    "leases": 0,
    "pins": 0,
    "namespaces": 1,
}


class TenantAnswer(Answer):
    """A tenant's quotas, and what it uses of them."""

    model_config = ConfigDict(json_schema_extra=example(**_TENANT))

    name: str
    quotas: dict[str, int] = Field(description="Bytes by tier")
    occupied: dict[str, int] = Field(description="Bytes by tier")
    leases: int
    pins: int
    namespaces: int


class TenantsAnswer(Answer):
    """The caller's tenant; with the scope admin, all of them."""

    model_config = ConfigDict(json_schema_extra=example(tenants=[_TENANT]))

    tenants: list[TenantAnswer]


class TierHistoryAnswer(Answer):
    """Of one tier, one value per time; all but the first two count up from the process's begin."""

    bytes: list[int] = Field(description="Occupied")
    capacity_bytes: list[int]
    read_bytes: list[int]
    written_bytes: list[int]
    evicted: list[int] = Field(description="Parts of blocks that had to leave")
    dropped: list[int] = Field(description="Parts of blocks that were not taken")


class HistoryAnswer(Answer):
    """Figures over time, one value per time; counts are from the process's begin."""

    model_config = ConfigDict(
        json_schema_extra=example(
            times=[1790000000.0, 1790000005.0],
            hits=[2, 4],
            misses=[1, 1],
            matched=[3, 6],
            unmatched=[1, 1],
            in_bytes=[32768, 32768],
            out_bytes=[32768, 65536],
            tiers={
                "host": {
                    "bytes": [32768, 32768],
                    "capacity_bytes": [1 << 30, 1 << 30],
                    "read_bytes": [32768, 65536],
                    "written_bytes": [32768, 32768],
                    "evicted": [0, 0],
                    "dropped": [0, 0],
                }
            },
        )
    )

    times: list[float] = Field(description="Seconds since 1970, the last of this moment")
    hits: list[int] = Field(description="Blocks that reads found")
    misses: list[int]
    matched: list[int] = Field(description="Blocks that matches found")
    unmatched: list[int]
    in_bytes: list[int] = Field(description="Of blocks that callers sent")
    out_bytes: list[int] = Field(description="Of blocks that callers were handed")
    tiers: dict[str, TierHistoryAnswer]


class DataAnswer(Answer):
    """Other ways for block bytes; null: there is none."""

    model_config = ConfigDict(json_schema_extra=example(port=7701, socket="/run/kvtier/data.sock"))

    port: int | None = Field(description="TCP port of the same host; docs/data-port.md has the protocol")
    socket: str | None = Field(description="Path of a Unix socket on the service's machine")


class StateAnswer(Answer):
    """Whether it is up, ready, drained."""

    model_config = ConfigDict(json_schema_extra=example(status="ready"))

    status: str


class CompactAnswer(Answer):
    """What was done in each tenant's NVMe directory."""

    model_config = ConfigDict(json_schema_extra=example(tenants={"default": {"segments_removed": 0}}))

    tenants: dict[str, dict[str, int]]


class CapacityAnswer(Answer):
    """What is in force."""

    model_config = ConfigDict(json_schema_extra=example(bytes=1 << 30))

    bytes: int
