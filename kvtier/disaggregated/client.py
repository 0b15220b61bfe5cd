"""PrefillClient: hands prompts to a prefill engine over its socket, and follows what becomes of them.

Every handover ends: finished or failed as the peer says, lost with the connection, late when the peer gets nowhere. The
connection is made again in the background when it was lost; meanwhile handovers are lost at once, and whoever wanted
them computes the prompts.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from kvtier.disaggregated.handover import Ending, Handover
from kvtier.disaggregated.messages import (
    BEAT_SECONDS,
    MAX_FRAME,
    PROTOCOL,
    Beat,
    Cancel,
    Computed,
    Failed,
    Finished,
    FromDecode,
    Hello,
    Identity,
    Progress,
    Refused,
    Submit,
    Welcome,
    from_prefill,
    packed_tokens,
    read_frame,
    to_frame,
)
from kvtier.errors import ConfigError, KVTierError, TierUnavailable

__all__ = ["PrefillClient"]

_log = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_SILENCE_SECONDS = 10 * BEAT_SECONDS
_TICK_SECONDS = 0.1
_RETRY_SECONDS = (0.25, 0.5, 1.0, 2.0, 4.0)
_AVOIDED = 3  # times `patience`, for which nothing is handed to a peer that got nowhere
_OVERHEAD = 64  # of a Submit, beside its tokens
_MAX_UNSENT = 4 * MAX_FRAME


@dataclass(slots=True)
class _Order:
    """A handover and what was asked for with it."""

    handover: Handover
    deadline: float


class PrefillClient:
    """One decode engine's connection. Thread-safe; a thread of its own talks to the peer.

    Args:
        path: of the peer's socket.
        identity: what the peer must be, too.
        patience: seconds without any progress of the peer, on whatever prompt, after which it is not waited for.
        deadline: seconds that one handover may take.
        connect: seconds in which a peer that is just being started may begin to listen.

    Raises:
        ConfigError: a value is out of range, or the peer has another model, layout, numerics or directory; the message
            names what differs.
        TierUnavailable: nobody answers there.
    """

    def __init__(
        self, path: Path, identity: Identity, *, patience: float = 10.0, deadline: float = 120.0, connect: float = 0.0
    ) -> None:
        if not (patience > 0 and deadline > 0 and connect >= 0):
            raise ConfigError(
                f"patience={patience}, deadline={deadline}, connect={connect}: expected seconds, two more than 0"
            )
        self._path = path
        self._identity = identity
        self._patience = patience
        self._deadline = deadline
        self._listens_until = time.monotonic() + connect
        self._numbers = count(1)
        self._orders: dict[int, _Order] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._moved = 0.0  # when the peer advanced last, with anybody's prompt
        self._moves = 0
        self._avoided = 0.0  # until then
        self._peer_jobs = 0
        self._peer_pid: int | None = None
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._closed = False
        first: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(first,), name="kvtier-handover", daemon=True)
        self._thread.start()
        try:
            first.result()
        except BaseException:
            self.close()
            raise

    # ---- from any thread

    @property
    def connected(self) -> bool:
        """Whether there is a peer."""
        return self._writer is not None

    @property
    def available(self) -> bool:
        """Whether there is a peer, and it did not keep others waiting in vain just now."""
        return self.connected and time.monotonic() >= self._avoided

    @property
    def peer_pid(self) -> int | None:
        """Process of the prefill engine that was connected last."""
        return self._peer_pid

    @property
    def peer_jobs(self) -> int:
        """Unfinished prompts of this client, as the peer said last."""
        return self._peer_jobs

    def submit(
        self,
        tokens: Sequence[int],
        total: int,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrived: Callable[[int, int], None] | None = None,
    ) -> Handover:
        """Have a prompt prefilled. Returns at once.

        Args:
            tokens: of the prompt.
            total: leading full blocks that are wanted.
            priority: see `SamplingParams.priority`.
            cache_salt: see `SamplingParams.cache_salt`.
            arrived: called in the client's thread with (start, stop) of blocks that have come; it must return at once.

        Raises:
            KVTierError: the client is closed.
        """
        number = next(self._numbers)
        handover = Handover(total, partial(self._call, partial(self._give_up, number, "cancelled")), arrived)
        packed = packed_tokens(np.asarray(tokens, dtype=np.uint32))
        if len(packed) > MAX_FRAME - _OVERHEAD:
            handover.end("failed")
        elif not self._call(partial(self._order, number, handover, Submit(number, packed, priority, cache_salt))):
            raise KVTierError("this client is closed; make a new one")
        return handover

    def close(self) -> None:
        """End the connection and, as lost, all handovers. Idempotent."""
        self._call(self._stop.set)
        self._closed = True
        self._thread.join()

    def _call(self, work: Callable[[], None]) -> bool:
        """Have something done in the client's thread; False: it has ended."""
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:
            return False
        return not self._closed

    # ---- the thread

    def _run(self, first: "Future[None]") -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main(first))

    async def _main(self, first: "Future[None]") -> None:
        ticking = asyncio.create_task(self._tick())
        serving = asyncio.create_task(self._serve(first))
        await self._stop.wait()
        for task in (serving, ticking):
            task.cancel()
        await asyncio.gather(serving, ticking, return_exceptions=True)
        self._lose()

    async def _serve(self, first: "Future[None]") -> None:
        failures = 0
        while True:
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    reader, writer = await self._connect()
            except (KVTierError, OSError, TimeoutError) as error:
                starting = not isinstance(error, KVTierError) and time.monotonic() < self._listens_until
                if not (first.done() or starting):
                    first.set_exception(_unreachable(self._path, error))
                    return
                if failures == 0:
                    _log.warning("prefill engine at %s is away: %s", self._path, error)
                await asyncio.sleep(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)])
                failures += 1
                continue
            failures, self._writer = 0, writer
            if not first.done():
                first.set_result(None)
            try:
                await self._listen(reader)
            except Exception as error:  # noqa: BLE001  # the thread's top level: whatever it was, the next one may do
                _log.warning("connection to the prefill engine at %s is lost: %r", self._path, error)
            finally:
                writer.transport.abort()
                self._lose()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(str(self._path))
        try:
            writer.write(to_frame(Hello(PROTOCOL, self._identity)))
            self._peer_pid = _welcomed(self._path, await read_frame(reader))
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while True:
            # Not `wait_for`, which may swallow a cancellation that comes together with a message.
            async with asyncio.timeout(_SILENCE_SECONDS):
                payload = await read_frame(reader)
            if payload is None:
                raise TierUnavailable("it was closed by the peer")
            match from_prefill(payload):
                case Beat(jobs=jobs, moves=moves):
                    self._peer_jobs = jobs
                    if moves != self._moves:
                        self._moves, self._moved = moves, time.monotonic()
                case Progress(id=number, blocks=blocks):
                    self._advance(number, blocks)
                case Computed(id=number):
                    self._computed(number)
                case Finished(id=number, blocks=blocks):
                    self._advance(number, blocks)
                    self._end(number, "finished")
                case Failed(id=number, reason=reason):
                    _log.warning("prefill engine at %s failed on a prompt: %s", self._path, reason)
                    self._end(number, "failed")
                case Welcome() | Refused():
                    raise TierUnavailable("it greets again: expected it once")

    async def _tick(self) -> None:
        """Nobody waits for a peer that gets nowhere, nor longer than the deadline."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            stalled = bool(self._orders) and now - self._moved > self._patience
            if stalled:
                _log.warning("prefill engine at %s got nowhere for %s s", self._path, self._patience)
                self._avoided = now + _AVOIDED * self._patience
            for number in [number for number, order in self._orders.items() if stalled or now > order.deadline]:
                self._give_up(number, "late")

    def _order(self, number: int, handover: Handover, message: Submit) -> None:
        if self._stop.is_set() or not self._send(message):
            handover.end("lost")
            return
        now = time.monotonic()
        if not self._orders:
            self._moved = now
        self._orders[number] = _Order(handover, now + self._deadline)

    def _send(self, message: FromDecode) -> bool:
        writer = self._writer
        if writer is None or writer.transport.get_write_buffer_size() > _MAX_UNSENT:
            return False
        writer.write(to_frame(message))
        return True

    def _advance(self, number: int, blocks: int) -> None:
        self._moved = time.monotonic()
        order = self._orders.get(number)
        if order is not None:
            order.handover.advance(blocks)

    def _computed(self, number: int) -> None:
        self._moved = time.monotonic()
        order = self._orders.get(number)
        if order is not None:
            order.handover.computed = True

    def _give_up(self, number: int, ending: Ending) -> None:
        if number in self._orders:
            self._send(Cancel(number))
            self._end(number, ending)

    def _end(self, number: int, ending: Ending) -> None:
        order = self._orders.pop(number, None)
        if order is not None:
            order.handover.end(ending)

    def _lose(self) -> None:
        self._writer = None
        self._peer_jobs = 0
        self._avoided = 0.0
        for number in list(self._orders):
            self._end(number, "lost")


def _welcomed(path: Path, payload: bytes | None) -> int:
    """Process of the peer that said so."""
    answer = None if payload is None else from_prefill(payload)
    if isinstance(answer, Welcome):
        return answer.pid
    if isinstance(answer, Refused):
        raise ConfigError(
            f"prefill engine at {str(path)!r} computes KV that is of no use here: {answer.reason}; start both with the "
            f"same model, dtype, block size and directory"
        )
    raise TierUnavailable(f"prefill engine at {str(path)!r} answers {answer!r}: expected a welcome; is it one?")


def _unreachable(path: Path, error: Exception) -> KVTierError:
    if isinstance(error, KVTierError):
        return error
    return TierUnavailable(
        f"no prefill engine answers at {str(path)!r} ({error or 'timeout'}): start `kvtier prefill --socket {path}`"
    )
