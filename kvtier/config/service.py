"""Settings of the cache service."""

from typing import Self

from pydantic import Field, model_validator

from kvtier.config.fields import (
    GIB,
    MIB,
    Count,
    FilePath,
    Name,
    Port,
    Seconds,
    Section,
    Size,
    conflict,
    require_tls_pair,
)

__all__ = ["ServiceSettings"]


class ServiceSettings(Section):
    """The cache service: who may call it, from where, and how much of it."""

    host: Name = Field(
        default="127.0.0.1",
        description="Address to listen on; off loopback it needs tokens, and TLS or allow_plaintext",
    )
    port: Port = Field(default=7700, description="TCP port of the REST API; 0: any free one")
    data_port: Port | None = Field(
        default=7701, description="TCP port for block bytes; 0: any free one; none: no such port"
    )
    socket: FilePath | None = Field(
        default=None, description="Unix socket for block bytes and shared memory; none: no such socket"
    )
    state: FilePath | None = Field(
        default=None,
        description="Directory of the tenants' secrets and namespaces; none: they end with the process, so that no "
        "tier may outlive it",
    )
    tokens: FilePath | None = Field(
        default=None, description="File that `kvtier cache token` writes; none: every caller on this machine is served"
    )
    tenants: FilePath | None = Field(
        default=None, description="TOML file, a table with host and nvme for each tenant; none: one tenant, default"
    )
    overcommit: bool = Field(
        default=False, description="Let the tenants' quotas add up to more than the tiers' capacities"
    )
    tls_cert: FilePath | None = Field(default=None, description="Certificate chain (PEM); needs tls_key")
    tls_key: FilePath | None = Field(default=None, description="Private key of tls_cert (PEM)")
    allow_plaintext: bool = Field(default=False, description="Listen off loopback without TLS")
    host_limit: Size | None = Field(
        default=None,
        description="How far a tenant's host quota can be raised at run time; address space only; none: no further",
    )
    max_block: Size = Field(default=64 * MIB, description="Bytes of one block, at most")
    max_batch: Size = Field(default=256 * MIB, description="Bytes of one put or read, at most")
    max_batch_keys: Count = Field(default=8192, description="Keys or blocks of one call, at most")
    inflight_bytes: Size = Field(
        default=GIB, description="Bytes per tenant that calls may hold at a time; what comes then is refused as busy"
    )
    max_namespaces: Count = Field(default=256, description="Namespaces per tenant, at most")
    namespace_idle: Seconds | None = Field(
        default=7 * 86400.0,
        description="Seconds after which a namespace that nobody used and of which no block is left in host and nvme "
        "makes room for another one beyond max_namespaces; none: never",
    )
    max_pins: Count = Field(default=1024, description="Pins per tenant at a time, at most")
    max_pin_ttl: Seconds = Field(default=3600.0, description="Seconds that a pin may last, at most")
    max_prefetches: Count = Field(default=256, description="Prefetches per tenant that are remembered, at most")
    max_connections: Count = Field(default=512, description="Connections of each port at a time, at most")
    idle_timeout: Seconds = Field(
        default=60.0, description="Seconds after which a connection that does not move is closed"
    )
    request_timeout: Seconds = Field(
        default=30.0, description="Seconds after which a call that was given no deadline ends, and the longest deadline"
    )
    drain_timeout: Seconds = Field(default=30.0, description="Seconds that calls under way have to end after SIGTERM")
    max_events: Count = Field(
        default=65536, description="Blocks in the events per tenant that late readers can still have"
    )

    @model_validator(mode="after")
    def _tls_is_a_pair(self) -> Self:
        require_tls_pair(self.tls_cert, self.tls_key)
        return self

    @model_validator(mode="after")
    def _limits_nest(self) -> Self:
        if not self.max_block <= self.max_batch <= self.inflight_bytes:
            raise conflict(
                "a block fits into a batch and a batch into what may be in flight: raise the larger ones",
                "max_block",
                "max_batch",
                "inflight_bytes",
            )
        return self
