"""A published trace as scripts: prompts of the trace's lengths that share what the trace's prompts share."""

from dataclasses import dataclass

from kvtier.bench.scripts import Pace, Piece, Script, Turn
from kvtier.errors import ConfigError
from kvtier.replay.trace import Trace, TraceRequest

__all__ = ["Traced"]


@dataclass(frozen=True, slots=True)
class Traced:
    """Requests at the times of a trace. A workload.

    Args:
        trace: whose requests they are.
        output_tokens: of answers whose length the trace does not say.
        time_scale: ask so many times faster than the trace.
        length_scale: prompts and answers so many times as long as the trace's.
    """

    trace: Trace
    output_tokens: int = 32
    time_scale: float = 1.0
    length_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("output_tokens", "time_scale", "length_scale"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name.replace('_', '-')} {value:g}: expected a number above 0")

    def scripts(self, pace: Pace, seed: int) -> tuple[Script, ...]:
        """See `Workload.scripts`. The times are the trace's own.

        Raises:
            ConfigError: a pace has another rate.
        """
        if pace.rate is not None:
            raise ConfigError(f"rate {pace.rate:g}: a trace has its own times; expected time-scale to change them")
        sent: set[int] = set()
        scripts = []
        for number, request in enumerate(self.trace.requests):
            is_first = not request.blocks or request.blocks[0] not in sent
            sent.update(request.blocks)
            turn = Turn(self._pieces(number, request), self._output(request), is_first)
            session = f"request-{number}" if request.session is None else request.session
            ends = request.session is None or request.ends_session
            scripts.append(Script((turn,), session, request.at / self.time_scale, ends))
        return tuple(scripts)

    def _pieces(self, number: int, request: TraceRequest) -> tuple[Piece, ...]:
        """A text for each block, and one that is nobody else's for what has no block."""
        pieces, left = [], request.tokens
        for block in request.blocks:
            tokens = min(left, self.trace.block_tokens)
            pieces.append(Piece(f"block {block}", self._scaled(tokens)))
            left -= tokens
        if left > 0:
            pieces.append(Piece(f"tail {number}", self._scaled(left)))
        return tuple(pieces)

    def _output(self, request: TraceRequest) -> int:
        return self.output_tokens if request.output_tokens is None else self._scaled(request.output_tokens)

    def _scaled(self, tokens: int) -> int:
        return max(1, round(tokens * self.length_scale))

    def describe(self) -> str:
        """See `Workload.describe`."""
        scales = [
            f"{value:g} x its {what}" for value, what in ((self.time_scale, "pace"), (self.length_scale, "lengths"))
            if value != 1
        ]  # fmt: skip
        return ", ".join([f"{len(self.trace.requests)} requests of a trace ({self.trace.kind})", *scales])
