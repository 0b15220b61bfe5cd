"""EngineOptions: sizes and limits of one engine."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from kvtier.engine.rules import SchedulingRules
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.config import EngineSettings

__all__ = ["EngineOptions", "KvFormat"]

KvFormat: TypeAlias = Literal["raw", "int8", "int8r", "fp8", "int4r"]

_DEFAULT_MEMORY = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Validated on construction.

    Args:
        block_size: tokens per block.
        num_blocks: blocks of the device pool; excludes `memory_bytes`.
        memory_bytes: size of the device pool; 1 GiB where neither is given.
        max_running: requests that hold device blocks at a time.
        token_budget: tokens that a step computes at most.
        max_model_len: tokens of prompt and output together; None is what both the model and the pool take.
        seed: of requests that bring none of their own.
        draft_tokens: guesses per request and step at most, where a proposer makes any.
        cuda_graphs: replay decode steps as CUDA graphs, on devices, with attention and models that can.
        scheduling: who is computed first, and who gives way.
        kv_format: how the device pool keeps KV. In all but `raw` the same memory holds two to four times the blocks,
            and outputs are not those of raw KV.

    Raises:
        ConfigError: a value is out of range, or two exclude each other.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = None
    max_running: int = 16
    token_budget: int = 512
    max_model_len: int | None = None
    seed: int = 0
    draft_tokens: int = 8
    cuda_graphs: bool = True
    scheduling: SchedulingRules = field(default_factory=SchedulingRules)
    kv_format: KvFormat = "raw"

    def __post_init__(self) -> None:
        if self.num_blocks is not None and self.memory_bytes is not None:
            raise ConfigError(
                f"num_blocks={self.num_blocks} and memory_bytes={self.memory_bytes} exclude each other; drop one"
            )
        if self.kv_format not in get_args(KvFormat):
            raise ConfigError(f"kv_format={self.kv_format!r}: expected one of {', '.join(get_args(KvFormat))}")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed={self.seed}: expected 0..{2**64 - 1}")
        for name in (
            "block_size",
            "num_blocks",
            "memory_bytes",
            "max_running",
            "token_budget",
            "max_model_len",
            "draft_tokens",
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r}: expected an integer, at least 1")
        if self.num_blocks is None and self.memory_bytes is None:
            object.__setattr__(self, "memory_bytes", _DEFAULT_MEMORY)

    @classmethod
    def from_config(cls, settings: "EngineSettings") -> "EngineOptions":
        """The options that the `engine` section of the configuration describes."""
        return cls(
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            memory_bytes=settings.memory,
            max_running=settings.max_running,
            token_budget=settings.token_budget,
            max_model_len=settings.max_model_len,
            seed=settings.seed,
            draft_tokens=settings.draft_tokens,
            cuda_graphs=settings.cuda_graphs,
            scheduling=SchedulingRules.from_config(settings),
            kv_format=settings.kv_format,
        )
