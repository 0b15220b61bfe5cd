"""An engine in this process, as a target."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from kvtier.bench.targets import Failed, Heard, Question, Usage
from kvtier.engine.params import SamplingParams
from kvtier.errors import KVTierError
from kvtier.hints import RequestHints

if TYPE_CHECKING:
    from kvtier.api import AsyncLLM
    from kvtier.engine.outputs import RequestOutput

__all__ = ["LocalTarget"]


class LocalTarget:
    """Implements `Target`.

    Args:
        llm: closed at the end.
        model: its name.
        place: what this engine is called beside another one.
        hints: say which session a request belongs to.
        ignore_eos: answers end at their length only.
    """

    def __init__(
        self, llm: "AsyncLLM", model: str, place: str, *, hints: bool = False, ignore_eos: bool = False
    ) -> None:
        self.model = model
        self.place = place
        self.context: int | None = llm.max_model_len
        self._llm = llm
        self._hints = hints
        self._ignore_eos = ignore_eos

    async def count(self, question: Question) -> int | None:
        """See `Target.count`."""
        return len(self._llm.encode_chat(question.messages))

    async def answer(self, question: Question) -> AsyncGenerator[Heard, None]:
        """See `Target.answer`."""
        params = SamplingParams(max_tokens=question.output_tokens, ignore_eos=self._ignore_eos)
        hints = RequestHints(session=question.session, end_of_session=question.ends_session) if self._hints else None
        try:
            async with aclosing(self._llm.chat(question.messages, params, hints=hints)) as stream:
                async for output in stream:
                    if output.delta or output.finish_reason is not None:
                        yield Heard(output.delta, None if output.finish_reason is None else _usage(output))
        except KVTierError as error:
            raise Failed("engine", str(error)) from error

    async def close(self) -> None:
        """Close the engine and its tiers."""
        self._llm.close()


def _usage(output: "RequestOutput") -> Usage:
    metrics = output.metrics
    found = metrics.cached_tokens + metrics.loaded_tokens
    return Usage(output.prompt_tokens, metrics.output_tokens, found, metrics.loaded_tokens)
