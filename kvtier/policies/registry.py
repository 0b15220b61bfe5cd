"""Policies by name: eviction, prefetch, admission."""

import time
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

from kvtier.errors import CapacityError, ConfigError
from kvtier.plugins import Registry
from kvtier.policies.admission import AdmissionPolicy
from kvtier.policies.base import EvictionPolicy
from kvtier.policies.prefetch import PrefetchPolicy

__all__ = ["ADMISSIONS", "POLICIES", "PREFETCHES", "make_admission", "make_policy", "make_prefetch"]

_P = TypeVar("_P")

POLICIES: Registry[EvictionPolicy] = Registry(
    "kvtier.policies",
    {
        "lru": "kvtier.policies.lru:LruPolicy",
        "arc": "kvtier.policies.arc:ArcPolicy",
        "clock2": "kvtier.policies.clock2:Clock2Policy",
        "s3fifo": "kvtier.policies.s3fifo:S3FifoPolicy",
    },
)

PREFETCHES: Registry[PrefetchPolicy] = Registry(
    "kvtier.prefetch",
    {"none": "kvtier.policies.prefetch:NoPrefetch", "next_turn": "kvtier.policies.prefetch:NextTurn"},
)

ADMISSIONS: Registry[AdmissionPolicy] = Registry(
    "kvtier.admission", {"second_touch": "kvtier.policies.admission:SecondTouch"}
)

_EXPECTED = "a class of kvtier.policies.EvictionPolicy, called as Class(capacity_blocks, clock=clock)"


class _PolicyClass(Protocol):
    def __call__(self, capacity_blocks: int, *, clock: Callable[[], float]) -> EvictionPolicy: ...


def make_policy(name: str, capacity_blocks: int, clock: Callable[[], float] = time.monotonic) -> EvictionPolicy:
    """A new policy for a tier that holds about `capacity_blocks` blocks.

    Args:
        name: "lru", "arc", "clock2", "s3fifo", what another distribution registered, or "module:Class"; the class is
            called as `Class(capacity_blocks, clock=clock)`.
        capacity_blocks: what the policy sizes its queues and ghosts by.
        clock: seconds, for hints that expire.

    Raises:
        CapacityError: no block.
        ConfigError: no such policy, or what it names is none.
    """
    if capacity_blocks < 1:
        raise CapacityError(f"policy {name!r} for {capacity_blocks} blocks: expected at least one")
    try:
        policy = cast("_PolicyClass", POLICIES.get(name))(capacity_blocks, clock=clock)
    except TypeError as error:
        raise ConfigError(f"policy {name!r} cannot be made ({error}): expected {_EXPECTED}") from error
    if not callable(getattr(policy, "victims", None)):
        raise ConfigError(f"policy {name!r} is a {type(policy).__name__}: expected {_EXPECTED}")
    return policy


def make_prefetch(name: str) -> PrefetchPolicy:
    """A new prefetch policy.

    Args:
        name: "none", "next_turn", what another distribution registered, or "module:Class"; called without arguments.

    Raises:
        ConfigError: no such policy, or what it names is none.
    """
    return _made("prefetch", name, PREFETCHES, "kvtier.policies.PrefetchPolicy", "turn_ended")


def make_admission(name: str) -> AdmissionPolicy:
    """A new admission policy.

    Args:
        name: "second_touch", what another distribution registered, or "module:Class"; called without arguments.

    Raises:
        ConfigError: no such policy, or what it names is none.
    """
    return _made("admission", name, ADMISSIONS, "kvtier.policies.AdmissionPolicy", "admit")


def _made(kind: str, name: str, registry: Registry[_P], protocol: str, verb: str) -> _P:
    expected = f"a class of {protocol}, called without arguments"
    try:
        policy = registry.get(name)()
    except TypeError as error:
        raise ConfigError(f"{kind} {name!r} cannot be made ({error}): expected {expected}") from error
    if not callable(getattr(policy, verb, None)):
        raise ConfigError(f"{kind} {name!r} is a {type(policy).__name__}: expected {expected}")
    return policy
