"""Settings of the remote tier."""

from typing import Literal, Self

from pydantic import Field, model_validator

from kvtier.config.fields import Count, FilePath, Name, Seconds, Section, Size, Whole, conflict

__all__ = ["RemoteSettings"]


class RemoteSettings(Section):
    """A store that other machines share, below all other tiers."""

    url: Name = Field(
        description="Where it is: valkey://host:port, valkeys:// (TLS), valkey+cluster://, valkeys+cluster://, the "
        "same with redis, s3://bucket/prefix, gs://, az://, file:///directory, memory:///, or kvtier://host:port, "
        "another machine's cache service"
    )
    prefix: Name = Field(
        default="kvt1:", description="What the names of all records there begin with; processes that share it share KV"
    )
    format: Name = Field(
        default="raw", description="How blocks are encoded here; bitsplit is lossless, lossy ones need accept_lossy"
    )
    ttl: Whole = Field(default=0, description="Seconds after which the server drops a block; 0: it never does")
    username: Name | None = Field(default=None, description="Whom to log in as; none: the server's default user")
    password_file: FilePath | None = Field(default=None, description="File whose first line is the password")
    password_variable: Name | None = Field(
        default=None, description="Environment variable that holds the password, instead of password_file"
    )
    token_file: FilePath | None = Field(default=None, description="File whose first line is a cache service's token")
    ca_file: FilePath | None = Field(
        default=None, description="Certificates that sign the server's, as PEM; none: the system's"
    )
    cert_file: FilePath | None = Field(default=None, description="This client's certificate, as PEM; needs key_file")
    key_file: FilePath | None = Field(default=None, description="The key of cert_file, as PEM")
    options: str = Field(
        default="",
        description="Further options of an object store, name=value with commas between: run, region, endpoint",
    )
    timeout: Seconds = Field(
        default=2.0, description="Seconds for an answer; a server that gives none then is left alone for a while"
    )
    connections: Count = Field(default=4, description="Connections that move blocks at a time, at most")
    absent_ttl: float = Field(
        default=0.5,
        ge=0,
        allow_inf_nan=False,
        description="Seconds for which a block that was not there is not asked for again",
    )
    capacity: Size | None = Field(
        default=None, description="What the server may hold, for display, where it does not say so itself"
    )
    write: Literal["through", "leave", "second_touch"] | None = Field(
        default=None,
        description="When blocks are written: at once, when they are about to leave host, or at their second touch; "
        "none: as to NVMe, whose rule it has to be, or through where there is none",
    )

    @model_validator(mode="after")
    def _one_password(self) -> Self:
        if self.password_file is not None and self.password_variable is not None:
            raise conflict(
                "password_file and password_variable both name the password; keep one",
                "password_file",
                "password_variable",
            )
        return self
