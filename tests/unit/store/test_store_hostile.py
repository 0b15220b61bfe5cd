"""Bad times, keys, formats and records: refused before anything changes, or a miss; nothing hangs or piles up."""

import contextlib
import math
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_world import BLOCK, NS, ExtentTier, content, fetched, held, items, key, keys, memory_tier, nothing_is_held

from kvtier import formats
from kvtier.cpu import HostTier
from kvtier.errors import ConfigError, FormatMismatch, RequestError
from kvtier.formats import catalog
from kvtier.formats.bitsplit import BitsplitFormat
from kvtier.hints import Hint
from kvtier.keys import namespace_index
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.store import StoreOptions, TieredStore
from kvtier.store.lanes import Alarm
from kvtier.store.sessions import SessionBook
from kvtier.testing import Fault, FaultyTier, Kind
from kvtier.tiers import BlockRef

LAYOUT = Layout(4, (LayerGroup(GroupKind.GQA, (0,), 2, 2, 64),))


@pytest.fixture
def below() -> FaultyTier:
    return FaultyTier(memory_tier(64))


@pytest.fixture
def store(below: FaultyTier) -> Iterator[TieredStore]:
    store = TieredStore(HostTier(32 * BLOCK), [below], options=StoreOptions(breaker_timeouts=2))
    with contextlib.closing(store):
        yield store
        store.flush()
        assert nothing_is_held(store)


def settle_alarm(store: TieredStore) -> None:
    """Return once the store's alarm has looked at everything it was given."""
    rung = threading.Event()
    store._deadlines.after(0.0, rung.set)
    assert rung.wait(10)


@pytest.mark.parametrize("far", [math.inf, 1e12, 1e300])
def test_what_never_ends_does_not_end_the_alarm(store: TieredStore, far: float) -> None:
    store.put(items("a", 4)).result(10)
    assert store.pin(keys("a", 4), "pinner", ttl=far) == 4
    lease = store.acquire(keys("a", 4), "test", deadline=far).result(10)
    assert store.fetch(lease, 0, 4, deadline=far).result(10) == 4
    store.release(lease)
    assert store.prefetch(keys("a", 4), "test", deadline=far).result(10) == (4, None)
    settle_alarm(store)
    settle_alarm(store)
    store.unpin("pinner")


def test_times_that_are_none_are_refused_and_leave_nothing(store: TieredStore) -> None:
    store.put(items("a", 4)).result(10)
    lease = store.acquire(keys("a", 4), "test").result(10)
    for call in (
        lambda: store.acquire(keys("a", 4), "x", deadline=math.nan),
        lambda: store.prefetch(keys("a", 4), "x", deadline=math.nan),
        lambda: store.fetch(lease, 0, 4, deadline=math.nan),
        lambda: store.pin(keys("a", 4), "x", ttl=math.nan),
        lambda: store.pin(keys("a", 4), "x", ttl=-1.0),
    ):
        with pytest.raises(RequestError, match=r"expected .*seconds"):
            call()
    store.release(lease)
    for seconds in (math.inf, 1e300, math.nan):
        with pytest.raises(ConfigError, match="load_deadline"):
            StoreOptions(load_deadline=seconds)


def test_deadlines_that_nobody_could_meet_do_not_make_a_tier_a_bad_one(store: TieredStore, below: FaultyTier) -> None:
    store.put(items("a", 4)).result(10)
    store.flush()
    store.clear("host")
    for number in range(8):
        past = time.monotonic() - number
        assert len(store.acquire(keys("a", 4), "test", deadline=past).result(10)) == 0
        lease = store.acquire(keys("a", 4), "test").result(10)
        store.fetch(lease, 0, 4, deadline=past).result(10)
        store.release(lease)
    settle_alarm(store)
    assert store.metrics.value("breaker_trips_total", tier=below.name) == 0
    assert fetched(store, keys("a", 4)) == 4


def test_the_alarm_forgets_what_was_done_long_before_its_deadline() -> None:
    alarm = Alarm()

    class Work:
        """Gone as soon as nobody wants it."""

    kept = Work()
    alarm.at(time.monotonic() + 1e6, lambda: None, weakref.ref(kept))
    for _ in range(20_000):
        alarm.at(time.monotonic() + 1e6, lambda: None, weakref.ref(Work()))
    assert len(alarm._calls) < 100
    assert any(call[3]() is kept for call in alarm._calls)
    alarm.close()


def test_prefetches_that_are_over_do_not_pile_up_before_their_deadline(store: TieredStore) -> None:
    store.put(items("a", 1)).result(10)
    kept = []
    for _ in range(500):
        kept.append(store.prefetch(keys("a", 1), "test", deadline=time.monotonic() + 1e6))
        assert kept[-1].result(10).blocks == 1
    assert len(store._deadlines._alarm._calls) < 200


def test_pins_that_were_ended_early_do_not_pile_up_either(store: TieredStore) -> None:
    store.put(items("a", 1)).result(10)
    assert store.pin(keys("a", 1), "stays", ttl=1e6) == 1
    for number in range(5000):
        store.pin(keys("a", 1), str(number), ttl=1e6)
        store.unpin(str(number))
    assert len(store._deadlines._alarm._calls) < 100
    assert store.stats()["store"]["pins"] == 1
    store.unpin("stays")


class _Picky(BitsplitFormat):
    """Its size depends on the data, and some data it refuses."""

    id = sink = "picky"

    def encode(self, src: memoryview, layout: Layout, out: memoryview, group: int = 0) -> int:
        if src[0] == 0xFF:
            raise FormatMismatch("picky: a block that begins with 255; store it as raw")
        return super().encode(src, layout, out, group)


def test_one_block_that_cannot_be_encoded_takes_its_descendants_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(catalog._formats, "picky", _Picky())
    nbytes, below = LAYOUT.block_bytes(), ExtentTier(64 * BLOCK, name="below")
    batch = [(ref, memoryview(bytes(nbytes))) for ref, _ in items("a", 6) + items("b", 3)]
    batch[3] = (batch[3][0], memoryview(b"\xff" + bytes(nbytes - 1)))
    options = StoreOptions(formats={"below": "picky"})
    with contextlib.closing(TieredStore(HostTier(32 * BLOCK), [below], options=options)) as store:
        store.register(NS, LAYOUT)
        assert store.put(batch).result(10).stored == 9
        store.flush()
        assert held(below, keys("a", 6) + keys("b", 3)) == [True] * 3 + [False] * 3 + [True] * 3
        assert store.metrics.value("dropped_blocks_total", tier="below", reason="unencodable") == 3
        assert store.metrics.value("errors_total", tier="below", operation="demote") == 0


def test_one_session_alone_is_bounded_too() -> None:
    book = SessionBook(limit=10)
    for number in range(1000):
        book.note([b"%d" % number], [Hint(session="always the same")])
    assert len(book.keys("always the same")) <= 10
    assert len(book._owner) <= 10


def test_no_record_names_code_to_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    ns = namespace_index(b"hostile".ljust(32))
    below = memory_tier(16)
    ref = BlockRef(key("evil", 0), ns, 0, None, exact=True)
    nbytes = LAYOUT.block_bytes()
    slots = below.reserve([ref], [nbytes], ["hostile:Format"], "writer")
    below.write([(slots[0], memoryview(bytes(nbytes)))]).wait()
    below.commit(slots)
    assert formats.stored("hostile:Format") is None
    assert formats.stored("raw") is formats.get("raw")
    with contextlib.closing(TieredStore(HostTier(32 * BLOCK), [below])) as store:
        store.register(ns, LAYOUT)
        lease = store.acquire([ref.key], "test").result(10)
        assert store.fetch(lease, 0, len(lease)).result(10) == 0
        store.release(lease)
    assert "hostile" not in sys.modules


def test_a_hole_on_disk_is_saved_again(tmp_path: Path) -> None:
    nvme = NvmeTier(tmp_path / "nvme", 1 << 20, NvmeOptions(min_free_bytes=0))
    with contextlib.closing(TieredStore(HostTier(32 * BLOCK), [nvme])) as store:
        store.put(items("a", 5)).result(10)
        store.flush()
        store.clear("host")
        store.delete([key("a", 2)])
        assert store.wanted(keys("a", 5), exact=True) == 2
        assert store.put(items("a", 5, start=2)).result(10).stored == 3
        assert store.wanted(keys("a", 5), exact=True) == 5
        assert fetched(store, keys("a", 5)) == 5


def test_two_versions_of_a_block_in_one_batch(store: TieredStore) -> None:
    lossy, exact = items("a", 1, exact_below=0), items("a", 1)
    assert store.put(lossy + exact + lossy).result(10) == (1, 2, 0)
    assert fetched(store, keys("a", 1)) == 1
    store.host.check()


def test_a_namespace_that_nobody_gave_out_is_refused(store: TieredStore) -> None:
    (ref, data) = items("a", 1)[0]
    for ns in (-1, 1 << 40):
        with pytest.raises(FormatMismatch, match="namespace"):
            store.put([(ref._replace(ns=ns), data)])


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": b"short"},
        {"key": "x" * 16},
        {"parent": b"short"},
        {"parent": "x" * 16},
        {"depth": -2},
        {"depth": 1 << 31},
    ],
    ids=str,
)
def test_a_block_without_a_proper_name_is_refused_with_its_batch(store: TieredStore, wrong: dict[str, object]) -> None:
    batch = items("a", 3)
    batch[2] = (batch[2][0]._replace(**wrong), batch[2][1])
    with pytest.raises(FormatMismatch, match="expected"):
        store.put(batch)
    assert store.match(keys("a", 3)).tiers == ()


def test_all_parts_of_a_block_or_none_while_another_brings_one_of_them(store: TieredStore, below: FaultyTier) -> None:
    """A part that is being promoted shifts nobody's blocks: what falls, falls with its own siblings."""
    first = items("a", 1, parts=2)
    store.put(first[:1]).result(10)
    store.flush()
    store.clear("host")
    lease = store.acquire([key("a", 0, 0)], "test").result(10)
    below.inject(Fault("read", Kind.HANG))
    coming = store.fetch(lease, 0, 1)
    while not store._remover._inflight._going:
        time.sleep(0.001)
    # Part 1 of block 1 is larger than the tier: block 1 falls, block 0 does not.
    ref = BlockRef(key("a", 1, 1), NS, 1, key("a", 0, 1), exact=True)
    second = [items("a", 2, parts=2, start=1)[0], (ref, memoryview(bytes(64 * BLOCK)))]
    assert store.put(first + second, parts=2).result(10) == (1, 0, 1)
    below.heal()
    assert coming.result(10) == 1
    store.release(lease)
    assert held(store.host, keys("a", 2, parts=2)) == [True, True, False, False]
    assert bytes(content(key("a", 0, 1))) == bytes(first[1][1])
