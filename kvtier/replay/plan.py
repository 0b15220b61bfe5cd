"""What one replay is to do, and the store that it does it on."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from kvtier.cpu import HostTier
from kvtier.cpu.region import PAGE, round_up
from kvtier.errors import ConfigError
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.policies import make_policy
from kvtier.replay.clock import TraceClock
from kvtier.replay.records import KEY_RECORD_BYTES, fill_with_key
from kvtier.store import StoreOptions, TieredStore
from kvtier.store.options import WriteRule
from kvtier.testing.simulated import Medium, SimulatedTier
from kvtier.tiers import Tier

__all__ = ["COPY_RULES", "LLAMA3_8B_TOKEN_BYTES", "WRITE_RULES", "CopyRule", "ReplayPlan", "Stage", "open_stage"]

LLAMA3_8B_TOKEN_BYTES = 131072
"""KV bytes of one token of Llama-3-8B in bfloat16."""

CopyRule: TypeAlias = Literal["inclusive", "exclusive"]
COPY_RULES: tuple[str, ...] = get_args(CopyRule)

WRITE_RULES: tuple[str, ...] = get_args(WriteRule)

# A fast PCIe 4 drive, for the simulated one.
_NVME_BYTES_PER_SECOND = 6e9
_NVME_LATENCY_SECONDS = 1e-4
_NVME_SEGMENT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """One replay.

    Args:
        capacity_blocks, nvme_blocks, device_blocks: room of each tier; no room: no such tier.
        policy: eviction policy of host, a name or "module:Class".
        block_bytes: KV bytes per block.
        full_bytes: store and verify blocks of full length, on a real NVMe tier; else the smallest records.
        write_rule: when blocks go to NVMe.
        copies: what becomes of host's copies of device blocks: `inclusive`: nothing; `exclusive`: they leave host
            first (`TieredStore.duplicate`), and a block that leaves the device is put into host again.
        hints: which hints the store is given; see `kvtier.replay.foresight`.
        time_scale: replay so many times faster than the trace by sleeping; None: as fast as possible.
        seed: of what is drawn at random.
    """

    capacity_blocks: int
    policy: str = "lru"
    nvme_blocks: int = 0
    device_blocks: int = 0
    block_bytes: int = 512 * LLAMA3_8B_TOKEN_BYTES
    full_bytes: bool = False
    write_rule: WriteRule = "leave"
    copies: CopyRule = "inclusive"
    hints: str = "none"
    time_scale: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"capacity_blocks": 1, "nvme_blocks": 0, "device_blocks": 0, "block_bytes": 1}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                option, unit = name.rsplit("_", 1)
                raise ConfigError(f"{option} of {getattr(self, name)} {unit}: expected at least {lowest}")
        for name, value, known in (("write", self.write_rule, WRITE_RULES), ("copies", self.copies, COPY_RULES)):
            if value not in known:
                raise ConfigError(f"{name} {value!r}: expected one of {', '.join(known)}")

    @property
    def record_bytes(self) -> int:
        """Bytes of one record as the tiers see it."""
        return self.block_bytes if self.full_bytes else KEY_RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Stage:
    """An open store, and what measures it. `medium` is that of a simulated NVMe tier."""

    store: TieredStore
    host: HostTier
    clock: TraceClock
    metrics: Metrics
    medium: Medium | None


@contextmanager
def open_stage(plan: ReplayPlan) -> Iterator[Stage]:
    """A fresh store for one replay; all of it is gone afterwards.

    Raises:
        CapacityError: more memory than this machine has.
        ConfigError: an unknown policy.
    """
    clock, metrics = TraceClock(plan.time_scale), Metrics()
    with ExitStack() as stack:
        policy = make_policy(plan.policy, plan.capacity_blocks, clock=clock)
        host = HostTier(plan.capacity_blocks * round_up(plan.record_bytes), policy=policy, metrics=metrics)
        stack.callback(host.close)
        lower: list[Tier] = []
        medium = None
        if plan.nvme_blocks and plan.full_bytes:
            lower = [_real_nvme(plan, stack, metrics)]
        elif plan.nvme_blocks:
            medium = _medium(plan, clock)
            lower = [SimulatedTier(plan.nvme_blocks * PAGE, medium=medium, metrics=metrics, fill=fill_with_key)]
        options = StoreOptions(write_rule=plan.write_rule)
        store = TieredStore(host, lower, metrics=metrics, options=options, clock=clock)
        stack.callback(store.close)
        yield Stage(store, host, clock, metrics, medium)


def _real_nvme(plan: ReplayPlan, stack: ExitStack, metrics: Metrics) -> NvmeTier:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-replay-")))
    capacity = plan.nvme_blocks * round_up(plan.record_bytes)
    options = NvmeOptions(segment_bytes=min(_NVME_SEGMENT_BYTES, max(capacity, 1 << 20)), durable=False)
    tier = NvmeTier(directory / "nvme", capacity, options, metrics=metrics)
    stack.callback(tier.close)
    return tier


def _medium(plan: ReplayPlan, clock: TraceClock) -> Medium:
    # A record stands for a block: the medium moves it in the time that the block would take.
    rate = _NVME_BYTES_PER_SECOND * plan.record_bytes / plan.block_bytes
    return Medium(rate, _NVME_LATENCY_SECONDS, clock=clock, time_scale=plan.time_scale)
