"""Frames: what vLLM writes is read, in both shapes; what is no event does no harm."""

from pathlib import Path

import msgspec
import pytest

from kvtier.errors import FormatMismatch
from kvtier.events.frames import (
    END_OF_REPLAY,
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    decode_batch,
    decode_sequence,
    encode_batch,
    encode_sequence,
)
from kvtier.replay.readers import read_trace

STORED = BlockStored([b"a" * 32, 7], None, list(range(8)), 4, None, "GPU", None)


def test_round_trip() -> None:
    events = [STORED, BlockRemoved([b"x", 1, "y"], "CPU"), BlocksCleared()]
    assert decode_batch(encode_batch(1.5, events)) == (1.5, events, None, 0)


def test_fields_without_a_default_are_written_even_if_null() -> None:
    _, [stored, removed, cleared] = msgspec.msgpack.decode(
        encode_batch(0, [STORED, BlockRemoved([1], None), BlocksCleared()])
    )
    assert list(stored) == [
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    ]  # fmt: skip
    assert list(removed) == ["type", "block_hashes", "medium"]
    assert cleared == {"type": "AllBlocksCleared"}


def test_events_of_older_versions_are_arrays() -> None:
    raw = [2.0, [["BlockStored", [1, 2], 0, [5, 6], 1, None], ["BlockRemoved", [1]], ["AllBlocksCleared"]], 3]
    batch = decode_batch(msgspec.msgpack.encode(raw))
    assert batch.events == [
        BlockStored([1, 2], 0, [5, 6], 1, None, None, None),
        BlockRemoved([1], None),
        BlocksCleared(),
    ]
    assert batch.rank == 3
    assert batch.skipped == 0


def test_fields_of_newer_versions_are_ignored() -> None:
    raw = [2.0, [{"type": "BlockRemoved", "block_hashes": [1], "medium": None, "planet": "Mars"}]]
    assert decode_batch(msgspec.msgpack.encode(raw)).events == [BlockRemoved([1], None)]


@pytest.mark.parametrize(
    "event",
    [
        None,
        7,
        [],
        [[]],
        ["BlockMoved", [1]],
        {"type": 5},
        {"type": ["BlockStored"]},
        {"type": "BlockStored"},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2, 3], "block_size": 2},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 0},
        {"type": "BlockStored", "block_hashes": [[1]], "token_ids": [1], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": {}, "token_ids": [1], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1, "extra_keys": []},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": ["a"], "block_size": 1},
        {"type": "BlockRemoved", "block_hashes": None},
    ],
)
def test_what_is_no_event_is_counted_and_left_out(event: object) -> None:
    batch = decode_batch(msgspec.msgpack.encode([0.0, [event, {"type": "AllBlocksCleared"}]]))
    assert batch.events == [BlocksCleared()]
    assert batch.skipped == 1


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x01", msgspec.msgpack.encode([1.0]), b"\x91" * 100_000])
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(FormatMismatch, match="expected"):
        decode_batch(payload)


def test_sequence_numbers() -> None:
    assert encode_sequence(258) == b"\0\0\0\0\0\0\1\2"
    assert encode_sequence(END_OF_REPLAY) == b"\xff" * 8
    assert decode_sequence(encode_sequence(258)) == 258
    assert decode_sequence(b"\xff" * 8) == END_OF_REPLAY
    with pytest.raises(FormatMismatch, match="7 bytes: expected 8"):
        decode_sequence(b"1234567")


def test_a_recording_of_payloads_is_a_trace(tmp_path: Path) -> None:
    def stored(hashes: list[int], parent: int | None, medium: str = "GPU") -> BlockStored:
        return BlockStored(hashes, parent, [5] * 16 * len(hashes), 16, None, medium, None)

    file = tmp_path / "recording"
    file.write_bytes(
        encode_batch(10.0, [stored([1, 2], None)])
        + encode_batch(11.0, [stored([3], 2), BlockRemoved([1], "GPU"), stored([1], None, "CPU")])
        + encode_batch(12.0, [BlocksCleared(), stored([9], None)])
    )
    assert [(one.at, one.blocks) for one in read_trace(file).requests] == [(0, (0, 1)), (1, (0, 1, 2)), (2, (3,))]
