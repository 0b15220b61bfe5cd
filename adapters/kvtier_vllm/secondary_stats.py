"""Figures of a secondary tier's store, as statistics of vLLM's `OffloadingConnector`: `vllm:kvtier_secondary_…`."""

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from kvtier.metrics import Metrics
from kvtier_vllm.stats import COUNTERS, GAUGES, Figures

__all__ = ["SecondaryFigures"]

_PREFIX = "vllm:kvtier_secondary_"
# Of the connector, which loads and decides.
_ELSEWHERE = ("loaded_bytes", "gate_decisions")


class SecondaryFigures:
    """Tells what changed in a store's metrics.

    Args:
        metrics: of the store.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._figures = Figures(metrics)

    @staticmethod
    def definitions() -> dict[str, OffloadingMetricMetadata]:
        """What vLLM is to know of each metric."""
        said = "As kvtier_{} of kvtier's own metrics, of the store below vLLM's host tier"
        counters = {name: labels for name, labels in COUNTERS.items() if name not in _ELSEWHERE}
        found: dict[str, OffloadingMetricMetadata] = {
            _PREFIX + name: OffloadingCounterMetadata(said.format(name), labels) for name, labels in counters.items()
        }
        return found | {_PREFIX + name: OffloadingGaugeMetadata(said.format(name), ("tier",)) for name in GAUGES}

    def take(self) -> OffloadingConnectorStats | None:
        """What changed since the last call; None where it is not time yet."""
        changed = self._figures.take(moved=False)
        if changed is None:
            return None
        stats = OffloadingConnectorStats()
        for name, values in changed.data["added"].items():
            for labels, value in values.items() if name not in _ELSEWHERE else ():
                stats.increase_counter(_PREFIX + name, value, labels)
        for name, values in changed.data["now"].items():
            for labels, value in values.items():
                stats.set_gauge(_PREFIX + name, value, labels)
        return stats
