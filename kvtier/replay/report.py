"""What a replay found out, and how it is told to programs.

hit ratio        sum over requests of min(blocks found x tokens per block, prompt tokens) / all prompt tokens
saved compute    prefill of a prefix of n tokens weighs 2 P n + L h (d_qk + d_v) n^2, for Llama-3-8B:
                 1.61e10 n + 2.62e5 n^2 floating-point operations
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

__all__ = ["Outcome", "Sample", "TierOutcome", "prefill_flops"]

_FLOPS_PER_TOKEN = 1.61e10
_FLOPS_PER_TOKEN_SQUARED = 2.62e5


def prefill_flops(tokens: int) -> float:
    """Floating-point operations of the prefill of a prompt, for Llama-3-8B."""
    return _FLOPS_PER_TOKEN * tokens + _FLOPS_PER_TOKEN_SQUARED * tokens * tokens


class Sample(NamedTuple):
    """State at one moment: seconds of the trace, share of each tier that is occupied, token hit ratio so far."""

    at: float
    occupied: Mapping[str, float]
    hit_tokens: float


@dataclass(frozen=True, slots=True)
class TierOutcome:
    """What one tier did.

    Args:
        capacity_blocks: how many blocks it can hold.
        blocks: how many it held in the end.
        hit_tokens: share of all prompt tokens that was found here.
        read_bytes, written_bytes: KV bytes that left and entered it (blocks x KV bytes per block).
        evicted, dropped: blocks by reason.
        busy_seconds: of a simulated medium: time that it worked; None elsewhere.
    """

    capacity_blocks: int
    blocks: int
    hit_tokens: float
    read_bytes: int
    written_bytes: int
    evicted: Mapping[str, int]
    dropped: Mapping[str, int]
    busy_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one replay; ratios are shares of 1.

    Args:
        policy: which eviction policy decided in host.
        capacity_blocks: of host.
        hit_tokens, optimum_hit_tokens: token hit ratio of all tiers, and the best possible one of a cache that knows
            the future and has the room of all tiers together.
        saved_compute: share of the prefill's operations that hits saved.
        tiers: by name, the device included where it is simulated.
        hints: which hints were given.
        requests, seconds, cpu_seconds: how much was replayed, and what that took.
        samples: over the trace's time.
    """

    policy: str
    capacity_blocks: int
    hit_tokens: float
    saved_compute: float
    tiers: Mapping[str, TierOutcome]
    hints: str
    requests: int
    touches: int
    block_bytes: int
    seconds: float
    cpu_seconds: float
    optimum_hit_tokens: float | None = None
    samples: tuple[Sample, ...] = ()

    @property
    def nvme_bytes_written(self) -> int:
        """KV bytes written to NVMe."""
        return self.tiers["nvme"].written_bytes if "nvme" in self.tiers else 0

    @property
    def blocks_per_second(self) -> float:
        """Blocks looked up, and stored where they were missing, per second of this machine."""
        return self.touches / self.seconds

    def to_json(self) -> dict[str, Any]:
        """What `kvtier replay --json` prints of it."""
        return {
            "policy": self.policy,
            "capacity_blocks": self.capacity_blocks,
            "hit_tokens": self.hit_tokens,
            "saved_compute": self.saved_compute,
            "tiers": {name: asdict(tier) for name, tier in self.tiers.items()},
            "nvme_bytes_written": self.nvme_bytes_written,
            "optimum_hit_tokens": self.optimum_hit_tokens,
            "hints": self.hints,
            "requests": self.requests,
            "touches": self.touches,
            "block_bytes": self.block_bytes,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "blocks_per_second": self.blocks_per_second,
        }
