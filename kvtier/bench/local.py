"""An engine in this process, as a target."""

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from kvtier.bench.targets import Failed, Heard, Question, Usage
from kvtier.engine.params import SamplingParams
from kvtier.errors import KVTierError
from kvtier.hints import RequestHints

if TYPE_CHECKING:
    from kvtier.api import AsyncLLM

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
        stream = self._llm.chat(question.messages, params, hints=hints)
        try:
            async for output in stream:
                usage = None
                if output.finish_reason is not None:
                    found = output.metrics.cached_tokens, output.metrics.loaded_tokens
                    usage = Usage(output.prompt_tokens, len(output.token_ids), sum(found), found[1])
                if output.delta or usage is not None:
                    yield Heard(output.delta, usage)
        except KVTierError as error:
            raise Failed("engine", str(error)) from error
        finally:
            await stream.aclose()

    async def close(self) -> None:
        """Close the engine and its tiers."""
        self._llm.close()
