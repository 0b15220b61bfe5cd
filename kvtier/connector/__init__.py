"""Connector: the two hook halves over a TieredStore, for any engine's adapter."""

from kvtier.connector.options import ConnectorOptions
from kvtier.connector.scheduler import TierScheduler
from kvtier.connector.worker import TierWorker

__all__ = ["ConnectorOptions", "TierScheduler", "TierWorker"]
