"""What the two sides of the connector tell each other, in vLLM's envelopes."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtier.hooks import TransferPlan, TransferResults
from kvtier_vllm.identity import Pool

__all__ = ["Introduction", "StepReport", "StepWork"]


@dataclass(frozen=True)
class Introduction(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once."""

    pool: Pool


@dataclass(frozen=True)
class StepWork(KVConnectorMetadata):
    """Scheduler to workers, with every step.

    plan: the copies. receiving: load job -> request that waits for it between steps. invalid: device blocks that were
    promised and will not be filled. ended: requests whose load is over without a copy.
    """

    plan: TransferPlan
    receiving: dict[int, str] = field(default_factory=dict)
    invalid: frozenset[int] = frozenset()
    ended: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepReport(KVConnectorWorkerMetadata):
    """Workers to scheduler: one entry per worker that has something to report."""

    results: tuple[TransferResults, ...]

    def aggregate(self, other: Any) -> "StepReport":
        """Both."""
        return StepReport(self.results + other.results)
