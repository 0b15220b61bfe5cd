"""ThreadLane: host work in a thread of its own."""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from kvtier.gpu.streams.base import Event, HostWork

__all__ = ["ThreadLane"]

_log = logging.getLogger(__name__)


class ThreadLane:
    """A lane with a thread of its own. Implements `Lane`.

    Args:
        name: of the thread.
        synchronize: blocks until an event has happened.
        prepare: called once in the thread, before all work.
    """

    def __init__(
        self, name: str, synchronize: Callable[[Event], None], prepare: Callable[[], None] | None = None
    ) -> None:
        self._queue: SimpleQueue[HostWork | None] = SimpleQueue()
        self._closed = False
        self.thread = threading.Thread(target=_drain, args=(self._queue, synchronize, prepare), name=name, daemon=True)
        self.thread.start()

    def submit(self, work: HostWork) -> None:
        """See `Lane.submit`."""
        self._queue.put(work)

    def close(self) -> None:
        """See `Lane.close`."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self.thread.join()


def _drain(
    queue: "SimpleQueue[HostWork | None]", synchronize: Callable[[Event], None], prepare: Callable[[], None] | None
) -> None:
    if prepare is not None:
        prepare()
    while (work := queue.get()) is not None:
        try:
            _carry_out(work, synchronize)
        except Exception:  # noqa: BLE001 - the thread's top level: the lane goes on with the next work
            _log.exception("work of %s failed", threading.current_thread().name)


def _carry_out(work: HostWork, synchronize: Callable[[Event], None]) -> None:
    try:
        event = next(work)
        while True:
            try:
                synchronize(event)
            except Exception as error:  # noqa: BLE001 - the work's own to handle
                event = work.throw(error)
            else:
                event = next(work)
    except StopIteration:
        return
