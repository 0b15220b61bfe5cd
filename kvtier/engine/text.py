"""TextStream: a request's output as text that only grows, cut before the first stop string."""

from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = ["Decoder", "TextStream"]


class Decoder(Protocol):
    """Tokens in, complete characters out; `tokenizer.IncrementalDecoder` is one."""

    def push(self, ids: Iterable[int]) -> str:
        """Append tokens; returns the characters that they complete."""
        ...

    def flush(self) -> str:
        """End of the tokens: returns what was held back."""
        ...


class TextStream:
    """Decodes tokens and looks for stop strings, which may begin and end within tokens.

    text     [0 ........ released)   [released ...... end)
              handed out for good     may turn out to be the start of a stop string

    Invariant: no text is released that a stop string could still cut off.

    Args:
        decoder: of this request alone.
        stop: texts that end the output.
        min_tokens: first tokens, by none of which it ends: a stop string that is complete by then is text like other.
    """

    __slots__ = ("_decoder", "_held", "_longest", "_released", "_stop", "_unstoppable", "stopped", "text")

    def __init__(self, decoder: Decoder, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.text = ""
        self.stopped = False
        self._decoder = decoder
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._released = 0
        self._held = 0
        self._unstoppable = min_tokens  # of the tokens to come

    def push(self, token: int) -> bool:
        """Append a token; returns whether it completed a stop string, before which the text now ends."""
        self._append(self._decoder.push((token,)))
        self._unstoppable -= 1
        return self.stopped

    def close(self) -> None:
        """No more tokens: nothing is held back any longer."""
        if not self.stopped:
            self._append(self._decoder.flush())
        self._held = 0

    def take(self) -> str:
        """The text that became safe to hand out since the last call."""
        end = len(self.text) - self._held
        delta = self.text[self._released : end]
        self._released = end
        return delta

    @property
    def taken(self) -> str:
        """All text that `take` handed out."""
        return self.text[: self._released]

    def _append(self, piece: str) -> None:
        known = len(self.text)
        self.text += piece
        # A stop string that is complete only now ends within the new piece.
        found = [self.text.find(stop, max(0, known - len(stop) + 1)) for stop in self._stop]
        ends = [at for at in found if at >= 0 and self._unstoppable <= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self.stopped = True
        self._held = 0 if ends else self._possible_start()

    def _possible_start(self) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-size:]
            if any(stop.startswith(tail) for stop in self._stop):
                return size
        return 0
