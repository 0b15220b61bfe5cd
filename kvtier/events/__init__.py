"""Block events: what tiers and devices hold, told as it changes, numbered so that nobody misses a change unnoticed.

log         EventLog: the latest changes of one store's tiers, in memory
mirror      what an engine and its store hold, with tokens: the source of a publisher
frames      messages as vLLM writes them
publisher   over ZMQ, with replay (extra `events`)
subscriber  follows a publisher, notices what is missing, rebuilds (extra `events`)
"""

from importlib import import_module

from kvtier.errors import ConfigError
from kvtier.events.log import Event, EventLog, Since

__all__ = ["Event", "EventLog", "Since", "require_events"]


def require_events() -> None:
    """Check that ZMQ is there, before `publisher` or `subscriber` is imported.

    Raises:
        ConfigError: it is missing.
    """
    try:
        import_module("zmq")
    except ImportError as error:
        raise ConfigError(f"events: pyzmq is missing ({error}): pip install 'kvtier[events]'") from error
