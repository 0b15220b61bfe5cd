"""Settings of the router."""

from typing import Self

from pydantic import Field, model_validator

from kvtier.config.fields import (
    MIB,
    Count,
    FilePath,
    Name,
    Port,
    Seconds,
    Section,
    Share,
    Size,
    Whole,
    require_tls_pair,
)

__all__ = ["RouterSettings"]


class RouterSettings(Section):
    """The router in front of several OpenAI-compatible engines."""

    host: Name = Field(
        default="127.0.0.1", description="Address to listen on; off loopback it needs TLS or allow_plaintext"
    )
    port: Port = Field(default=8080, description="TCP port; 0: any free one")
    tls_cert: FilePath | None = Field(default=None, description="Certificate chain (PEM); needs tls_key")
    tls_key: FilePath | None = Field(default=None, description="Private key of tls_cert (PEM)")
    allow_plaintext: bool = Field(default=False, description="Listen off loopback without TLS")
    engines: Name | None = Field(
        default=None, description="URLs of the engines, with commas between, such as http://10.0.0.1:8000"
    )
    ca_file: FilePath | None = Field(
        default=None,
        description="Certificate authorities (PEM) that engines with https are verified by, instead of the system's",
    )
    events: Name | None = Field(
        default=None, description="Where each engine publishes its block events, in the same order; - where it does not"
    )
    replays: Name | None = Field(
        default=None, description="Where each engine replays them, in the same order; - where it does not"
    )
    tokenizer: Name = Field(
        default="engine",
        description="Who makes tokens of prompts: engine (its /tokenize), a model's directory, or text: nobody, and "
        "prompts are told apart by their text",
    )
    block_size: Count = Field(default=16, description="Tokens per block of engines that publish no events")
    index_blocks: Count = Field(default=1_000_000, description="Blocks that are known of one engine, at most")
    host_share: Share = Field(default=0.9, description="What a token in host memory is worth of one on the device")
    storage_share: Share = Field(default=0.7, description="What one on disk or in a remote store is worth")
    decode_tokens: Whole = Field(
        default=64, description="Tokens of prefill that a request under way weighs as much as, beside its own"
    )
    health_interval: Seconds = Field(default=2.0, description="Seconds between two looks at each engine")
    connect_timeout: Seconds = Field(
        default=5.0, description="Seconds that an engine has to take a connection, and to answer a look at it"
    )
    tokenize_timeout: Seconds = Field(
        default=2.0, description="Seconds that an engine has for /tokenize; then the prompt is told by its text"
    )
    max_body: Size = Field(default=8 * MIB, description="Size of a request's body, at most")
    api_key_file: FilePath | None = Field(
        default=None, description="File of keys that open the router, one a line; none: the engines judge by themselves"
    )
    drain_timeout: Seconds = Field(
        default=30.0, description="Seconds that requests under way have to end after SIGTERM"
    )

    @model_validator(mode="after")
    def _tls_is_a_pair(self) -> Self:
        require_tls_pair(self.tls_cert, self.tls_key)
        return self
