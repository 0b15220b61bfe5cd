"""Chat completions as the client reads them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from kvtier.engine import RequestOutput
from kvtier.engine.outputs import TokenLogprobs
from kvtier.server.generation import Event
from kvtier.server.responses import Finals, Head, finite
from kvtier.server.tokens import TokenTexts

__all__ = ["ChatWriter"]


class ChatWriter:
    """Implements `Writer`.

    Args:
        head: of every body.
        texts: tokens as text, for logprobs.
        n: sequences.
        logprobs: whether they were asked for.
    """

    chunk_kind = "chat.completion.chunk"

    def __init__(self, head: Head, texts: TokenTexts, *, n: int, logprobs: bool) -> None:
        self.head = head
        self._texts = texts
        self._n = n
        self._logprobs = logprobs
        self._told: defaultdict[int, int] = defaultdict(int)

    def opening(self) -> list[dict[str, Any]]:
        """Who speaks, for each sequence."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk({"index": index, "delta": delta, "finish_reason": None}) for index in range(self._n)]

    def chunk(self, event: Event) -> dict[str, Any] | None:
        """What is new of a sequence."""
        output = event.output
        entries = self._entries(output)[self._told[output.index] :]
        self._told[output.index] += len(entries)
        if not (output.delta or entries or output.finish_reason):
            return None
        delta = {"content": output.delta} if output.delta else {}
        choice: dict[str, Any] = {"index": output.index, "delta": delta, "finish_reason": output.finish_reason}
        if self._logprobs:
            choice["logprobs"] = self._written(entries)
        return self._chunk(choice)

    def whole(self, finals: Finals) -> dict[str, Any]:
        """All choices."""
        return self.head.of("chat.completion", [self._choice(finals[key]) for key in sorted(finals)])

    def _choice(self, output: RequestOutput) -> dict[str, Any]:
        return {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._written(self._entries(output)) if self._logprobs else None,
            "finish_reason": output.finish_reason,
        }

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self.head.of(self.chunk_kind, [{"logprobs": None} | choice])

    def _entries(self, output: RequestOutput) -> Sequence[TokenLogprobs]:
        return output.logprobs or () if self._logprobs else ()

    def _written(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return self._token(entry.token, entry.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._texts[token]
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}
