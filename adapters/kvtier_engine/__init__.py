"""The reference adapter: the bundled engine's KV on a `TieredStore`.

An adapter says three things, and this file says them for the bundled engine:

    1. what the KV is compatible with    `namespace_of`: weights, layout, numerics
    2. where the bytes of a block lie    the device pool, block-major: one block is one contiguous row
    3. how the two halves are wired      `connect`: staging memory, host regions, scheduler half, worker half
"""

from dataclasses import dataclass

from kvtier.connector import TierScheduler, TierWorker
from kvtier.cpu import AttachedRegion, StagingRegion
from kvtier.engine.models import LoadedModel
from kvtier.keys import Namespace
from kvtier.layout import Layout
from kvtier.store import TieredStore

__all__ = ["Connection", "connect", "namespace_of"]

_STAGING_BYTES = 64 << 20
_STAGING_STEPS = 4


@dataclass(frozen=True, slots=True)
class Connection:
    """Both hook halves of one engine, and what they hold."""

    scheduler: TierScheduler
    worker: TierWorker
    staging: StagingRegion

    def close(self) -> None:
        """End the copies and let go of the staging memory; the store stays open. Idempotent."""
        self.worker.close()
        self.staging.close()


def namespace_of(model: LoadedModel, layout: Layout, salt: str = "") -> Namespace:
    """What must match for this model's KV to be reusable.

    Args:
        model: its weights' fingerprint and numerics (rope scaling, compute dtype) are part of the name.
        layout: shape and dtype of the blocks.
        salt: separates users who must not share prefixes.
    """
    return Namespace(model.fingerprint, layout.fingerprint, model.model.numerics, salt=salt)


def connect(store: TieredStore, model: LoadedModel, layout: Layout, token_budget: int, salt: str = "") -> Connection:
    """Wire both hook halves over `store`, in this process.

    Args:
        store: stays the caller's; several engines may share it.
        model: whose KV it is.
        layout: uniform, one shard.
        token_budget: tokens per engine step; staging holds the blocks of several steps.
        salt: see `namespace_of`.
    """
    block_bytes = layout.block_bytes()
    per_step = -(-token_budget // layout.block_size)
    staging = StagingRegion(block_bytes, max(_STAGING_STEPS * per_step, _STAGING_BYTES // block_bytes, 1))
    try:
        shares = [*store.host.regions(), *staging.regions()]
        regions = {share.region: AttachedRegion(share.fd, share.nbytes, share.writable) for share in shares}
    except BaseException:
        staging.close()
        raise
    scheduler = TierScheduler(store, namespace_of(model, layout, salt), layout.block_size, staging)
    return Connection(scheduler, TierWorker(regions), staging)
