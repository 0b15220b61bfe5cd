"""A prefix-aware router in front of OpenAI-compatible engines. Needs the extra `router`.

run        its process
app        routes, the API key, what is answered here
proxy      one request: choose, send, pass on what comes, or try another engine
prompts    what a request's prompt is: tokens, or text where nobody makes them
choice     which engine: the least work, of what it has to compute and what it has to do already
fleet      the engines: health, load, models
index      what an engine has, as its events say; hashing names blocks
expected   what an engine will have, since it was sent there
telemetry  Prometheus metrics
"""

from importlib import import_module

from kvtier.errors import ConfigError

__all__ = ["require_router"]


def require_router() -> None:
    """Check that the router's packages are there.

    Raises:
        ConfigError: one is missing.
    """
    for package in ("fastapi", "uvicorn", "httpx", "zmq"):
        try:
            import_module(package)
        except ImportError as error:
            raise ConfigError(f"router: {package} is missing: pip install 'kvtier[router]'") from error
