"""Readers of published traces. Which one reads a file is decided by its content, not by its name."""

from collections.abc import Callable
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.replay.readers.agents import read_agents
from kvtier.replay.readers.azure import AZURE_HEADER, read_azure
from kvtier.replay.readers.events import read_events
from kvtier.replay.readers.mooncake import read_mooncake
from kvtier.replay.trace import ReadOptions, Trace, malformed

__all__ = ["read_trace"]

_HEAD_BYTES = 1 << 16
_KNOWN = (
    "a Mooncake JSONL file, a coding-agent session (JSON) or a directory of them, an Azure LLM inference CSV, "
    "or KV events of vLLM (JSON lines or msgpack)"
)


def read_trace(path: Path, options: ReadOptions | None = None) -> Trace:
    """Read a trace of any known kind.

    Raises:
        ConfigError: it cannot be read, is of no known kind, or is damaged; names file, line, value, expectation.
    """
    options = options or ReadOptions()
    try:
        trace = _reader(path)(path, options)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}: expected {_KNOWN}") from error
    except UnicodeDecodeError as error:
        raise malformed(path, None, f"byte {error.start}", "UTF-8 text") from error
    except RecursionError as error:
        raise malformed(path, None, "values nested hundreds deep", _KNOWN) from error
    if not trace.requests:
        raise malformed(path, None, "no request", _KNOWN)
    if options.sessions is not None and trace.kind != "azure":
        raise ConfigError(f"sessions {options.sessions}: only traces of lengths (Azure) need sessions made up")
    return trace


def _reader(path: Path) -> Callable[[Path, ReadOptions], Trace]:
    if path.is_dir():
        return read_agents
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    text = head.lstrip()
    if text.startswith(AZURE_HEADER.encode()):
        return read_azure
    # A msgpack array of at least two elements, or a JSON one: a batch of events.
    if text[:1] == b"[" or head[:1] in {b"\x92", b"\x93", b"\x94", b"\xdc", b"\xdd"}:
        return read_events
    first = text.partition(b"\n")[0]
    if text[:1] == b"{" and b'"timestamp"' in first and b'"hash_ids"' in first:
        return read_mooncake
    if text[:1] == b"{" and b'"requests"' in text:
        return read_agents
    raise malformed(path, 1, head[:40].decode("utf-8", "replace"), _KNOWN)
