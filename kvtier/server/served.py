"""Served: the model as all routes share it."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from uuid import uuid4

from kvtier.api import AsyncLLM
from kvtier.engine import RequestOutput, SamplingParams
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import RequestError
from kvtier.hints import RequestHints
from kvtier.server.admission import Admission
from kvtier.server.errors import ApiError
from kvtier.server.protocol import Message
from kvtier.server.responses import Head
from kvtier.server.telemetry import Telemetry
from kvtier.server.tokens import TokenTexts

__all__ = ["Served"]


class Served:
    """One model, its engine, and what is counted about them.

    Args:
        llm: stays the caller's.
        name: what clients call the model.
    """

    def __init__(self, llm: AsyncLLM, name: str) -> None:
        settings = llm.config.server
        self.llm = llm
        self.name = name
        self.created = int(time.time())
        self.admission = Admission(llm.config.engine.max_running + settings.max_waiting, settings.drain_timeout)
        self.telemetry = Telemetry(llm.stats, self.admission, None if llm.store is None else llm.store.metrics.registry)
        self.texts = TokenTexts(llm.model.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self.llm.model.tokenizer

    def check_model(self, name: str | None) -> None:
        """Whether a request is for this model; one that names none is.

        Raises:
            ApiError: 404.
        """
        if name not in (None, self.name):
            raise ApiError(404, f"model {name!r}: this server has {self.name!r}", param="model", code="model_not_found")

    def head(self, prefix: str) -> Head:
        """Of a new response."""
        return Head(f"{prefix}-{uuid4().hex}", int(time.time()), self.name)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, made outside the event loop: a long one takes a while.

        Raises:
            ApiError: it is no valid Unicode string.
        """
        encode = self.tokenizer.encode
        try:
            return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens)
        except RequestError as error:
            raise ApiError(400, str(error), param="prompt", code="invalid_value") from error

    async def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation.

        Raises:
            ApiError: the model has no chat template, or it refuses these messages.
        """
        rendered = [message.rendered() for message in messages]
        try:
            return await asyncio.to_thread(self.llm.encode_chat, rendered)
        except RequestError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from error

    def start(
        self, tokens: list[int], params: SamplingParams, hints: RequestHints | None
    ) -> AsyncIterator[RequestOutput]:
        """The stream of one prompt, which begins when it is iterated."""
        return self.llm.generate(tokens, params, hints=hints)

    def check_beams(self, width: int | None) -> None:
        """Whether a search's beams can run in one step: they wait for each other in every one.

        Raises:
            ApiError: they cannot.
        """
        most = self.llm.config.engine.max_running
        if width is not None and width > most:
            raise ApiError(
                400,
                f"beam_width={width}: this server computes {most} sequences in a step; ask for fewer",
                param="beam_width",
                code="invalid_value",
            )

    def check_length(self, tokens: Sequence[int], wanted: int | None, param: str) -> None:
        """Whether a prompt and its output fit into the context.

        Args:
            tokens: of the prompt.
            wanted: `max_tokens`; None is as many as fit.
            param: what the prompt came in.

        Raises:
            ApiError: they do not, or the prompt is empty.
        """
        limit = self.llm.max_model_len
        if not tokens:
            raise ApiError(400, f"{param}: no tokens; send at least one", param=param, code="invalid_value")
        if len(tokens) + (wanted or 1) > limit:
            raise ApiError(
                400,
                f"{len(tokens)} tokens of {param} and {wanted or 1} of output: the context takes {limit} together; "
                f"shorten {param}" + (" or lower max_tokens" if wanted else ""),
                param=param,
                code="context_length_exceeded",
            )
