"""The routes."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Scope

from kvtier import __version__
from kvtier.errors import KVTierError
from kvtier.http.access import AccessLog
from kvtier.server.chat import ChatWriter
from kvtier.server.completions import CompletionWriter, Echo
from kvtier.server.errors import ApiError, as_api_error, from_http, from_validation
from kvtier.server.guards import ApiKeys, BodyLimit, refusal
from kvtier.server.protocol import ChatBody, CompletionBody, DetokenizeBody, SamplingBody, TokenizeBody
from kvtier.server.replies import Job, Reply
from kvtier.server.sampling import chat_params, completion_params, request_hints
from kvtier.server.served import Served

__all__ = ["make_app"]


def make_app(served: Served, api_keys: Sequence[str] = ()) -> FastAPI:
    """The ASGI application.

    Args:
        served: the model and its engine.
        api_keys: that open it; none: everybody is served.
    """
    # Its pages for people load scripts from elsewhere.
    app = FastAPI(title="kvtier", version=__version__, docs_url=None, redoc_url=None)
    _add_probes(app, served)
    _add_models(app, served)
    _add_tokens(app, served)
    _add_generation(app, served)
    _add_errors(app)
    settings = served.llm.config.server
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, limit=settings.max_body)
    app.add_middleware(ApiKeys, keys=api_keys)
    if settings.cors_origins is not None:
        origins = [origin.strip() for origin in settings.cors_origins.split(",")]
        headers = ["Authorization", "Content-Type"]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=headers)
    paths = frozenset(route.path for route in app.routes if isinstance(route, APIRoute))

    def label(scope: Scope) -> str:
        path: str = scope["path"]
        return path if path in paths else "other"

    app.add_middleware(AccessLog, label=label, answered=served.telemetry.answered, log="kvtier.server.access")
    return app


def _add_probes(app: FastAPI, served: Served) -> None:
    @app.get("/health")
    @app.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def ready() -> JSONResponse:
        draining = served.admission.draining
        return JSONResponse({"status": "draining" if draining else "ready"}, 503 if draining else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(served.telemetry.text(), media_type="text/plain; version=0.0.4")


def _add_models(app: FastAPI, served: Served) -> None:
    row = {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "kvtier",
        "max_model_len": served.llm.max_model_len,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [row]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        served.check_model(name)
        return row


def _add_tokens(app: FastAPI, served: Served) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        served.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "expected prompt or messages, and not both", param="prompt")
        if body.messages is not None:
            tokens = await served.encode_chat(body.messages)
        else:
            tokens = await served.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
        return {"count": len(tokens), "max_model_len": served.llm.max_model_len, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        served.check_model(body.model)
        size = served.llm.model.config.vocab
        for at, token in enumerate(body.tokens):
            if not 0 <= token < size:
                raise ApiError(400, f"tokens[{at}]={token}: expected 0..{size - 1}", param="tokens")
        return {"prompt": served.tokenizer.decode(body.tokens, skip_special=body.skip_special_tokens)}


def _add_generation(app: FastAPI, served: Served) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody) -> Reply:
        served.check_model(body.model)
        params = completion_params(body)
        sequences = len(body.prompt) * max(body.best_of or 1, body.n or 1, body.beam_width or 1)
        served.check_beams(body.beam_width)
        served.admission.check(sequences)
        prompts = [await served.encode(one) if isinstance(one, str) else one for one in body.prompt]
        for tokens in prompts:
            served.check_length(tokens, body.max_tokens, "prompt")
        writer = CompletionWriter(
            served.head("cmpl"),
            served.texts,
            n=body.n or 1,
            logprobs=body.logprobs is not None,
            echoes=_echoes(served, body, prompts) if body.echo else None,
            muted=body.max_tokens == 0,
        )
        return Reply(served, _job(body, prompts, params, sequences, hidden=int(body.max_tokens == 0)), writer)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody) -> Reply:
        served.check_model(body.model)
        params = chat_params(body)
        n = body.n or 1
        sequences = max(n, body.beam_width or 1)
        served.check_beams(body.beam_width)
        served.admission.check(sequences)
        tokens = await served.encode_chat(body.messages)
        served.check_length(tokens, params.max_tokens, "messages")
        writer = ChatWriter(served.head("chatcmpl"), served.texts, n=n, logprobs=bool(body.logprobs))
        return Reply(served, _job(body, [tokens], params, sequences), writer)


def _job(body: SamplingBody, prompts: list[list[int]], params: Any, sequences: int, *, hidden: int = 0) -> Job:
    return Job(
        prompts,
        params,
        request_hints(body.kv_hints),
        sequences,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        hidden=hidden,
    )


def _echoes(served: Served, body: CompletionBody, prompts: list[list[int]]) -> list[Echo]:
    return [
        Echo(given if isinstance(given, str) else served.tokenizer.decode(given, skip_special=False), tuple(tokens))
        for given, tokens in zip(body.prompt, prompts, strict=True)
    ]


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(KVTierError)
    async def refused(_: Request, error: KVTierError) -> JSONResponse:
        return refusal(as_api_error(error))

    @app.exception_handler(RequestValidationError)
    async def misshapen(_: Request, error: RequestValidationError) -> JSONResponse:
        return refusal(from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        asked = f"{request.method} {request.url.path!r}"
        return refusal(from_http(error.status_code, str(error.detail), asked, error.headers))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        # The server logs the rest; it may hold what the client should not read.
        return refusal(ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error"))
