"""Connector: the two hook halves over a TieredStore, for any engine's adapter."""

from kvtier.connector.options import ConnectorOptions, CopyRule
from kvtier.connector.scheduler import TierScheduler
from kvtier.connector.worker import TierWorker

__all__ = ["ConnectorOptions", "CopyRule", "TierScheduler", "TierWorker"]
