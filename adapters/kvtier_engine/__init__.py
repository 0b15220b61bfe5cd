"""The reference adapter: the bundled engine's KV on a `TieredStore`.

An adapter says three things, and this file says them for the bundled engine:

    1. what the KV is compatible with    `namespace_of`: weights, layout, numerics
    2. where the bytes of a block lie    the device pool, block-major: one block is one contiguous row
    3. how the two halves are wired      `connect`: staging memory, host regions, scheduler half, worker half
    4. what computing KV anew costs      `prefill_shape`: how a prefill's work grows with depth
"""

from contextlib import ExitStack, closing
from dataclasses import dataclass

from kvtier.connector import ConnectorOptions, CopyRule, TierScheduler, TierWorker
from kvtier.cost import PrefillShape
from kvtier.cpu import AttachedRegion, StagingRegion
from kvtier.engine.models import LoadedModel
from kvtier.errors import ConfigError, FormatMismatch
from kvtier.keys import Namespace, namespace_index
from kvtier.layout import Layout
from kvtier.store import TieredStore

__all__ = ["Connection", "connect", "namespace_of", "prefill_shape"]

_STAGING_BYTES = 64 << 20
_STAGING_STEPS = 4


@dataclass(frozen=True, slots=True)
class Connection:
    """Both hook halves of one engine, and what they hold."""

    scheduler: TierScheduler
    worker: TierWorker
    staging: tuple[StagingRegion, ...]

    def close(self) -> None:
        """End the copies and let go of the staging memory; the store stays open. Idempotent."""
        self.scheduler.close()
        self.worker.close()
        for region in self.staging:
            region.close()


def namespace_of(model: LoadedModel, layout: Layout, salt: str = "") -> Namespace:
    """What must match for this model's KV to be reusable.

    Args:
        model: its weights' fingerprint and numerics (rope scaling, compute dtype) are part of the name.
        layout: shape and dtype of the blocks.
        salt: separates users who must not share prefixes.
    """
    return Namespace(model.fingerprint, layout.fingerprint, model.model.numerics, salt=salt)


def prefill_shape(model: LoadedModel) -> PrefillShape:
    """How the work of this model's prefill grows with depth: 2 P for a token, and a for each one it attends to."""
    config = model.config
    return PrefillShape(config.pair_work / (2 * config.block_params))


def _window_blocks(layout: Layout) -> int | None:
    """Blocks before a full one's end that its next token attends to, in all layers; None: all."""
    window = layout.groups[0].window
    return None if window is None else max(1, -(-(window - 1) // layout.block_size))


def _staging(layout: Layout, token_budget: int) -> tuple[StagingRegion, ...]:
    """A region per layer group, each for as many blocks."""
    sizes = [layout.block_bytes(group) for group in range(len(layout.groups))]
    per_step = -(-token_budget // layout.block_size)
    slots = max(_STAGING_STEPS * per_step, _STAGING_BYTES // sum(sizes), 1)
    with ExitStack() as stack:
        regions = tuple(stack.enter_context(closing(StagingRegion(size, slots))) for size in sizes)
        stack.pop_all()
    return regions


def connect(
    store: TieredStore,
    model: LoadedModel,
    layout: Layout,
    token_budget: int,
    *,
    salt: str = "",
    recompute_gate: bool = True,
    copies: CopyRule = "inclusive",
) -> Connection:
    """Wire both hook halves over `store`, in this process.

    Args:
        store: stays the caller's; several engines may share it.
        model: whose KV it is.
        layout: of the blocks on the device, as `kvtier.engine.core.kv_layout` has it.
        token_budget: tokens per engine step; staging holds the blocks of several steps.
        salt: see `namespace_of`.
        recompute_gate: load only what is cheaper to load than to compute.
        copies: see `ConnectorOptions`.

    Raises:
        ConfigError: `copies` is exclusive, and only some layers have a window, or a tier's format cannot take these
            blocks.
    """
    namespace = namespace_of(model, layout, salt)
    try:
        store.register(namespace_index(namespace.digest), layout)
    except FormatMismatch as error:
        raise ConfigError(f"a tier's format cannot take the device's blocks: {error}") from error
    options = ConnectorOptions(
        groups=len(layout.groups),
        windowed_groups=len(layout.groups) - 1,
        recompute_gate=recompute_gate,
        window_blocks=_window_blocks(layout),
        shape=prefill_shape(model),
        load_seconds=store.options.load_deadline,
        copies=copies,
    )
    staging = _staging(layout, token_budget)
    try:
        shares = [*store.host.regions(), *(share for region in staging for share in region.regions())]
        regions = {
            share.region: AttachedRegion(share.fd, share.nbytes, share.writable, share.memory) for share in shares
        }
    except BaseException:
        for region in staging:
            region.close()
        raise
    scheduler = TierScheduler(store, namespace, layout.block_size, staging, options)
    return Connection(scheduler, TierWorker(regions, layout), staging)
