"""Blocks that are to go while they are read, and a server that is away when they could."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from objects_world import objects_in
from patience import until

from kvtier.config.remote import RemoteSettings
from kvtier.errors import TierUnavailable
from kvtier.metrics import Metrics
from kvtier.remote import open_remote, removals
from kvtier.testing.blocks import chain_refs, load, put
from kvtier.tiers import Status

REFS = chain_refs(2)
KEYS = [ref.key for ref in REFS]


class World:
    """A tier over a directory, from which nothing can be removed while it is `away`."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack) -> None:
        settings = RemoteSettings(url=directory.as_uri(), options="run=1", absent_ttl=0)
        self.metrics = Metrics()
        self.tier = stack.enter_context(contextlib.closing(open_remote(settings, self.metrics)))
        self.away = False
        remove = self.tier._backend.remove

        def perhaps(names: list[bytes], deadline: float) -> list[bool]:
            if self.away:
                raise TierUnavailable("away")
            return remove(names, deadline)

        monkeypatch.setattr(self.tier._backend, "remove", perhaps)

    def delete_while_read(self) -> None:
        """What is removed while it is leased, by a server that is away when the lease ends."""
        put(self.tier, REFS, 4096)
        leased = self.tier.acquire(KEYS, "reader").wait(30).handles
        assert self.tier.remove(KEYS).wait(30).statuses == (Status.OK,) * 2
        self.away = True
        self.tier.release(leased)
        self.tier.flush()
        assert self.metrics.value("errors_total", tier="remote", operation="remove") >= 1

    def seen(self) -> list[bool]:
        """Which of them the process sees."""
        return [status is Status.OK for status in self.tier.contains(KEYS).wait(30).statuses]

    def left(self) -> int:
        """How many are in the directory."""
        return len(objects_in(self.tier))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    with contextlib.ExitStack() as stack:

        def make(pause: float = 3600.0) -> World:
            monkeypatch.setattr(removals, "_FIRST_PAUSE", pause)
            return World(tmp_path, monkeypatch, stack)

        yield make


def test_stay_out_of_sight_and_go_with_the_next_flush(world: Callable[..., World]) -> None:
    one = world()
    one.delete_while_read()
    assert (one.seen(), one.left()) == ([False] * 2, 2)
    assert load(one.tier, KEYS) == [(Status.MISS, b"")] * 2
    one.away = False
    one.tier.flush()
    assert one.left() == 0


def test_go_by_themselves_when_the_server_is_back(world: Callable[..., World]) -> None:
    one = world(pause=0.02)
    one.delete_while_read()
    failed = one.metrics.value("errors_total", tier="remote", operation="remove")
    until(lambda: one.metrics.value("errors_total", tier="remote", operation="remove") > failed)
    assert one.seen() == [False] * 2
    one.away = False
    until(lambda: one.left() == 0)


def test_go_when_they_are_deleted_again(world: Callable[..., World]) -> None:
    one = world()
    one.delete_while_read()
    with pytest.raises(TierUnavailable, match="away"):
        one.tier.remove(KEYS)
    assert one.seen() == [False] * 2, "what was out of sight stays so"
    one.away = False
    assert one.tier.remove(KEYS).wait(30).statuses == (Status.MISS,) * 2, "nobody here saw them"
    assert one.left() == 0


def test_stay_when_they_are_written_again(world: Callable[..., World]) -> None:
    one = world()
    one.delete_while_read()
    put(one.tier, REFS[:1], 4096)
    one.away = False
    one.tier.flush()
    assert (one.seen(), one.left()) == ([True, False], 1)


def test_are_no_more_than_memory_is_given_to(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals, "_MOST_OWED", 1)
    one = world()
    one.delete_while_read()
    assert sorted(one.seen()) == [False, True]


def test_are_told_when_the_tier_is_closed(world: Callable[..., World], caplog: pytest.LogCaptureFixture) -> None:
    one = world()
    one.delete_while_read()
    one.tier.close()
    assert "2 records that were to be removed may still be there" in caplog.text
