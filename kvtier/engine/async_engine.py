"""AsyncEngine: the engine in a thread of its own, for any number of asyncio callers."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from kvtier.engine.core import Engine
from kvtier.engine.outputs import RequestOutput
from kvtier.engine.params import SamplingParams
from kvtier.errors import KVTierError
from kvtier.hints import RequestHints

__all__ = ["AsyncEngine"]

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 0.05
_MOST_FRUITLESS = 20
_DRAIN_SECONDS = 5.0


class _Mailbox:
    """From the engine's thread to one consumer in an event loop.

    Of each sequence at most one output waits here: one that a slow consumer has not taken is joined with the next, and
    keeps its place among the others'.

    Args:
        sequences: how many will end.
    """

    def __init__(self, sequences: int) -> None:
        self.unfinished = sequences  # as the engine's thread sees it
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, RequestOutput] = {}
        self._error: KVTierError | None = None
        self._arrived = asyncio.Event()

    def put(self, item: RequestOutput | KVTierError) -> bool:
        """From any thread. False if the event loop has ended, and with it the consumer."""
        try:
            self._loop.call_soon_threadsafe(self._receive, item)
        except RuntimeError:
            return False
        return True

    def _receive(self, item: RequestOutput | KVTierError) -> None:
        if isinstance(item, KVTierError):
            self._error = item
        else:
            earlier = self._waiting.get(item.index)
            self._waiting[item.index] = item if earlier is None else replace(item, delta=earlier.delta + item.delta)
        self._arrived.set()

    async def get(self) -> RequestOutput:
        while not self._waiting:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.pop(next(iter(self._waiting)))


class AsyncEngine:
    """Serves asyncio callers from one thread that owns the engine.

    Args:
        engine: used by this object alone from now on.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = count(1)
        self._mailboxes: dict[str, _Mailbox] = {}  # the thread's own
        self._wake = threading.Condition()
        self._orders: deque[Callable[[], None]] = deque()
        self._closing = False
        self._fruitless = 0  # steps that failed since one succeeded, and cost no request
        self._thread = threading.Thread(target=self._serve, name="kvtier-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams | None = None, hints: RequestHints | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt: yields an output for each token, or for several to a consumer that is slower than that.

        Ending the iteration early aborts the request.

        Outputs of several sequences (`SamplingParams.n`) come as they are made; the iteration ends with the last one.

        Raises:
            RequestError: see `Engine.add`.
            KVTierError: the engine failed, or is closed.
        """
        unfinished = 1 if params is None else params.n
        request_id, mailbox = f"async-{next(self._numbers)}", _Mailbox(unfinished)
        self._order(partial(self._add, mailbox, request_id, prompt, params, hints))
        try:
            while unfinished:
                output = await mailbox.get()
                unfinished -= output.finish_reason is not None
                yield output
        finally:
            # Of no effect once the request is finished.
            self._order(partial(self._abort, request_id), final=True)

    def close(self) -> None:
        """Abort all requests, whose consumers get what there is, and end the thread. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _order(self, order: Callable[[], None], *, final: bool = False) -> None:
        with self._wake:
            if self._closing:
                if final:
                    return
                raise KVTierError("the engine is closed; make a new one")
            self._orders.append(order)
            self._wake.notify()

    # ---- the thread

    def _serve(self) -> None:
        while self._wait():
            try:
                self._cycle()
                self._fruitless = 0
            except Exception as error:  # noqa: BLE001  # the thread's top level: every consumer must learn of it
                self._fail(error)
        self._obey()
        for request_id in list(self._mailboxes):
            self._abort(request_id)
        self._drain()

    def _drain(self) -> None:
        """Let the transfers under way arrive, so that the next process finds them; a hung tier is not waited for."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        try:
            while self._engine.busy and time.monotonic() < deadline:
                self._engine.step()
        except Exception as error:  # noqa: BLE001  # the thread's top level: nobody is left to be told
            _log.error("engine step failed while closing", exc_info=error)

    @property
    def _active(self) -> bool:
        return self._engine.has_work or self._engine.busy

    def _wait(self) -> bool:
        """Return when there is something to do; False at the end."""
        with self._wake:
            while not (self._orders or self._closing or self._active):
                self._wake.wait()
            return not self._closing

    def _cycle(self) -> None:
        self._obey()
        if self._active:
            for output in self._engine.step():
                self._deliver(output)

    def _obey(self) -> None:
        while self._orders:
            self._orders.popleft()()

    def _add(
        self,
        mailbox: _Mailbox,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams | None,
        hints: RequestHints | None,
    ) -> None:
        # First of all: whatever goes wrong, this consumer learns of it.
        self._mailboxes[request_id] = mailbox
        try:
            self._engine.add(request_id, prompt, params, hints)
        except KVTierError as error:
            del self._mailboxes[request_id]
            mailbox.put(error)
        except Exception as error:  # noqa: BLE001  # what is wrong with one request is told to its consumer alone
            self._lose(request_id, error)

    def _abort(self, request_id: str) -> None:
        mailbox = self._mailboxes.pop(request_id, None)
        for output in self._engine.abort(request_id):
            if mailbox is not None:
                mailbox.put(output)

    def _deliver(self, output: RequestOutput) -> None:
        mailbox = self._mailboxes.get(output.id)
        if mailbox is None:
            return  # its consumer went away with an earlier sequence of the same step, or was told of its end
        if output.error is not None:
            self._lose(output.id, output.error)
            return
        received = mailbox.put(output)
        mailbox.unfinished -= output.finish_reason is not None
        if not mailbox.unfinished:
            del self._mailboxes[output.id]
        elif not received:
            self._abort(output.id)

    def _fail(self, error: Exception) -> None:
        """A step failed: so did the requests that it cost, and all, if it goes on like that and costs none."""
        _log.error("engine step failed", exc_info=error)
        lost = [request_id for request_id in self._mailboxes if not self._engine.has(request_id)]
        self._fruitless = 0 if lost else self._fruitless + 1
        if self._fruitless == _MOST_FRUITLESS:
            lost, self._fruitless = list(self._mailboxes), 0
        for request_id in lost:
            self._lose(request_id, error)
        if not lost:
            # A hook that fails again and again with nobody to tell must not spin.
            time.sleep(_RETRY_SECONDS)

    def _lose(self, request_id: str, error: Exception) -> None:
        """End a request, whose consumer is told why."""
        mailbox = self._mailboxes.pop(request_id)
        self._engine.abort(request_id)
        failure = KVTierError(f"the engine failed while this request ran: {type(error).__name__}: {error}")
        failure.__cause__ = error
        mailbox.put(failure)
