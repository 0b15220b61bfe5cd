"""PrefillServer: an engine that computes prompts for others, who find their KV in a shared directory.

Decode engines connect to a Unix socket, say what they are, and submit prompts. Each is computed as any request is (in
chunks, in one continuous batch with the others), its blocks are written through to the directory as they are full, and
the submitter is told how many can be found there: while prefill still runs.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtier.api import AsyncLLM
from kvtier.disaggregated.identity import Side
from kvtier.disaggregated.jobs import Job, Visibility
from kvtier.disaggregated.messages import (
    BEAT_SECONDS,
    PROTOCOL,
    Beat,
    Cancel,
    Computed,
    Failed,
    Finished,
    FromPrefill,
    Hello,
    Progress,
    Refused,
    Submit,
    Welcome,
    differences,
    from_decode,
    read_frame,
    to_frame,
    unpacked_tokens,
)
from kvtier.engine import SamplingParams
from kvtier.errors import KVTierError, TierUnavailable
from kvtier.sockets import listen_at

__all__ = ["PrefillServer"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.003
_HELLO_SECONDS = 5.0
# A peer that reads nothing must not cost memory without bound.
_MAX_UNSENT = 1 << 20
_MAX_JOBS = 4096


class _Connection:
    """One decode engine.

    Args:
        writer: to it.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.jobs: dict[int, Job] = {}
        self._writer = writer

    def send(self, message: FromPrefill) -> None:
        """Queue a message; a peer that does not read them is let go."""
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT:
            self.close()
        if not self._writer.is_closing():
            self._writer.write(to_frame(message))

    def close(self) -> None:
        """End the connection; its jobs end with it."""
        self._writer.transport.abort()

    def drop(self, job_id: int) -> None:
        """End a job, in whatever state. Unknown ids are tolerated: an answer may have crossed a cancellation."""
        job = self.jobs.pop(job_id, None)
        if job is not None and job.task is not None:
            job.task.cancel()


class PrefillServer:
    """Serves prefills until it is stopped.

    Args:
        llm: stays the caller's. Its NVMe tier is the shared directory, written through.
        path: of the socket, which only this user may connect to.

    Raises:
        ConfigError: the engine has no such tier, or there can be no socket at `path`.
    """

    def __init__(self, llm: AsyncLLM, path: Path) -> None:
        self._llm = llm
        self._side = Side.of(llm)
        self._visibility = Visibility(self._side)
        self._path = path
        self._socket = listen_at(path)
        self._connections: set[_Connection] = set()
        self._work = asyncio.Event()
        self._moves = 0

    @property
    def jobs(self) -> int:
        """Prompts that are not finished."""
        return sum(len(connection.jobs) for connection in self._connections)

    async def serve(self, stop: asyncio.Event, ready: Callable[[], None] = lambda: None) -> None:
        """Answer until `stop` is set; what is unfinished then is cancelled.

        Args:
            stop: of this event loop.
            ready: called once connections are answered.
        """
        server = await asyncio.start_unix_server(self._talk, sock=self._socket)
        tasks = [asyncio.create_task(work) for work in (stop.wait(), self._watch(), self._beat())]
        ready()
        _log.info("prefill engine listens", extra={"socket": str(self._path)})
        try:
            # Watching and beating never end: where one does, it failed, and without it everybody would wait in vain.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            server.close()
            self._path.unlink(missing_ok=True)
            for connection in list(self._connections):
                connection.close()
            for task in tasks:
                task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task

    # ---- one connection

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer)
        try:
            if await self._greet(reader, connection):
                self._connections.add(connection)
                while (payload := await read_frame(reader)) is not None:
                    self._obey(connection, payload)
        except (TierUnavailable, TimeoutError) as error:
            _log.warning("a decode engine is let go: %s", error)
        finally:
            self._connections.discard(connection)
            for job_id in list(connection.jobs):
                connection.drop(job_id)
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, connection: _Connection) -> bool:
        async with asyncio.timeout(_HELLO_SECONDS):
            payload = await read_frame(reader)
        if payload is None:
            return False
        hello = from_decode(payload)
        if not isinstance(hello, Hello):
            raise TierUnavailable(f"the first message is a {type(hello).__name__}: expected Hello")
        reason = differences(self._side.identity, hello.identity)
        if hello.protocol != PROTOCOL:
            reason = f"protocol is {PROTOCOL} in prefill and {hello.protocol} in decode"
        connection.send(Refused(reason) if reason else Welcome(os.getpid()))
        return not reason

    def _obey(self, connection: _Connection, payload: bytes) -> None:
        match from_decode(payload):
            case Submit() as order:
                self._submit(connection, order)
            case Cancel(id=job_id):
                connection.drop(job_id)
            case Hello():
                raise TierUnavailable("a second Hello: expected it once")

    def _submit(self, connection: _Connection, order: Submit) -> None:
        if order.id in connection.jobs:
            raise TierUnavailable(f"prompt {order.id} is submitted twice: ids are unique")
        if len(connection.jobs) >= _MAX_JOBS:
            connection.send(Failed(order.id, f"{_MAX_JOBS} prompts of this engine are unfinished"))
            return
        tokens = unpacked_tokens(order.tokens)
        job = Job(order.id, self._side.keys(tokens, order.cache_salt), self._side.usable(len(tokens)))
        connection.jobs[order.id] = job
        # What host has it does not put again, and the directory may have lost it since.
        self._side.store.demote(job.keys)
        job.task = asyncio.create_task(self._prefill(connection, job, tokens, order))
        self._work.set()

    async def _prefill(self, connection: _Connection, job: Job, tokens: NDArray[np.uint32], order: Submit) -> None:
        params = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, priority=order.priority, cache_salt=order.cache_salt
        )
        reason = "the engine was closed"
        try:
            async for output in self._llm.generate(tokens.tolist(), params):
                job.computed = output.finish_reason == "length"
        except KVTierError as error:
            reason = str(error)
        self._moves += 1
        if job.computed:
            job.moved = time.monotonic()
            connection.send(Computed(job.id))
        else:
            connection.jobs.pop(job.id, None)
            connection.send(Failed(job.id, reason))

    # ---- what becomes visible

    async def _watch(self) -> None:
        while True:
            if not self.jobs:
                self._work.clear()
                await self._work.wait()
            self._report()
            await asyncio.sleep(_LOOK_SECONDS)

    def _report(self) -> None:
        now = time.monotonic()
        owners = {job: connection for connection in self._connections for job in connection.jobs.values()}
        for job in self._visibility.advanced(owners):
            self._moves += 1
            owners[job].send(Progress(job.id, job.visible))
        for job, connection in owners.items():
            if job.complete() or self._visibility.is_given_up(job, now):
                if not job.complete():
                    _log.warning("%d of %d blocks came to the directory, no more do", job.visible, job.total)
                del connection.jobs[job.id]
                connection.send(Finished(job.id, job.visible))

    async def _beat(self) -> None:
        while True:
            for connection in self._connections:
                connection.send(Beat(len(connection.jobs), self._moves))
            await asyncio.sleep(BEAT_SECONDS)
