"""A prefill engine as the whole of a process: until a signal, or the end of whoever started it."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from kvtier.api import AsyncLLM
from kvtier.disaggregated.server import PrefillServer
from kvtier.errors import KVTierError

__all__ = ["run_child", "serve_prefill"]


def serve_prefill(
    llm: AsyncLLM, path: Path, *, ready: Callable[[], None] = lambda: None, parent: BinaryIO | None = None
) -> None:
    """Serve prefills until SIGTERM or SIGINT. From the main thread.

    Args:
        llm: stays the caller's.
        path: of the socket.
        ready: called once connections are answered.
        parent: a pipe whose end ends this, too.

    Raises:
        ConfigError: see `PrefillServer`.
    """
    asyncio.run(_serve(PrefillServer(llm, path), ready, parent))


async def _serve(server: PrefillServer, ready: Callable[[], None], parent: BinaryIO | None) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if parent is not None:
        # Nothing is ever written to it again: what can be read is its end.
        loop.add_reader(parent.fileno(), stop.set)
    await server.serve(stop, ready)


def run_child() -> int:
    """What `PrefillProcess` starts: settings from standard input, one line of JSON on standard output when it is up.

    Returns:
        The exit code.
    """
    order = json.loads(sys.stdin.buffer.readline())
    # Only we write to the pipe of that line: whatever else prints, does so beside it.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(**content: str | int) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        llm = AsyncLLM(config=order["settings"])
    except KVTierError as error:
        answer(error=str(error))
        return 1
    try:
        path = Path(order["socket"])
        serve_prefill(llm, path, ready=lambda: answer(pid=os.getpid()), parent=sys.stdin.buffer)
    except KVTierError as error:
        answer(error=str(error))
        return 1
    finally:
        llm.close()
    return 0
