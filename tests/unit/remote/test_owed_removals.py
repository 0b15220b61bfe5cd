"""Blocks that are to go while they are read, and a server that is away when they could."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from patience import until

from kvtier.config.remote import RemoteSettings
from kvtier.errors import TierUnavailable
from kvtier.metrics import Metrics
from kvtier.remote import RemoteTier, open_remote, removals
from kvtier.testing.blocks import chain_refs, load, put
from kvtier.tiers import BlockRef, Status

REFS = chain_refs(2)
KEYS = [ref.key for ref in REFS]


class World:
    """Two processes' tiers over one directory, as far as tiers can tell."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack) -> None:
        settings = RemoteSettings(url=directory.as_uri(), options="run=1", absent_ttl=0)
        self.metrics = Metrics()
        self.tier = stack.enter_context(contextlib.closing(open_remote(settings, self.metrics)))
        self.other = stack.enter_context(contextlib.closing(open_remote(settings)))
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


def there(tier: RemoteTier, refs: list[BlockRef] = REFS) -> list[bool]:
    return [status is Status.OK for status in tier.contains([ref.key for ref in refs]).wait(30).statuses]


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
    assert (there(one.tier), there(one.other)) == ([False] * 2, [True] * 2)
    assert load(one.tier, KEYS) == [(Status.MISS, b"")] * 2
    one.away = False
    one.tier.flush()
    assert there(one.other) == [False] * 2


def test_go_by_themselves_when_the_server_is_back(world: Callable[..., World]) -> None:
    one = world(pause=0.02)
    one.delete_while_read()
    failed = one.metrics.value("errors_total", tier="remote", operation="remove")
    until(lambda: one.metrics.value("errors_total", tier="remote", operation="remove") > failed)
    assert there(one.tier) == [False] * 2
    one.away = False
    until(lambda: there(one.other) == [False] * 2)


def test_go_when_they_are_deleted_again(world: Callable[..., World]) -> None:
    one = world()
    one.delete_while_read()
    with pytest.raises(TierUnavailable, match="away"):
        one.tier.remove(KEYS)
    assert there(one.tier) == [False] * 2, "what was out of sight stays so"
    one.away = False
    assert one.tier.remove(KEYS).wait(30).statuses == (Status.MISS,) * 2, "nobody here saw them"
    assert there(one.other) == [False] * 2


def test_stay_when_they_are_written_again(world: Callable[..., World]) -> None:
    one = world()
    one.delete_while_read()
    put(one.tier, REFS[:1], 4096)
    one.away = False
    one.tier.flush()
    assert (there(one.tier), there(one.other)) == ([True, False], [True, False])


def test_are_no_more_than_memory_is_given_to(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals, "_MOST_OWED", 1)
    one = world()
    one.delete_while_read()
    assert sorted(there(one.tier)) == [False, True]


def test_are_told_when_the_tier_is_closed(world: Callable[..., World], caplog: pytest.LogCaptureFixture) -> None:
    one = world()
    one.delete_while_read()
    one.tier.close()
    assert "2 records that were to be removed may still be there" in caplog.text
