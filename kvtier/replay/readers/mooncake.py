"""Mooncake's published request traces: one JSON object a line, blocks of 512 tokens named by prefix.

Source: github.com/kvcache-ai/Mooncake, FAST25-release (Apache-2.0); Qin et al., "Mooncake", FAST 2025.
"""

from pathlib import Path

import msgspec

from kvtier.replay.trace import Prefixes, ReadOptions, Trace, TraceRequest, block_tokens_of, fold, malformed

__all__ = ["read_mooncake"]

_BLOCK_TOKENS = 512
_EXPECTED = 'a request such as {"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [0, 1]}'


class _Row(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    hash_ids: list[int]
    output_length: int | None = None


def read_mooncake(path: Path, options: ReadOptions) -> Trace:
    """Read a trace; a last block that is partly filled counts as a block, as in the file."""
    block_tokens = block_tokens_of(options.block_tokens, _BLOCK_TOKENS, _BLOCK_TOKENS)
    decoder, prefixes = msgspec.json.Decoder(_Row), Prefixes()
    requests: list[TraceRequest] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if len(requests) == options.limit:
                break
            row = _row(decoder, path, number, line)
            at = row.timestamp / 1000
            if requests and at < requests[-1].at:
                raise malformed(path, number, f"timestamp {row.timestamp:g}", f"at least {requests[-1].at * 1000:g}")
            labels = fold(row.hash_ids, block_tokens // _BLOCK_TOKENS, partial=True)
            requests.append(TraceRequest(at, row.input_length, prefixes.chain(labels), output_tokens=row.output_length))
    return Trace("mooncake", block_tokens, tuple(requests), len(prefixes))


def _row(decoder: "msgspec.json.Decoder[_Row]", path: Path, number: int, line: bytes) -> _Row:
    try:
        row = decoder.decode(line)
    except msgspec.DecodeError as error:
        text = line.decode("utf-8", "replace").strip()
        raise malformed(path, number, text, f"{_EXPECTED} ({error})") from error
    needed = -(-row.input_length // _BLOCK_TOKENS)
    if row.input_length < 1 or len(row.hash_ids) != needed:
        found = f"input_length {row.input_length} with {len(row.hash_ids)} hash_ids"
        raise malformed(path, number, found, f"at least one token and one hash id per {_BLOCK_TOKENS} of them")
    return row
