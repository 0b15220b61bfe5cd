"""What clients may send: shapes and types, and what one client may cost the others. Other ranges are the engine's.

Fields beyond OpenAI's are kvtier's own; its Python client sends them in `extra_body`.
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo

from kvtier.engine.sparse import SparseKind
from kvtier.hints import Reuse

__all__ = [
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "KvHints",
    "Message",
    "SamplingBody",
    "SparseKv",
    "TokenizeBody",
]

_MAX_SEQUENCES = 128
_MAX_STOPS = 16
_MAX_STOP = 256
_MAX_LOGPROBS = 20
_MAX_BIASES = 1024
_MAX_STOP_IDS = 1024
_LEAST_SEED, _MOST_SEED = -(2**63), 2**64 - 1
_DAY = 86_400

_PromptInput: TypeAlias = str | list[str] | list[int] | list[list[int]]
_PROMPT = "expected a text, a list of texts, token ids, or a list of lists of token ids; none of them empty"


def _prompts(value: object) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(_PROMPT)
    if all(isinstance(one, str) for one in value):
        return list(value)
    if _are_ids(value):
        return [value]
    if not all(isinstance(one, list) and _are_ids(one) for one in value):
        raise ValueError(_PROMPT)
    return list(value)


def _are_ids(value: list[object]) -> bool:
    return all(type(one) is int for one in value)


def _stops(value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > _MAX_STOPS or not all(map(_is_stop, texts)):
        raise ValueError(f"expected a text, or a list of at most {_MAX_STOPS} texts, of {_MAX_STOP} characters at most")
    return texts


def _is_stop(value: object) -> bool:
    # They are looked for after each token: long ones would hold up everybody.
    return isinstance(value, str) and len(value) <= _MAX_STOP


def _content(value: object, info: ValidationInfo) -> str:
    if isinstance(value, str):
        return value
    # What an assistant said may be nothing: clients send it back as they got it.
    if value is None and info.data.get("role") == "assistant":
        return ""
    if not isinstance(value, list):
        raise ValueError("expected a text, or a list of parts {type: 'text', text}")  # noqa: TRY004 - see _whole
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError("expected parts {type: 'text', text}; images, audio and files are not supported")
        texts.append(part["text"])
    return "\n".join(texts)


def _refused(value: object) -> object:
    # Clients write out what they do not use.
    if value in (None, [], {}, "none"):
        return value
    raise ValueError("not supported by this server: leave it out")


def _text_format(value: object) -> object:
    if value in (None, {"type": "text"}):
        return value
    raise ValueError("not supported by this server: only {type: 'text'} is")


def _text_only(value: object) -> object:
    if value in (None, ["text"]):
        return value
    raise ValueError("not supported by this server: only ['text'] is")


_Refused: TypeAlias = Annotated[Any, AfterValidator(_refused)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class KvHints(_Body):
    """What the caller knows of the future of this request's KV: see `kvtier.hints.RequestHints`."""

    priority: float | None = None
    priority_ttl: float | None = None
    ttl: float | None = None
    reuse: Reuse | None = None
    dead_from_depth: int | None = None
    session: str | None = Field(default=None, min_length=1, max_length=256)
    end_of_session: bool | None = None


class SparseKv(_Body):
    """Which blocks the output attends to: see `kvtier.engine.sparse.Sparse`."""

    kind: SparseKind
    share: float | None = None
    sink: int | None = None
    recent: int | None = None


class StreamOptions(_Body):
    """How a stream is written. `include_obfuscation` (padding of events) has no effect."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingBody(_Body):
    """What completions and chats have in common."""

    model: str | None = None
    n: int | None = Field(default=None, ge=1, le=_MAX_SEQUENCES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[list[str], PlainValidator(_stops, json_schema_input_type=str | list[str])] | None = None
    seed: int | None = Field(default=None, ge=_LEAST_SEED, le=_MOST_SEED)
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(default=None, max_length=_MAX_BIASES)

    # kvtier's own
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=_MAX_STOP_IDS)
    beam_width: int | None = None
    length_penalty: float | None = Field(default=None, ge=-10, le=10)
    priority: int | None = None
    ttft_target: float | None = Field(default=None, gt=0, le=_DAY)
    tpot_target: float | None = Field(default=None, gt=0, le=_DAY)
    speculate: bool | None = None
    accept_lossy: bool | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    sparse: SparseKv | None = None
    kv_hints: KvHints | None = None

    # Without effect on the output, so that taking them is honest.
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionBody(SamplingBody):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts, json_schema_input_type=_PromptInput)]
    best_of: int | None = Field(default=None, ge=1, le=_MAX_SEQUENCES)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=_MAX_LOGPROBS)
    max_tokens: int | None = Field(default=None, ge=0)
    suffix: _Refused = None


class Message(_Body):
    """One message of a conversation. `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_content, json_schema_input_type=str | list[dict[str, Any]] | None)]
    name: str | None = None

    tool_calls: _Refused = None
    function_call: _Refused = None
    audio: _Refused = None
    refusal: str | None = None
    annotations: list[Any] | None = None

    def rendered(self) -> dict[str, str]:
        """As chat templates read it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content} | ({} if self.name is None else {"name": self.name})


class ChatBody(SamplingBody):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=_MAX_LOGPROBS)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    response_format: Annotated[Any, AfterValidator(_text_format)] = None
    modalities: Annotated[Any, AfterValidator(_text_only)] = None
    tools: _Refused = None
    tool_choice: _Refused = None
    functions: _Refused = None
    function_call: _Refused = None
    audio: _Refused = None
    prediction: _Refused = None
    web_search_options: _Refused = None
    reasoning_effort: _Refused = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(_Body):
    """Body of `POST /tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool = True


class DetokenizeBody(_Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False
