"""Sessions of coding agents, one JSON file each, laid over each other.

Source: github.com/callanjfox/kv-cache-tester (Apache-2.0). Block ids are local to a session, so nothing is known
to be shared between sessions; we share the part of the prompt that describes the tools where it is equally long,
because agents of one version send the same one. Sub-agents belong to the session that started them.
"""

import hashlib
import random
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvtier.replay.trace import Prefixes, ReadOptions, Trace, TraceRequest, block_tokens_of, fold, malformed

__all__ = ["read_agents"]

_BLOCK_TOKENS = 512
# How densely sessions are laid over each other: on average one starts in so many seconds.
_SECONDS_PER_SESSION = 240.0
_EXPECTED = 'a session such as {"id": "a", "block_size": 64, "tool_tokens": 0, "requests": [{"t": 0, "in": 64, …}]}'


class _Turn(msgspec.Struct):
    t: float  # seconds since the session began
    tokens: int = msgspec.field(name="in", default=0)
    answer: int | None = msgspec.field(name="out", default=None)
    hash_ids: list[int] = []
    requests: list["_Turn"] = []


class _Session(msgspec.Struct):
    id: str
    block_size: int
    requests: list[_Turn]
    tool_tokens: int = 0


def read_agents(path: Path, options: ReadOptions) -> Trace:
    """Read one session, or a directory of them that start at random (seeded) times.

    Only full blocks have a name: tokens after the last full one are computed by everyone.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise malformed(path, None, "no *.json file in this directory", _EXPECTED)
    sessions = list(_distinct(files))
    own = sessions[0].block_size
    if own < 1 or any(session.block_size != own for session in sessions):
        raise malformed(path, None, f"block_size {[session.block_size for session in sessions]}", "one size, above 0")
    block_tokens = block_tokens_of(options.block_tokens, own, max(own, _BLOCK_TOKENS - _BLOCK_TOKENS % own))
    prefixes = Prefixes()
    dice = random.Random(options.seed)  # noqa: S311  a draw of start times, no secret
    requests = []
    for number, session in enumerate(sessions):
        start = dice.uniform(0, _SECONDS_PER_SESSION * len(sessions)) if len(sessions) > 1 else 0.0
        requests += _requests(number, session, start, block_tokens, prefixes)
    requests.sort(key=lambda request: request.at)
    notes = (
        "Block ids are local to a session: sharing between sessions is known for the tools' part of the prompt only.",
    )
    return Trace("agents", block_tokens, tuple(requests[: options.limit]), len(prefixes), notes)


def _distinct(files: Sequence[Path]) -> Iterator[_Session]:
    seen: set[bytes] = set()
    decoder = msgspec.json.Decoder(_Session)
    for file in files:
        data = file.read_bytes()
        digest = hashlib.sha256(data).digest()
        if digest in seen:
            continue
        seen.add(digest)
        try:
            yield decoder.decode(data)
        except msgspec.DecodeError as error:
            raise malformed(file, None, str(error), _EXPECTED) from error


def _requests(
    number: int, session: _Session, start: float, block_tokens: int, prefixes: Prefixes
) -> list[TraceRequest]:
    turns = sorted(_flattened(session.requests), key=lambda turn: turn.t)
    if not turns:
        return []
    width = block_tokens // session.block_size
    tools = fold(turns[0].hash_ids, width, partial=False)[: session.tool_tokens // block_tokens]

    def labels(turn: _Turn) -> Iterator[Hashable]:
        for depth, block in enumerate(fold(turn.hash_ids, width, partial=False)):
            shared = depth < len(tools) and block == tools[depth]
            yield ("tools", session.tool_tokens, depth) if shared else (number, block)

    return [
        TraceRequest(
            start + turn.t, turn.tokens, prefixes.chain(labels(turn)), session.id, turn is turns[-1], turn.answer
        )
        for turn in turns
    ]


def _flattened(turns: Sequence[_Turn]) -> Iterator[_Turn]:
    """Requests of a session and of its sub-agents."""
    for turn in turns:
        if turn.tokens > 0:
            yield turn
        yield from _flattened(turn.requests)
