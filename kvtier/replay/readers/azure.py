"""Azure's LLM inference traces: arrival times and lengths, no content.

Source: github.com/Azure/AzurePublicDataset (CC-BY-4.0); Patel et al., "Splitwise", ISCA 2024.
"""

from datetime import UTC, datetime
from pathlib import Path

from kvtier.replay.trace import Prefixes, ReadOptions, Trace, TraceRequest, malformed

__all__ = ["AZURE_HEADER", "read_azure"]

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_BLOCK_TOKENS = 512
# No model takes more; a damaged number must not be given its blocks.
_MOST_TOKENS = 1 << 24
_EXPECTED = f"{AZURE_HEADER}, such as 2023-11-16 18:15:46.6805900,374,44"
_UNIQUE = "The trace has lengths only: no request shares a prefix with another, so nothing can be found again."
_MADE_UP = "The trace has lengths only: which requests are turns of one session was made up; the hits are not measured."


class _Sessions:
    """Makes up turns: a request continues the longest conversation, of the latest few, that fits into its prompt."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lengths: dict[int, int] = {}  # session -> tokens so far, least recently used first
        self._started = 0

    def of(self, prompt: int, answer: int) -> int:
        """The session of a request of so many tokens."""
        fitting = [(length, session) for session, length in self._lengths.items() if length <= prompt]
        if fitting:
            session = max(fitting)[1]
            del self._lengths[session]
        else:
            session = self._started
            self._started += 1
            if len(self._lengths) == self._count:
                del self._lengths[next(iter(self._lengths))]
        self._lengths[session] = prompt + answer
        return session


def read_azure(path: Path, options: ReadOptions) -> Trace:
    """Read a trace. Every request is a conversation of its own unless `options.sessions` makes some up."""
    block_tokens = options.block_tokens or _BLOCK_TOKENS
    sessions = None if options.sessions is None else _Sessions(options.sessions)
    prefixes = Prefixes()
    requests: list[TraceRequest] = []
    begin: float | None = None
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if number == 1 or not line.strip():
                continue
            if len(requests) == options.limit:
                break
            when, prompt, answer = _row(path, number, line)
            begin = when if begin is None else begin
            at = when - begin
            if requests and at < requests[-1].at:
                raise malformed(path, number, line.strip(), "a time not before the line above")
            session = len(requests) if sessions is None else sessions.of(prompt, answer)
            blocks = prefixes.chain((session, depth) for depth in range(prompt // block_tokens))
            named = None if sessions is None else str(session)
            requests.append(TraceRequest(at, prompt, blocks, named, output_tokens=answer))
    notes = (_UNIQUE if sessions is None else _MADE_UP,)
    return Trace("azure", block_tokens, tuple(requests), len(prefixes), notes)


def _row(path: Path, number: int, line: str) -> tuple[float, int, int]:
    try:
        when, prompt, answer = line.strip().split(",")
        row = (datetime.fromisoformat(when).replace(tzinfo=UTC).timestamp(), int(prompt), int(answer))
    except ValueError as error:
        raise malformed(path, number, line.strip(), _EXPECTED) from error
    if not 1 <= row[1] <= _MOST_TOKENS or row[2] < 0:
        expected = f"at least one context token, at most {_MOST_TOKENS}, and no negative count"
        raise malformed(path, number, line.strip(), expected)
    return row
