"""What the tiers hold as vLLM's KV events: the blocks by vLLM's own names, the tiers as its media.

Whoever follows vLLM's events knows blocks by vLLM's hashes. The store does not, so the names of all blocks that this
engine saves are remembered for as long as a tier holds them. Of blocks that were there before, nothing is told.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.events import Event, EventLog
from kvtier.events.frames import MEDIA
from kvtier_vllm.keys import Tracked

__all__ = ["Names"]

# Blocks that may be on their way into a tier at one time.
_UNDERWAY = 4096


class _Block(NamedTuple):
    """What vLLM says of a block."""

    name: Any
    parent: Any
    tokens: list[int]
    lora_id: int | None
    lora_name: str | None


class Names:
    """Follows a store's event log.

    Args:
        log: of the store.
        ns: of this engine's blocks.
        block_size: tokens per block.
    """

    def __init__(self, log: EventLog, ns: int, block_size: int) -> None:
        self._log = log
        self._ns = ns
        self._block_size = block_size
        self._seen = 0
        self._blocks: dict[bytes, _Block] = {}
        self._held: dict[bytes, set[str]] = {}

    def learn(self, tracked: Tracked, first: int, keys: Sequence[bytes]) -> None:
        """A request's blocks from `first` on are about to be saved under these store keys."""
        request, size = tracked.request, self._block_size
        hashes = [maybe_convert_block_hash(one) for one in request.block_hashes[max(0, first - 1) : first + len(keys)]]
        if first == 0:
            hashes.insert(0, None)
        lora = request.lora_request
        adapter = (None, None) if lora is None else (lora.lora_int_id, lora.lora_name)
        for at, (key, parent, name) in enumerate(zip(keys, hashes, hashes[1:], strict=False), first):
            tokens = request.all_token_ids[at * size : (at + 1) * size]
            self._blocks[key] = _Block(name, parent, tokens, *adapter)
        if len(self._blocks) > 2 * len(self._held) + _UNDERWAY:
            # What no tier took, after all.
            late = list(self._blocks)[-_UNDERWAY:]
            self._blocks = {key: self._blocks[key] for key in dict.fromkeys([*self._held, *late])}

    def take(self) -> list[Any]:
        """Events since the last call."""
        told: list[Any] = []
        while found := self._log.since(self._seen).events:
            self._seen = found[-1].sequence
            for event in found:
                if event.ns in (None, self._ns) and event.tier in MEDIA:
                    told += self._stored(event) if event.kind == "stored" else self._removed(event)
        return told

    def _stored(self, event: Event) -> list[Any]:
        told = []
        for key in event.keys:
            block = self._blocks.get(key)
            if block is None or event.tier in self._held.setdefault(key, set()):
                continue
            self._held[key].add(event.tier)
            medium = MEDIA[event.tier]
            told.append(
                BlockStored(
                    block_hashes=[block.name],
                    parent_block_hash=block.parent,
                    token_ids=block.tokens,
                    block_size=self._block_size,
                    lora_id=block.lora_id,
                    medium=medium,
                    lora_name=block.lora_name,
                )
            )
        return told

    def _removed(self, event: Event) -> list[Any]:
        keys = event.keys if event.kind == "removed" else [key for key in self._held if event.tier in self._held[key]]
        gone = [self._forget(key, event.tier) for key in keys if event.tier in self._held.get(key, ())]
        return [BlockRemoved(block_hashes=gone, medium=MEDIA[event.tier])] if gone else []

    def _forget(self, key: bytes, tier: str) -> Any:
        name = self._blocks[key].name
        self._held[key].discard(tier)
        if not self._held[key]:
            del self._held[key], self._blocks[key]
        return name
