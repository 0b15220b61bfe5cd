"""KV events in the frames that vLLM publishes: what an engine stored in its own prefix cache.

    batch  [timestamp, [event, …], …]
    event  ["BlockStored", [hash, …], parent hash or null, [token, …], tokens per block, adapter, medium, …]
           ["BlockRemoved", …]  ["AllBlocksCleared"]
           or, from newer versions, objects: {"type": "BlockStored", "block_hashes": [hash, …], …}

As JSON, one batch a line; as msgpack, batches one after the other.
"""

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvtier.replay.readers.msgpack_frames import frames
from kvtier.replay.trace import Prefixes, ReadOptions, Trace, TraceRequest, block_tokens_of, fold, malformed

__all__ = ["read_events"]

_EXPECTED = 'a batch such as [1.5, [["BlockStored", [11, 12], null, [5, …], 16, null, "GPU"]]]'
_LATEST = 1e12  # seconds
_NAMES = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_FIELDS = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_NOTE = (
    "Events say what the engine stored, not what it looked up: a prompt found whole in the engine's own cache is absent"
)


class _Stored(NamedTuple):
    hashes: list[Hashable]
    parent: Hashable | None
    block_tokens: int


class _Chains:
    """Which hash follows which, as far as the recording tells."""

    def __init__(self) -> None:
        self._parents: dict[Hashable, Hashable | None] = {}
        self.unknown = 0

    def add(self, stored: _Stored) -> None:
        parent = stored.parent
        if parent is not None and parent not in self._parents:
            # Stored before the recording began: its chain starts here for us.
            self.unknown += 1
            self._parents[parent] = None
        for key in stored.hashes:
            self._parents.setdefault(key, parent)
            parent = key

    def down_to(self, key: Hashable) -> list[Hashable]:
        chain: list[Hashable] = []
        at: Hashable | None = key
        while at is not None:
            chain.append(at)
            at = self._parents[at]
        chain.reverse()
        return chain


def read_events(path: Path, options: ReadOptions) -> Trace:
    """Read a recording: each run of blocks stored in one batch is a prompt that ends with them."""
    chains, prefixes = _Chains(), Prefixes()
    requests: list[TraceRequest] = []
    own = begin = None
    for line, batch in _batches(path):
        at, runs = _runs(path, line, batch)
        begin = at if begin is None else begin
        for run in runs:
            own = own or run.block_tokens
            if run.block_tokens != own:
                raise malformed(path, line, f"blocks of {run.block_tokens} tokens", f"{own} tokens, as before")
            chains.add(run)
            labels = chains.down_to(run.hashes[-1])
            width = block_tokens_of(options.block_tokens, own, own) // own
            blocks = prefixes.chain(fold(labels, width, partial=False))
            requests.append(TraceRequest(max(at - begin, 0.0), len(labels) * own, blocks))
    requests = sorted(requests, key=lambda request: request.at)[: options.limit]
    notes = [_NOTE] + [f"{chains.unknown} prefixes were stored before the recording began"] * bool(chains.unknown)
    return Trace("events", options.block_tokens or own or 1, tuple(requests), len(prefixes), tuple(notes))


def _batches(path: Path) -> Iterator[tuple[int, Any]]:
    data = path.read_bytes()
    is_json = data.lstrip()[:1] == b"["
    decode = msgspec.json.decode if is_json else msgspec.msgpack.decode
    parts = (line for line in data.splitlines()) if is_json else frames(data)
    number = 0
    try:
        for number, part in enumerate(parts, 1):
            if part.strip() if is_json else part:
                yield number, decode(part)
    except (msgspec.DecodeError, ValueError) as error:
        raise malformed(path, max(number, 1), str(error), _EXPECTED) from error


def _runs(path: Path, line: int, batch: Any) -> tuple[float, list[_Stored]]:
    """A batch's time and its runs of stored device blocks; events that continue each other are one run."""
    timed = isinstance(batch, list) and len(batch) > 1 and isinstance(batch[0], float | int)
    if not timed or abs(batch[0]) > _LATEST:
        raise malformed(path, line, batch, _EXPECTED)
    runs: list[_Stored] = []
    for event in map(_as_array, batch[1] if isinstance(batch[1], list) else [batch[1]]):
        if not (isinstance(event, list) and event and event[0] in _NAMES):
            raise malformed(path, line, event, f"an event that begins with one of {', '.join(_NAMES)}")
        if event[0] != "BlockStored":
            continue
        stored = _stored(path, line, event)
        on_device = len(event) < 7 or event[6] in (None, "GPU")
        if not on_device:
            continue
        if runs and stored.parent == runs[-1].hashes[-1]:
            runs[-1].hashes.extend(stored.hashes)
        else:
            runs.append(stored)
    return float(batch[0]), runs


def _as_array(event: Any) -> Any:
    return [event.get(name) for name in _FIELDS] if isinstance(event, dict) else event


def _stored(path: Path, line: int, event: list[Any]) -> _Stored:
    if len(event) < 5 or not (isinstance(event[1], list) and event[1] and isinstance(event[4], int) and event[4] > 0):
        raise malformed(path, line, event, "hashes, parent, tokens and tokens per block after BlockStored")
    hashes, parent, block_tokens = event[1], event[2], event[4]
    if not all(isinstance(key, int | str | bytes) for key in [*hashes, 0 if parent is None else parent]):
        raise malformed(path, line, event, "block hashes that are numbers, texts or bytes")
    return _Stored(list(hashes), parent, block_tokens)
