"""The two hook halves in two processes: plans and results cross a socket, bytes cross shared memory only."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from patience import PATIENCE, until

from kvtier.connector import TierScheduler
from kvtier.cpu import HostTier, StagingRegion, send_regions
from kvtier.hints import RequestHints
from kvtier.hooks import Completed, Match, Pending, Step, StepSpan, TransferPlan, TransferResults
from kvtier.keys import Chain, Namespace
from kvtier.store import TieredStore

BLOCK_SIZE, BLOCK_BYTES, BLOCKS = 4, 8192, 16


@dataclass
class Request:
    id: str
    tokens: list[int]
    lossy: bool | None = None
    hints: RequestHints | None = None

    @property
    def chain(self) -> list[bytes]:
        chain = Chain(BLOCK_SIZE)
        chain.extend(self.tokens)
        return chain.keys

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class Remote:
    """The engine's view of a worker in another process."""

    def __init__(self, sock: socket.socket) -> None:
        self._stream = sock.makefile("rwb")
        self._decoder = msgspec.msgpack.Decoder(tuple[TransferResults, list[int]])

    def run(self, plan: TransferPlan) -> tuple[TransferResults, list[int]]:
        message = msgspec.msgpack.encode(plan)
        self._stream.write(len(message).to_bytes(4, "little") + message)
        self._stream.flush()
        size = int.from_bytes(self._stream.read(4), "little")
        return self._decoder.decode(self._stream.read(size))


@pytest.fixture
def store() -> Iterator[TieredStore]:
    with contextlib.closing(TieredStore(HostTier(64 * BLOCK_BYTES))) as store:
        yield store


@pytest.fixture
def staging() -> Iterator[StagingRegion]:
    with contextlib.closing(StagingRegion(BLOCK_BYTES, 8)) as staging:
        yield staging


@pytest.fixture
def remote(store: TieredStore, staging: StagingRegion) -> Iterator[Remote]:
    ours, theirs = socket.socketpair()
    script = Path(__file__).with_name("worker_process.py")
    command = [sys.executable, str(script), str(theirs.fileno()), str(BLOCKS), str(BLOCK_BYTES)]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as child:
        theirs.close()
        send_regions(ours, [*store.host.regions(), *staging.regions()])
        remote = Remote(ours)
        yield remote
        remote._stream.close()
        ours.shutdown(socket.SHUT_RDWR)
        assert child.wait(PATIENCE) == 0


def settle(scheduler: TierScheduler, remote: Remote) -> tuple[dict[str, tuple[int, bool]], list[int]]:
    """Empty steps until nothing is under way: what was loaded, and the device's content."""
    loaded: dict[str, tuple[int, bool]] = {}
    pool: list[int] = []

    def rests() -> bool:
        nonlocal loaded, pool
        results, pool = remote.run(scheduler.plan(Step(0, (), frozenset())))
        done: Completed = scheduler.completed(results)
        loaded |= done.loaded
        return not scheduler.busy

    until(rests, "the connector never came to rest")
    return loaded, pool


def test_saved_by_one_request_loaded_by_another(store: TieredStore, staging: StagingRegion, remote: Remote) -> None:
    scheduler = TierScheduler(store, Namespace("model", b"layout"), BLOCK_SIZE, staging)
    first = Request("first", list(range(14)))
    assert scheduler.match(first, 0) == Match(0)
    scheduler.allocated(first, [1, 2, 3, 4], 0)
    span = StepSpan(first, (1, 2, 3, 4), 0, 14, exact=True)
    results, _ = remote.run(scheduler.plan(Step(0, (span,), frozenset({1, 2, 3, 4}))))
    scheduler.completed(results)
    assert scheduler.finished("first", "stop") is False
    settle(scheduler, remote)

    second = Request("second", [*range(12), 99, 98])
    while (found := scheduler.match(second, 4)) == Pending():
        time.sleep(0.001)
    # 12 shared tokens are 3 full blocks, one of which the device has already.
    assert found == Match(8)
    scheduler.allocated(second, [1, 9, 10, 11], 8)
    loaded, pool = settle(scheduler, remote)
    assert loaded == {"second": (12, True)}
    assert pool[9:11] == [2, 3]
    assert scheduler.finished("second", "stop") is False
    assert store.stats()["host"]["leases"] == 0
    assert staging.free_slots == 8


def test_another_namespace_finds_nothing(store: TieredStore, staging: StagingRegion, remote: Remote) -> None:
    ours = TierScheduler(store, Namespace("model", b"layout"), BLOCK_SIZE, staging)
    request = Request("request", list(range(9)))
    span = StepSpan(request, (1, 2, 3), 0, 9, exact=True)
    ours.completed(remote.run(ours.plan(Step(0, (span,), frozenset({1, 2, 3}))))[0])
    settle(ours, remote)
    theirs = TierScheduler(store, Namespace("model", b"layout", salt="tenant"), BLOCK_SIZE, staging)
    assert theirs.match(request, 0) == Match(0)
    assert len(store.match([]).tiers) == 0
