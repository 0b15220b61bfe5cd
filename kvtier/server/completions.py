"""Text completions as the client reads them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.engine import RequestOutput
from kvtier.engine.outputs import TokenLogprobs
from kvtier.server.generation import Event
from kvtier.server.responses import Finals, Head, finite
from kvtier.server.tokens import TokenTexts

__all__ = ["CompletionWriter", "Echo"]


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is repeated before its completion."""

    text: str
    tokens: tuple[int, ...]


@dataclass(slots=True)
class _Progress:
    """What the client knows of a sequence: characters of its text, entries of its logprobs."""

    offset: int = 0
    told: int = 0
    begun: bool = False


class CompletionWriter:
    """Implements `Writer`.

    Args:
        head: of every body.
        texts: tokens as text, for logprobs.
        n: sequences of each prompt that the client gets; where more were made, the best ones.
        echoes: the prompts, where they are repeated.
        muted: nothing but the echo was asked for.
    """

    chunk_kind = "text_completion"

    def __init__(
        self, head: Head, texts: TokenTexts, *, n: int, logprobs: bool, echoes: Sequence[Echo] | None, muted: bool
    ) -> None:
        self.head = head
        self._texts = texts
        self._n = n
        self._logprobs = logprobs
        self._echoes = echoes
        self._muted = muted
        self._progress: defaultdict[tuple[int, int], _Progress] = defaultdict(_Progress)
        self._prompts: dict[int, tuple[TokenLogprobs | None, ...]] = {}

    def opening(self) -> list[dict[str, Any]]:
        """Nothing: the text is all there is."""
        return []

    def chunk(self, event: Event) -> dict[str, Any] | None:
        """What is new of a sequence."""
        prompt, output = event
        self._learn(prompt, output)
        progress = self._progress[prompt, output.index]
        text = "" if self._muted else output.delta
        entries: list[TokenLogprobs | int] = list(self._entries(output)[progress.told :])
        if self._echoes is not None and not progress.begun:
            text = self._echoes[prompt].text + text
            entries = [*self._echoed(prompt), *entries]
        progress.begun = True
        progress.told = len(self._entries(output))
        if not (text or entries or output.finish_reason):
            return None
        choice = self._choice(prompt * self._n + output.index, text, output.finish_reason)
        if self._logprobs:
            choice["logprobs"], progress.offset = self._written(entries, progress.offset)
        return self.head.of(self.chunk_kind, [choice])

    def whole(self, finals: Finals) -> dict[str, Any]:
        """All choices, by prompt."""
        by_prompt: defaultdict[int, list[RequestOutput]] = defaultdict(list)
        for (prompt, _), output in sorted(finals.items()):
            self._learn(prompt, output)
            by_prompt[prompt].append(output)
        choices = [
            self._whole_choice(prompt, prompt * self._n + at, output)
            for prompt, outputs in by_prompt.items()
            for at, output in enumerate(_best(outputs, self._n))
        ]
        return self.head.of("text_completion", choices)

    def _whole_choice(self, prompt: int, index: int, output: RequestOutput) -> dict[str, Any]:
        text = "" if self._muted else output.text
        entries: list[TokenLogprobs | int] = list(self._entries(output))
        if self._echoes is not None:
            text = self._echoes[prompt].text + text
            entries = [*self._echoed(prompt), *entries]
        choice = self._choice(index, text, output.finish_reason)
        if self._logprobs:
            choice["logprobs"], _ = self._written(entries, 0)
        return choice

    def _choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def _entries(self, output: RequestOutput) -> Sequence[TokenLogprobs]:
        return () if self._muted or not self._logprobs else output.logprobs or ()

    def _learn(self, prompt: int, output: RequestOutput) -> None:
        # The first sequence of a prompt has them, for all.
        if output.prompt_logprobs is not None:
            self._prompts[prompt] = output.prompt_logprobs

    def _echoed(self, prompt: int) -> Iterable[TokenLogprobs | int]:
        """The prompt's entries; the bare token where the model was not asked, as of the first."""
        if self._echoes is None or prompt not in self._prompts:
            return ()
        known = zip(self._echoes[prompt].tokens, self._prompts[prompt], strict=True)
        return (token if entry is None else entry for token, entry in known)

    def _written(self, entries: Iterable[TokenLogprobs | int], offset: int) -> tuple[dict[str, Any], int]:
        """As OpenAI writes them, and the offset of what follows."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for entry in entries:
            token = entry if isinstance(entry, int) else entry.token
            text = self._texts[token]
            tokens.append(text.label)
            logprobs.append(None if isinstance(entry, int) else finite(entry.logprob))
            tops.append(None if isinstance(entry, int) else self._top(entry))
            offsets.append(offset)
            offset += len(text.text)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}, offset

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        ranked = {self._texts[token].label: finite(logprob) for token, logprob in entry.top}
        return ranked | {self._texts[entry.token].label: finite(entry.logprob)}


def _best(outputs: Sequence[RequestOutput], n: int) -> Sequence[RequestOutput]:
    """The n outputs of the largest mean logprob of a token, best first; all of them as they are where n were made."""
    if len(outputs) <= n:
        return outputs
    return sorted(outputs, key=_mean_logprob, reverse=True)[:n]


def _mean_logprob(output: RequestOutput) -> float:
    return (output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))
