"""Policies: which block leaves first. Pure decisions, no bytes, no threads."""

from kvtier.policies.base import EvictionPolicy
from kvtier.policies.lru import LruPolicy

__all__ = ["EvictionPolicy", "LruPolicy"]
