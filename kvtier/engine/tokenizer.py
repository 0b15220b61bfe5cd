"""Tokenizer: text to tokens and back, chat templates, and text that grows token by token."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from kvtier.engine.models.config import eos_ids_from_hf, read_json
from kvtier.errors import ModelError, RequestError

__all__ = ["IncrementalDecoder", "Tokenizer"]

_REPLACEMENT = "\ufffd"
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer: `tokenizers` for the text, sandboxed jinja2 for the chat template.

    Args:
        backend: vocabulary, merges, pre- and post-processing.
        special_tokens: `bos_token`, `eos_token` and the like, as the chat template sees them.
        eos_ids: tokens that end a generation.
        chat_template: jinja2 source, None for a model that has none.
    """

    backend: Backend
    special_tokens: Mapping[str, str]
    eos_ids: frozenset[int]
    chat_template: str | None
    special_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        added = self.backend.get_added_tokens_decoder()
        object.__setattr__(self, "special_ids", frozenset(index for index, token in added.items() if token.special))

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json and its companions. Raises ModelError where they are missing or damaged."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{directory}: no tokenizer.json: expected the directory of a HF model with a fast tokenizer"
            )
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the Rust side raises plain Exception
            raise ModelError(f"{path}: {error}: the file is damaged, download it again") from error
        companions = ("special_tokens_map.json", "tokenizer_config.json")
        settings: dict[str, Any] = {}
        for companion in (directory / name for name in companions):
            settings |= read_json(companion) if companion.is_file() else {}
        special = {name: _token_text(settings[name]) for name in _SPECIAL_NAMES if settings.get(name)}
        eos = backend.token_to_id(special.get("eos_token", ""))
        eos_ids = eos_ids_from_hf(directory) | (frozenset() if eos is None else {eos})
        return cls(backend, special, eos_ids, _template_text(directory, settings))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], origin: str) -> "Tokenizer":
        """Build from a GGUF file's key-value pairs. Raises ModelError where they describe another kind of tokenizer."""
        from kvtier.engine.models.gguf_tokenizer import backend_from_gguf  # noqa: PLC0415  # only for GGUF files

        backend = backend_from_gguf(metadata, origin)
        tokens, prefix = metadata["tokenizer.ggml.tokens"], "tokenizer.ggml."
        ids = {
            "bos_token": metadata.get(f"{prefix}bos_token_id"),
            "eos_token": metadata.get(f"{prefix}eos_token_id"),
            "unk_token": metadata.get(f"{prefix}unknown_token_id"),
            "pad_token": metadata.get(f"{prefix}padding_token_id"),
        }
        special = {name: tokens[index] for name, index in ids.items() if index is not None and index < len(tokens)}
        ends = (ids["eos_token"], metadata.get(f"{prefix}eot_token_id"))
        eos_ids = frozenset(index for index in ends if index is not None)
        return cls(backend, special, eos_ids, metadata.get("tokenizer.chat_template"))

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, None for a model that has none."""
        bos: int | None = self.backend.token_to_id(self.special_tokens.get("bos_token", ""))
        return bos

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included; the model's embedding may have more rows."""
        size: int = self.backend.get_vocab_size(with_added_tokens=True)
        return size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in `text` are recognised as such.

        Args:
            text: any string without lone surrogates.
            add_special_tokens: let the model's post-processing add its own (a leading `bos`, for most that have one);
                False for text that `apply_chat_template` made, which carries them already.

        Raises:
            RequestError: `text` cannot be encoded as UTF-8.
        """
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"text {text!r:.60} is no valid Unicode string: remove its lone surrogates") from error
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD, ids out of the vocabulary nothing."""
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special)
        return text

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Render a conversation as the text that the model was trained on.

        Args:
            messages: each with `role` and `content`, oldest first.
            add_generation_prompt: end with the header of the assistant's answer.

        Raises:
            RequestError: no chat template, no messages, a malformed message, or the template refuses them.
        """
        if self.chat_template is None:
            raise RequestError("this model has no chat template: send a plain prompt instead of messages")
        if not messages:
            raise RequestError("messages is empty: expected at least one {role, content}")
        for index, message in enumerate(messages):
            if not {"role", "content"} <= message.keys():
                raise RequestError(f"messages[{index}] has {sorted(message)}: expected role and content")
        try:
            text: str = _compiled(self.chat_template).render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error
        return text


class IncrementalDecoder:
    """Text of a growing token sequence, piece by piece, for streaming.

    Invariants:
        1. The pieces of `push`, then `flush`, together are `decode` of all tokens.
        2. A character is handed out when all its bytes are there: no piece holds a part of one.

    Each push decodes a window: `context` tokens whose text is out already (decoders may treat the first token of
    a text in a way of its own), then the tokens since.

        tokens   ... | context | new ....... |
        text           sent chars | piece .. | U+FFFD held back, if that is how it ends
    """

    # A UTF-8 character has at most 4 bytes and a token at least 1, so the start of one that is incomplete lies
    # within this many tokens: older ones need not be decoded again, whatever garbage a model emits.
    _REACH = 4
    _WINDOW = 16

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._window: list[int] = []
        self._sent = 0
        self._context = 0

    def push(self, ids: Iterable[int]) -> str:
        """Append tokens; returns the characters that they complete, often none."""
        self._window += [token for token in ids if token not in self._skipped]
        text = self._decode(self._window)
        held = text.endswith(_REPLACEMENT)
        ready = text[self._sent : len(text) - held]
        self._sent = max(self._sent, len(text) - held)
        if not held:
            self._slide(self._window[self._context :], held=0)
        elif len(self._window) > self._WINDOW:
            self._slide(self._window[-self._REACH :], held=1)
        return ready

    def flush(self) -> str:
        """End of the sequence: returns what was held back (bytes that never became a character) as U+FFFD."""
        rest = self._decode(self._window)[self._sent :]
        self._window, self._sent, self._context = [], 0, 0
        return rest

    def _slide(self, context: list[int], *, held: int) -> None:
        if context:
            self._window, self._context = context, len(context)
            self._sent = len(self._decode(context)) - held

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=False)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's tokens for training; here only its body matters."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _to_json(value: Any, *, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    # jinja2's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _token_text(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value)


def _template_text(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template
