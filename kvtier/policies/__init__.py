"""Policies: what leaves first, what is written, what is fetched early. Pure decisions, no bytes, no threads."""

from kvtier.policies.admission import AdmissionPolicy, AlwaysAdmit, BudgetedAdmission, SecondTouch, Weighed, WriteMeter
from kvtier.policies.arc import ArcPolicy
from kvtier.policies.base import EvictionPolicy
from kvtier.policies.clock2 import Clock2Policy
from kvtier.policies.lru import LruPolicy
from kvtier.policies.optimum import optimum_hits
from kvtier.policies.prefetch import NextTurn, NoPrefetch, PrefetchPolicy
from kvtier.policies.registry import ADMISSIONS, POLICIES, PREFETCHES, make_admission, make_policy, make_prefetch
from kvtier.policies.s3fifo import S3FifoPolicy

__all__ = [
    "ADMISSIONS",
    "POLICIES",
    "PREFETCHES",
    "AdmissionPolicy",
    "AlwaysAdmit",
    "ArcPolicy",
    "BudgetedAdmission",
    "Clock2Policy",
    "EvictionPolicy",
    "LruPolicy",
    "NextTurn",
    "NoPrefetch",
    "PrefetchPolicy",
    "S3FifoPolicy",
    "SecondTouch",
    "Weighed",
    "WriteMeter",
    "make_admission",
    "make_policy",
    "make_prefetch",
    "optimum_hits",
]
