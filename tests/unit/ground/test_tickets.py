"""Tickets and completions, checksums, deadlines, and the metrics' names."""

import threading
import time

import pytest
import xxhash
from prometheus_client import generate_latest

from kvtier.errors import TierTimeout
from kvtier.keys import namespace_index
from kvtier.metrics import Metrics
from kvtier.tiers import BlockRef, Completions, Status, Ticket, block_checksum, expired


def test_a_ticket_is_waited_for_from_another_thread() -> None:
    ticket = Ticket()
    assert ticket.done is None
    with pytest.raises(TierTimeout, match=r"0\.01 s"):
        ticket.wait(0.01)
    got = []
    waiter = threading.Thread(target=lambda: got.append(ticket.wait(10)))
    waiter.start()
    ticket.finish([Status.OK, Status.MISS])
    waiter.join()
    assert got[0].statuses == (Status.OK, Status.MISS)
    assert got[0].handles == ()
    assert got[0].ticket is ticket
    assert ticket.done is not None
    assert ticket.done.statuses == got[0].statuses


def test_completions_come_in_order_once_and_only_for_kept_tickets() -> None:
    completions = Completions()
    kept = [Ticket() for _ in range(3)]
    completions.finish(kept[1], [Status.OK])
    completions.finish(Ticket(), [Status.FULL])
    completions.finish(kept[0], [Status.MISS])
    assert [done.ticket for done in completions.poll()] == [kept[1], kept[0]]
    assert completions.poll() == []
    completions.finish(kept[2], [])
    assert [done.ticket for done in completions.poll()] == [kept[2]]


def test_completions_that_nobody_polls_do_not_pile_up() -> None:
    completions = Completions()
    kept = [Ticket() for _ in range(100)]
    for ticket in kept:
        completions.finish(ticket, [Status.OK])
        for _ in range(100):
            completions.finish(Ticket(), [Status.OK])
    assert len(completions._finished) <= 3 * len(kept)
    assert [done.ticket for done in completions.poll()] == kept
    assert completions.poll() == []
    for _ in range(1000):
        completions.finish(Ticket(), [Status.OK])
    assert len(completions._finished) <= 3 * len(kept)


def test_checksum_covers_key_namespace_format_and_bytes() -> None:
    digests = [b"n" * 32, b"m" * 32]
    ns, other = map(namespace_index, digests)
    ref = BlockRef(b"k" * 16, ns, 3, None, exact=True)
    expected = xxhash.xxh3_128(b"k" * 16 + digests[0] + b"raw" + bytes(13) + b"data").digest()
    assert block_checksum(ref, "raw", b"data") == expected
    changed = [
        block_checksum(ref._replace(key=b"K" * 16), "raw", b"data"),
        block_checksum(ref._replace(ns=other), "raw", b"data"),
        block_checksum(ref, "int8", b"data"),
        block_checksum(ref, "raw", b"dat1"),
    ]
    assert len({expected, *changed}) == 5
    assert block_checksum(ref._replace(depth=9, exact=False), "raw", memoryview(b"data")) == expected


def test_deadlines() -> None:
    assert not expired(None)
    assert expired(time.monotonic())
    assert not expired(time.monotonic() + 60)


def test_stores_in_one_process_keep_their_metrics_apart() -> None:
    one, two = Metrics(), Metrics()
    one.read_bytes.labels("nvme").inc(5)
    assert one.registry.get_sample_value("kvtier_read_bytes_total", {"tier": "nvme"}) == 5
    assert two.registry.get_sample_value("kvtier_read_bytes_total", {"tier": "nvme"}) is None
    assert b'kvtier_read_bytes_total{tier="nvme"} 5.0' in generate_latest(one.registry)
