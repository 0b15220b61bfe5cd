"""What a request's prompt is: tokens, or text where nobody makes tokens of it."""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx

from kvtier.errors import KVTierError, RequestError
from kvtier.router.hashing import TEXT_BLOCK, pack_extra, text_keys, token_keys

__all__ = ["AskTokens", "EngineTokens", "LocalTokens", "NoTokens", "Prompt", "Tokens", "prompt_of"]

_log = logging.getLogger(__name__)

_LARGE = 1 << 18
_TEXT_BLOCK_TOKENS = 16
_MESSAGE_FIELDS = ("model", "messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
                   "chat_template", "tools")  # fmt: skip
_PROMPT_FIELDS = ("model", "prompt", "add_special_tokens")


class Prompt:
    """The beginning that two requests may share.

    Args:
        model: that was asked for.
        tokens: token ids; None where nobody made them.
        text: what stands for them then.
        salt: what separates callers who must not share prefixes.
    """

    def __init__(self, model: str | None, tokens: Sequence[int] | None, text: str, salt: str | None = None) -> None:
        self.model = model
        self.tokens = tokens
        self._text = text
        self._salt = salt
        self._keys: dict[tuple[int, str], list[bytes]] = {}

    @property
    def size(self) -> int:
        """In tokens, or about so."""
        return len(self._text.encode("utf-8", "replace")) // 4 if self.tokens is None else len(self.tokens)

    def block_tokens(self, block_size: int) -> int:
        """Tokens that one of `keys` stands for."""
        return _TEXT_BLOCK_TOKENS if self.tokens is None else block_size

    def keys(self, block_size: int, adapter: str = "") -> list[bytes]:
        """Of its full blocks, for an engine with blocks of that many tokens.

        Args:
            block_size: at least 1.
            adapter: LoRA adapter that the model stands for, empty for none.
        """
        which = (block_size, adapter)
        if which not in self._keys:
            self._keys[which] = self._hashed(block_size, adapter)
        return self._keys[which]

    def _hashed(self, block_size: int, adapter: str) -> list[bytes]:
        if self.tokens is None:
            return text_keys(self._text, f"{adapter}\0{self._salt or ''}")
        own = [adapter] if adapter else []
        extras: dict[int, bytes] = {}
        try:
            if own:
                extras = dict.fromkeys(range(len(self.tokens) // block_size), pack_extra(own))
            if self._salt:
                extras[0] = pack_extra([*own, self._salt])
            return token_keys(self.tokens, block_size, extras=extras)
        except (ValueError, OverflowError):
            # Token ids that no model has, a salt that is no text: the engine will say so.
            return []

    @property
    def anchor(self) -> bytes:
        """What prompts with the same beginning have in common; without one, nothing that two requests share."""
        head = self._text[:TEXT_BLOCK] if self.tokens is None else list(self.tokens[:_TEXT_BLOCK_TOKENS])
        if not head:
            return secrets.token_bytes(8)
        return repr((head, self._salt)).encode("utf-8", "replace")


class AskTokens(Protocol):
    """Asks an engine for the tokens of a prompt."""

    async def __call__(self, fields: Mapping[str, Any], headers: Mapping[str, str]) -> list[int]:
        """Token ids.

        Raises:
            KVTierError, httpx.HTTPError: no engine gave them.
        """
        ...


class Tokens(Protocol):
    """Makes tokens of prompts."""

    async def of(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> list[int] | None:
        """Token ids of the `prompt` (a text) or the `messages` of a body; None where it cannot."""
        ...


class NoTokens:
    """Makes none: prompts are told apart by their text."""

    async def of(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> list[int] | None:
        """See `Tokens.of`."""
        return None


class EngineTokens:
    """Lets an engine make them, as `POST /tokenize`.

    Args:
        ask: an engine.
        failed: told of each prompt for which that did not work.
    """

    def __init__(self, ask: AskTokens, failed: Callable[[], None]) -> None:
        self._ask = ask
        self._failed = failed

    async def of(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> list[int] | None:
        """See `Tokens.of`."""
        wanted = _MESSAGE_FIELDS if "messages" in body else _PROMPT_FIELDS
        try:
            return await self._ask({name: body[name] for name in wanted if name in body}, headers)
        except (KVTierError, httpx.HTTPError) as error:
            self._failed()
            _log.debug("tokenize: %s", error)
            return None


class LocalTokens:
    """Makes them here, with a model's own files.

    Args:
        directory: of the model: `tokenizer.json`, and for conversations its chat template.
        failed: told of each prompt for which that did not work.

    Raises:
        ModelError: there is no tokenizer.
    """

    def __init__(self, directory: Path, failed: Callable[[], None]) -> None:
        # With it comes the engine's room, and torch: only who wants a tokenizer here waits for them.
        from kvtier.engine.tokenizer import Tokenizer  # noqa: PLC0415

        self._tokenizer = Tokenizer.from_directory(directory)
        self._failed = failed

    async def of(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> list[int] | None:
        """See `Tokens.of`."""
        try:
            return await asyncio.to_thread(self._encode, body)
        except RequestError as error:
            self._failed()
            _log.debug("tokenize: %s", error)
            return None

    def _encode(self, body: Mapping[str, Any]) -> list[int]:
        if "messages" not in body:
            return self._tokenizer.encode(
                body["prompt"], add_special_tokens=body.get("add_special_tokens") is not False
            )
        text = self._tokenizer.apply_chat_template(body["messages"])
        return self._tokenizer.encode(text, add_special_tokens=False)


async def prompt_of(content: bytes, headers: Mapping[str, str], tokens: Tokens) -> Prompt:
    """The prompt of a body of `/v1/completions` or `/v1/chat/completions`, the first one of several.

    A body that says nothing of a kind that is known has an empty one: what is wrong with it the engine will say.
    """
    try:
        # A large one takes a while.
        body = await asyncio.to_thread(json.loads, content) if len(content) > _LARGE else json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        return Prompt(None, None, "")
    model, salt = (value if isinstance(value := body.get(name), str) else None for name in ("model", "cache_salt"))
    text, ready = _written(body)
    if ready is None and text:
        shown = body if "messages" in body else {**body, "prompt": text}
        ready = await tokens.of(shown, headers)
    return Prompt(model, ready, text, salt)


def _written(body: Mapping[str, Any]) -> tuple[str, list[int] | None]:
    """Text and token ids, as far as the body has them."""
    if _is_conversation(body.get("messages")):
        # One after the other, so that a conversation that goes on begins like the one before.
        return "\n".join(json.dumps(message, ensure_ascii=False) for message in body["messages"]), None
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return "", prompt
    return "", None


def _is_conversation(messages: Any) -> bool:
    return isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
