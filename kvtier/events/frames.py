"""Block events as vLLM's ZMQ publisher writes them, so that whatever follows vLLM follows kvtier, and the reverse.

    frames of a message    topic, sequence number (8 bytes, big-endian), payload
    payload                msgpack [timestamp, [event, …], data-parallel rank]; a rank of null is left out
    event                  {"type": "BlockStored", "block_hashes": [hash, …], "parent_block_hash": hash or null,
                            "token_ids": [token, …], "block_size": tokens, "lora_id": null, "medium": "GPU", …}
                           {"type": "BlockRemoved", "block_hashes": [hash, …], "medium": "GPU", …}
                           {"type": "AllBlocksCleared"}
    replay                 8 bytes of a sequence number are answered by the messages from that on, and by a last one
                           whose sequence number is -1

Older publishers write an event as an array, its type first; both are read. The names are those of vLLM 0.32.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import msgspec

from kvtier.errors import FormatMismatch

__all__ = [
    "END_OF_REPLAY",
    "MEDIA",
    "Batch",
    "BlockEvent",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "BlocksCleared",
    "decode_batch",
    "decode_sequence",
    "encode_batch",
    "encode_sequence",
]

END_OF_REPLAY = -1
"""Sequence number of the message that ends a replay."""

MEDIA = {"device": "GPU", "host": "CPU", "nvme": "STORAGE"}
"""Tier -> what vLLM calls it. A remote tier tells nothing: what leaves it, nobody here learns."""

BlockHash: TypeAlias = bytes | int | str
"""An engine's own name of a block; only equality counts."""

_SEQUENCE_BYTES = 8
_EXPECTED = 'a batch such as [1.5, [{"type": "BlockStored", …}]]'


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Consecutive blocks of one chain are in a medium. Fields without a default are written even if they are null.

    block_hashes: of the blocks. parent_block_hash: of the block before the first, None at the beginning. token_ids: of
    all of them, `block_size` each; empty where the publisher says only that known blocks are in a further medium.
    extra_keys: what besides its tokens makes a block's hash, one entry per block.
    """

    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Blocks are not in a medium (None: the device) any more."""

    block_hashes: list[Any]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class BlocksCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True, frozen=True):
    """Nothing is left in any medium."""


BlockEvent: TypeAlias = BlockStored | BlockRemoved | BlocksCleared

_KINDS: dict[str, type[BlockEvent]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": BlocksCleared,
}


class Batch(NamedTuple):
    """A message's payload. skipped: events of kinds or shapes that are not known here."""

    time: float
    events: list[BlockEvent]
    rank: int | None = None
    skipped: int = 0


def encode_batch(time: float, events: Sequence[BlockEvent]) -> bytes:
    """A payload.

    Args:
        time: seconds since the epoch.
        events: in their order.
    """
    return msgspec.msgpack.encode([time, events])


def decode_batch(payload: bytes) -> Batch:
    """Read a payload, of whatever version of vLLM.

    Events that are of no known kind, or misshapen, are counted and left out: a stream goes on.

    Raises:
        FormatMismatch: it is no batch at all.
    """
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatMismatch(f"events payload of {len(payload)} bytes: {error}; expected {_EXPECTED}") from error
    if not (isinstance(batch, list) and len(batch) >= 2 and isinstance(batch[0], int | float)):
        raise FormatMismatch(f"events payload of {len(payload)} bytes: expected {_EXPECTED}")
    raw = batch[1] if isinstance(batch[1], list) else []
    events = [event for one in raw if (event := _event(one)) is not None]
    rank = batch[2] if len(batch) > 2 and isinstance(batch[2], int) else None
    return Batch(float(batch[0]), events, rank, len(raw) - len(events))


def _event(raw: Any) -> BlockEvent | None:
    fields: dict[str, Any] = {}
    name: Any = None
    if isinstance(raw, dict):
        name, fields = raw.get("type"), raw
    elif isinstance(raw, list) and raw:
        name, kind = raw[0], _kind(raw[0])
        fields = dict(zip(kind.__struct_fields__, raw[1:], strict=False)) if kind is not None else {}
    kind = _kind(name)
    if kind is None:
        return None
    try:
        event: BlockEvent = msgspec.convert({**_absent(kind), **fields, "type": name}, kind)
    except msgspec.ValidationError:
        return None
    return event if _sound(event) else None


def _kind(name: Any) -> type[BlockEvent] | None:
    return _KINDS.get(name) if isinstance(name, str) else None


@cache
def _absent(kind: type[BlockEvent]) -> dict[str, None]:
    """Fields without a default that older publishers do not know."""
    return dict.fromkeys(kind.__struct_fields__[: len(kind.__struct_fields__) - len(kind.__struct_defaults__)])


def _sound(event: BlockEvent) -> bool:
    """Whether its hashes can be compared, and there are as many tokens as blocks need."""
    if isinstance(event, BlocksCleared):
        return True
    named = [*event.block_hashes]
    if isinstance(event, BlockStored):
        told = len(event.token_ids)
        if told and (event.block_size < 1 or told != event.block_size * len(named)):
            return False
        if event.extra_keys is not None and len(event.extra_keys) != len(named):
            return False
        if event.parent_block_hash is not None:
            named.append(event.parent_block_hash)
    return all(isinstance(one, bytes | int | str) for one in named)


def encode_sequence(sequence: int) -> bytes:
    """8 bytes."""
    return sequence.to_bytes(_SEQUENCE_BYTES, "big", signed=True)


def decode_sequence(frame: bytes) -> int:
    """A sequence number, `END_OF_REPLAY` among them.

    Raises:
        FormatMismatch: another length.
    """
    if len(frame) != _SEQUENCE_BYTES:
        raise FormatMismatch(f"sequence number of {len(frame)} bytes: expected {_SEQUENCE_BYTES}")
    return int.from_bytes(frame, "big", signed=True)
