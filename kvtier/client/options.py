"""How a client behaves, as data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from kvtier.errors import ConfigError

__all__ = ["ClientOptions", "DataPath"]

DataPath: TypeAlias = Literal["auto", "socket", "never"]


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Options of `Client` and `AsyncClient`.

    Args:
        timeout: seconds that a call may take, its retries included, unless the call says otherwise.
        attempts: how often an idempotent verb is tried at most; all others are tried once.
        backoff: seconds; the pause before retry n is drawn from [0, backoff * 2^n) ("full jitter", Brooker, AWS
            Architecture Blog, 2015).
        longest_backoff: seconds; no pause is longer, unless the server asks for it (Retry-After).
        connections: to the REST port, at most.
        breaker_failures: failures in a row after which an address is left alone.
        breaker_pause: seconds until it is tried again, doubled at every failure up to sixteen times.
        data: how block bytes travel. auto: shared memory, else the data port, else REST; socket: as auto, without
            shared memory; never: REST.
        ca_file: certificates that sign the server's, as PEM; None: those of this machine.
    """

    timeout: float = 10.0
    attempts: int = 4
    backoff: float = 0.05
    longest_backoff: float = 2.0
    connections: int = 16
    breaker_failures: int = 5
    breaker_pause: float = 1.0
    data: DataPath = "auto"
    ca_file: Path | None = None

    def __post_init__(self) -> None:
        if self.data not in get_args(DataPath):
            raise ConfigError(f"data {self.data!r}: expected one of {', '.join(get_args(DataPath))}")
        positive = {
            "timeout": self.timeout,
            "attempts": self.attempts,
            "backoff": self.backoff,
            "longest_backoff": self.longest_backoff,
            "connections": self.connections,
            "breaker_failures": self.breaker_failures,
            "breaker_pause": self.breaker_pause,
        }
        bad = next((name for name, value in positive.items() if not value > 0), None)
        if bad is not None:
            raise ConfigError(f"{bad} = {positive[bad]}: expected more than 0")
