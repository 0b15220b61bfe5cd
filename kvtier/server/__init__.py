"""The OpenAI-compatible server over `AsyncLLM`. Needs the extra `server` (FastAPI, uvicorn).

run           sockets, signals, the drain
app           routes; guards (keys, body size, access log) wrap them
protocol      what a request may say -> sampling: as SamplingParams and RequestHints
admission     who is let in: 429 and 503
generation    one request's sequences, from the engine's streams
completions,  what the engine says -> what the client reads, whole or as events
chat
replies       runs a generation, answers with it, aborts it when the client goes away
tokens        tokens as text and bytes, for logprobs
telemetry     Prometheus metrics of engine and server
"""

from importlib import import_module

from kvtier.errors import ConfigError

__all__ = ["require_server"]


def require_server() -> None:
    """Check that the server's packages are there, before a long load of a model.

    Raises:
        ConfigError: one is missing.
    """
    for package in ("fastapi", "uvicorn"):
        try:
            import_module(package)
        except ImportError as error:
            raise ConfigError(f"server: {package} is missing: pip install 'kvtier[server]'") from error
