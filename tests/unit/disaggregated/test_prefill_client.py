"""The client against peers that misbehave: every handover ends."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from disaggregated_world import ScriptedPeer
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import until

from kvtier.disaggregated import PrefillClient
from kvtier.disaggregated import client as client_module
from kvtier.disaggregated.handover import Outcome
from kvtier.disaggregated.messages import (
    Beat,
    Computed,
    Failed,
    Finished,
    Identity,
    Progress,
    Refused,
    Welcome,
    from_decode,
    from_prefill,
    to_frame,
)
from kvtier.errors import ConfigError, TierUnavailable

IDENTITY = Identity("model", "layout", "float32", "scheme", "directory", True)
WELCOME = to_frame(Welcome(7))


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[ScriptedPeer]:
    peer = ScriptedPeer(tmp_path / "peer", WELCOME)
    yield peer
    peer.close()


def connect(tmp_path: Path, **options: float) -> PrefillClient:
    return PrefillClient(tmp_path / "peer", IDENTITY, **options)


def test_what_the_peer_says_is_followed(tmp_path: Path, peer: ScriptedPeer) -> None:
    client = connect(tmp_path)
    assert (client.connected, client.peer_pid) == (True, 7)
    seen: list[tuple[int, int]] = []
    first, second = (client.submit([1] * 9, 8, arrived=lambda a, b: seen.append((a, b))) for _ in range(2))
    # Late, repeated, shrinking and excessive news; and ids that were never given out.
    peer.say(Progress(1, 3), Progress(1, 3), Progress(1, 2), Progress(99, 4), Computed(99), Finished(99, 1), Beat(2, 0))
    until(lambda: client.peer_jobs == 2)
    assert (first.blocks, first.computed) == (3, False)
    peer.say(Computed(1), Finished(1, 1000), Failed(2, "no room"))
    assert first.future.result(20) == Outcome("finished", 8)
    assert second.future.result(20) == Outcome("failed", 0)
    assert first.computed
    assert seen == [(0, 3), (3, 8)]
    client.close()


def test_a_peer_that_hangs_is_lost(tmp_path: Path, peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_SILENCE_SECONDS", 0.2)
    client = connect(tmp_path)
    handover = client.submit([1] * 9, 2)
    assert handover.future.result(20) == Outcome("lost", 0)
    client.close()


def test_a_peer_that_gets_nowhere_is_not_waited_for(tmp_path: Path, peer: ScriptedPeer) -> None:
    client = connect(tmp_path, patience=60)
    handovers = [client.submit([1] * 9, 8) for _ in range(2)]
    available: list[bool] = []
    handovers[0].future.add_done_callback(lambda _: available.append(client.available))
    peer.say(Progress(1, 5), Beat(2, 0))
    until(lambda: client.peer_jobs == 2)
    # Only now, so that what the peer said is not late on a busy machine.
    client._patience = 0.2
    assert [handover.future.result(20) for handover in handovers] == [Outcome("late", 5), Outcome("late", 0)]
    assert client.connected
    assert available == [False]
    peer.say(Finished(1, 8))  # too late, and of no effect
    until(lambda: client.available)
    client.close()


def test_a_peer_that_is_busy_with_others_is_waited_for(
    tmp_path: Path, peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(client_module, "_TICK_SECONDS", 0.001)
    client = connect(tmp_path, patience=10)
    handover = client.submit([1] * 9, 8)
    for moves in range(1, 11):
        peer.say(Beat(1, moves))
        until(lambda told=moves: client._moves == told)
        now[0] += 9
        time.sleep(0.01)  # for a tick or two, each of which may end it
    assert not handover.future.done()
    peer.say(Finished(1, 8))
    assert handover.future.result(20) == Outcome("finished", 8)
    client.close()


def test_a_deadline_ends_a_handover_whatever_else_moves(tmp_path: Path, peer: ScriptedPeer) -> None:
    client = connect(tmp_path, patience=60, deadline=0.3)
    handover = client.submit([1] * 9, 8)

    def pushed_out() -> bool:
        peer.say(Progress(99, 1))
        return handover.future.done()

    until(pushed_out)
    assert handover.future.result(0) == Outcome("late", 0)
    client.close()


@pytest.mark.parametrize(
    "frame", [(1 << 31).to_bytes(4, "little"), b"\x01\0\0\0\xc1", WELCOME, to_frame(Refused("changed my mind"))]
)
def test_nonsense_loses_the_connection_and_the_next_one_is_made(
    tmp_path: Path, peer: ScriptedPeer, frame: bytes
) -> None:
    client = connect(tmp_path)
    handover = client.submit([1] * 9, 8)
    peer._connections[-1].sendall(frame)
    assert handover.future.result(20) == Outcome("lost", 0)
    until(lambda: len(peer._connections) == 2 and client.connected)
    client.close()


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (to_frame(Refused("model is 'a' in prefill and 'b' in decode")), ConfigError, "of no use here: model is 'a'"),
        (to_frame(Beat(0, 0)), TierUnavailable, "expected a welcome"),
        (b"HTTP/1.1 400 Bad Request", TierUnavailable, "another protocol"),
    ],
)
def test_who_does_not_welcome_is_no_prefill_engine(
    tmp_path: Path, answer: bytes, error: type[Exception], text: str
) -> None:
    peer = ScriptedPeer(tmp_path / "peer", answer)
    with pytest.raises(error, match=text):
        connect(tmp_path)
    peer.close()


def test_a_peer_that_is_just_being_started_is_waited_for(tmp_path: Path) -> None:
    late: list[ScriptedPeer] = []
    timer = threading.Timer(0.3, lambda: late.append(ScriptedPeer(tmp_path / "peer", WELCOME)))
    timer.start()
    client = connect(tmp_path, connect=20)
    assert client.connected
    client.close()
    timer.join()
    late[0].close()


@pytest.mark.parametrize("options", [{"connect": -1}, {"patience": 0}, {"deadline": -1}, {"patience": float("nan")}])
def test_times_are_checked(tmp_path: Path, options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="more than 0"):
        connect(tmp_path, **options)


@settings(max_examples=200)
@given(st.binary(max_size=64))
def test_no_bytes_are_more_than_a_wrong_message(payload: bytes) -> None:
    for parse in (from_decode, from_prefill):
        with contextlib.suppress(TierUnavailable):
            assert to_frame(parse(payload))
