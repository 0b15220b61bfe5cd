"""Publisher and subscriber over real sockets: order, gaps, replay, snapshots, restarts, a subscriber that is slow."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq
from events_world import View
from patience import PATIENCE, came_true, until
from prometheus_client import CollectorRegistry

from kvtier.errors import ConfigError
from kvtier.events.frames import BlockEvent, BlockRemoved, BlocksCleared, BlockStored, decode_batch
from kvtier.events.publisher import Publisher
from kvtier.events.subscriber import Subscriber


class Blocks:
    """A source whose changes are single blocks."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.held: dict[int, int] = {}
        self.changes: deque[BlockEvent] = deque()

    def store(self, one: int) -> None:
        self.held[one] = 1
        self.changes.append(BlockStored([one], None, list(range(32)), 32, None, "GPU", None))
        self.wake()

    def remove(self, one: int) -> None:
        del self.held[one]
        self.changes.append(BlockRemoved([one], "GPU"))
        self.wake()

    def take(self) -> list[BlockEvent]:
        return [self.changes.popleft()] if self.changes else []

    def close(self) -> None:
        pass

    def snapshot(self) -> list[BlockEvent]:
        tokens = list(range(32))
        return [BlocksCleared(), *(BlockStored([one], None, tokens, 32, None, "GPU", None) for one in list(self.held))]


class Line:
    """A source, its publisher, and subscribers to it; everything ends with the test."""

    def __init__(self, place: Path, stack: ExitStack) -> None:
        self.stack = stack
        self.endpoint, self.replay = f"ipc://{place}/pub", f"ipc://{place}/replay"
        self.source = Blocks()

    def publish(self, **options: Any) -> Publisher:
        publisher = Publisher(self.source, self.endpoint, replay_endpoint=self.replay, **options)
        self.stack.callback(publisher.close)
        return publisher

    def follow(self, *, replay: bool = True, **options: Any) -> tuple[Subscriber, View]:
        view = View()
        options.setdefault("quiet_seconds", 0.3)
        where = self.replay if replay else None
        subscriber = Subscriber(self.endpoint, view, replay_endpoint=where, **options)
        self.stack.callback(subscriber.close)
        return subscriber, view

    def reaches(self, view: View) -> None:
        until(lambda: view.hashes() == set(self.source.held))


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    with ExitStack() as stack:
        yield Line(tmp_path, stack)


def replayed(endpoint: str, start: int) -> list[tuple[bytes, int, list[BlockEvent]]]:
    """As a client of vLLM's asks: a REQ-like envelope, an empty frame, the number."""
    with zmq.Context.instance().socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(endpoint)
        asking.send_multipart([b"", start.to_bytes(8, "big")])
        found = []
        while asking.poll(1000 * PATIENCE):
            empty, topic, number, payload = asking.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                assert (topic, payload) == (b"", b"")
                return found
            found.append((topic, int.from_bytes(number, "big"), decode_batch(payload).events))
    raise AssertionError("no end of the replay")


def test_what_is_published_arrives_in_order_with_topic_and_number(line: Line) -> None:
    line.publish(topic="kv@a")
    with zmq.Context.instance().socket(zmq.SUB) as sub:
        sub.connect(line.endpoint)
        sub.subscribe(b"kv@")
        # What is published before the subscription is there does not come.
        while not sub.poll(20):
            line.source.store(len(line.source.held))
        for _ in range(3):
            line.source.store(len(line.source.held))
        stored, heard = len(line.source.held), []
        while stored - 1 not in heard:
            assert sub.poll(1000 * PATIENCE)
            topic, sequence, payload = sub.recv_multipart()
            heard.append(int.from_bytes(sequence, "big"))
            batch = decode_batch(payload)
            assert (topic, [event.block_hashes for event in batch.events]) == (b"kv@a", [[heard[-1]]])
            assert abs(batch.time - time.time()) < 600
        assert heard == list(range(heard[0], stored))


def test_replay_from_any_number_ends_with_its_mark(line: Line) -> None:
    publisher = line.publish(topic="t")
    assert replayed(publisher.replay_endpoint, 0) == []
    for one in range(4):
        line.source.store(one)
    until(lambda: len(replayed(line.replay, 0)) == 4)
    assert [(topic, number, events[0].block_hashes) for topic, number, events in replayed(line.replay, 2)] == [
        (b"t", 2, [2]),
        (b"t", 3, [3]),
    ]
    assert replayed(line.replay, 4) == []


def test_what_is_not_kept_any_more_is_replaced_by_all_there_is(line: Line) -> None:
    registry = CollectorRegistry()
    line.publish(buffer_bytes=600, registry=registry)
    for one in range(20):
        line.source.store(one)
    line.source.remove(3)
    until(lambda: registry.get_sample_value("kvtier_events_messages_total") == 21)
    [(_, number, events)] = replayed(line.replay, 0)
    assert number == 20
    assert events[0] == BlocksCleared()
    assert {event.block_hashes[0] for event in events[1:]} == set(line.source.held)
    assert [number for _, number, _ in replayed(line.replay, 20)] == [20], "and what is kept, as it was"
    assert [number for _, number, _ in replayed(line.replay, 77)] == [20], "a number of an earlier publisher"
    assert registry.get_sample_value("kvtier_events_snapshots_total") == 2


def test_nonsense_on_the_replay_socket_does_no_harm(line: Line) -> None:
    line.publish()
    line.source.store(1)
    with zmq.Context.instance().socket(zmq.DEALER) as asking:
        asking.connect(line.replay)
        asking.send_multipart([b"", b"12345"])
        asking.send(b"")
    until(lambda: len(replayed(line.replay, 0)) == 1)


def test_a_subscriber_that_comes_late_has_all(line: Line) -> None:
    line.publish()
    for one in range(5):
        line.source.store(one)
    line.source.remove(2)
    subscriber, view = line.follow()
    line.reaches(view)
    line.source.store(9)
    line.reaches(view)
    assert (subscriber.counts.gaps, subscriber.counts.failures, view.resets) == (0, 0, 0)
    until(lambda: subscriber.connected)
    subscriber.close()
    assert not subscriber.connected, "and nobody takes its view for a followed one"


def test_a_subscriber_may_come_before_the_publisher(line: Line) -> None:
    _, view = line.follow()
    line.source.store(1)
    line.publish()
    line.reaches(view)


@pytest.mark.parametrize("kept", [64 << 20, 20_000])
def test_a_slow_subscriber_loses_messages_sees_it_and_ends_up_right(line: Line, kept: int) -> None:
    registry = CollectorRegistry()
    line.publish(queue=10, buffer_bytes=kept, registry=registry)
    subscriber, view = line.follow(queue=10)
    # A replay may bring the first ones: only what comes by itself shows that the subscription is there.
    while subscriber._live is None:
        line.source.store(-len(line.source.held))
        line.reaches(view)
    sent = len(line.source.held)
    for turn in range(10):
        view.gate.clear()
        for one in range(1 + 4000 * turn, 4001 + 4000 * turn):
            line.source.store(one)
            if one % 2 == 0:
                line.source.remove(one - 1)
        sent += 6000
        until(lambda sent=sent: registry.get_sample_value("kvtier_events_messages_total") == sent)
        view.gate.set()
        line.reaches(view)
        # A busy machine may publish so slowly that the kernel's buffers keep up with it.
        if subscriber.counts.gaps:
            break
    assert subscriber.counts.gaps >= 1, "nothing was lost: the test shows nothing"
    snapshots = registry.get_sample_value("kvtier_events_snapshots_total")
    assert (view.resets > 0) == (snapshots > 0) == (kept == 20_000)
    assert subscriber.counts.resyncs == view.resets


def test_lost_last_messages_are_asked_for_when_it_is_quiet(line: Line) -> None:
    line.publish(queue=1)
    subscriber, view = line.follow(queue=1, quiet_seconds=0.2)
    line.source.store(0)
    line.reaches(view)
    view.gate.clear()
    for one in range(2000):
        line.source.store(one)
    time.sleep(0.2)
    view.gate.set()
    line.reaches(view)
    assert subscriber.counts.messages >= 2000


def test_another_publisher_at_the_same_place_is_noticed(line: Line) -> None:
    first = line.publish()
    for one in range(8):
        line.source.store(one)
    _, view = line.follow()
    line.reaches(view)
    first.close()
    line.source = Blocks()
    line.publish()
    for one in range(100, 120):
        # More messages than before: the next number alone would not tell.
        line.source.store(one)
    line.reaches(view)
    assert view.resets >= 1


def test_without_replay_a_gap_drops_the_view_and_goes_on(line: Line) -> None:
    registry = CollectorRegistry()
    line.publish(queue=1, registry=registry)
    subscriber, view = line.follow(replay=False, queue=1)
    # What is published before the subscription is there does not come.
    while subscriber._live is None:
        line.source.store(-1 - len(line.source.held))
        came_true(lambda: subscriber._live is not None, 0.02)
    line.source.store(0)
    until(lambda: 0 in view.hashes())
    sent = len(line.source.held)
    view.gate.clear()
    for one in range(1, 3001):
        line.source.store(one)
    until(lambda: registry.get_sample_value("kvtier_events_messages_total") == sent + 3000)
    view.gate.set()
    # Those that come while messages still wait in full queues are lost, too.
    late = itertools.count(5000)
    until(lambda: (line.source.store(next(late)), max(view.hashes(), default=0) >= 5000)[-1])
    assert subscriber.counts.gaps >= 1
    assert view.resets == subscriber.counts.resyncs >= 1
    assert 0 not in view.hashes(), "what might be gone is not claimed"


def test_a_message_that_cannot_be_read_is_counted_and_replayed(line: Line) -> None:
    line.publish()
    subscriber, view = line.follow()
    line.source.store(1)
    line.reaches(view)
    line.source.changes.append("nonsense")
    line.source.store(2)
    line.reaches(view)
    until(lambda: subscriber.counts.malformed >= 1)


def test_endpoints_that_cannot_be(line: Line) -> None:
    with pytest.raises(ConfigError, match=r"'tcp://nonsense'.*expected one to bind"):
        Publisher(Blocks(), "tcp://nonsense")
    with pytest.raises(ConfigError, match="'udp:/x'"):
        Publisher(Blocks(), line.endpoint, replay_endpoint="udp:/x")
    with pytest.raises(ConfigError, match="'nowhere'"):
        Subscriber("nowhere", View())
    with pytest.raises(ConfigError, match="replay 'nowhere'"):
        Subscriber(line.endpoint, View(), replay_endpoint="nowhere")


def test_nobody_waits_for_a_publisher(line: Line) -> None:
    publisher = line.publish()
    publisher.close()
    began = time.monotonic()
    for one in range(1000):
        line.source.store(one)
    assert time.monotonic() - began < 20
    publisher.close()
