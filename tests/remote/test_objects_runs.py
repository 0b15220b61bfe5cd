"""What runs of blocks in an object store are: whole, found by their last block, read by range, and never wrong."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import obstore
import pytest
from objects_world import S3Server, content_of, flip, objects_in, path_of, replace, take_away

from kvtier.config.remote import RemoteSettings
from kvtier.metrics import Metrics
from kvtier.remote import RemoteTier, open_remote, record_name
from kvtier.remote.objects.packing import table_bytes
from kvtier.testing.blocks import chain_refs, content, load, put, run_length
from kvtier.tiers import BlockRef, Exists, Full, Handle, Status

RUN = 4
BLOCK = 5000
WAIT = 30

Open = Callable[..., RemoteTier]

_folders = count()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.kill()


@pytest.fixture(params=["directory", "s3"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteSettings:
    if request.param == "directory":
        return RemoteSettings(url=tmp_path.as_uri(), options=f"run={RUN}")
    server: S3Server = request.getfixturevalue("server")
    return server.settings(f"runs-{next(_folders)}", RUN, timeout=30)


@pytest.fixture
def opened(settings: RemoteSettings) -> Iterator[Open]:
    """Opens tiers on one store, each as another process would."""
    with contextlib.ExitStack() as stack:

        def open_tier(metrics: Metrics | None = None, **more: object) -> RemoteTier:
            return stack.enter_context(contextlib.closing(open_remote(settings.model_copy(update=more), metrics)))

        yield open_tier


@pytest.fixture
def tier(opened: Open) -> RemoteTier:
    return opened()


def name(ref: BlockRef) -> bytes:
    return record_name(ref.key, exact=ref.exact)


def keys(refs: Sequence[BlockRef]) -> list[bytes]:
    return [ref.key for ref in refs]


def statuses(tier: RemoteTier, refs: Sequence[BlockRef]) -> list[Status]:
    """Of loading these; what is OK has the right bytes."""
    found = load(tier, keys(refs))
    good = [(ref, data) for ref, (status, data) in zip(refs, found, strict=True) if status is Status.OK]
    assert all(data == content(ref, BLOCK) for ref, data in good)
    return [status for status, _ in found]


def met(tier: RemoteTier, reason: str) -> float:
    return tier._state.counts.metrics.value("remote_outcomes_total", tier="remote", reason=reason)


def write(tier: RemoteTier, refs: Sequence[BlockRef], bytes_of: Callable[[BlockRef], memoryview]) -> list[Handle]:
    """Reserve and write, without a commit."""
    slots = tier.reserve(refs, [BLOCK] * len(refs), ["raw"] * len(refs), "writer")
    good = tier.write([(slot, bytes_of(slot.ref)) for slot in slots]).wait(WAIT).statuses
    assert good == (Status.OK,) * len(refs)
    return slots


def branch(refs: Sequence[BlockRef], at: int, seed: int) -> list[BlockRef]:
    """A chain that has its first `at` blocks in common with another one."""
    other = chain_refs(len(refs), seed=seed)
    return [*refs[:at], other[at]._replace(parent=refs[at - 1].key), *other[at + 1 :]]


# ---- whole runs


def test_a_run_is_one_object_named_by_its_last_block(tier: RemoteTier) -> None:
    refs = chain_refs(8)
    put(tier, refs, BLOCK)
    assert objects_in(tier) == sorted(path_of(tier, name(refs[at])) for at in (3, 7))
    assert len(content_of(tier, name(refs[3]))) == table_bytes(RUN) + RUN * BLOCK
    assert statuses(tier, refs) == [Status.OK] * 8
    assert tier.stats()["blocks"] == 8
    assert tier.stats()["bytes"] == 8 * BLOCK


def test_another_process_knows_a_run_by_its_last_key_only(tier: RemoteTier, opened: Open) -> None:
    refs = chain_refs(8)
    put(tier, refs, BLOCK)
    other = opened()
    found = other.contains(keys(refs)).wait(WAIT).statuses
    assert [status is Status.OK for status in found] == [at % RUN == RUN - 1 for at in range(8)]
    # Once it has seen a run, it knows all of it.
    assert statuses(other, refs[:4]) == [Status.OK] * 4
    other = opened(absent_ttl=0)
    assert statuses(other, refs[:4]) == [Status.OK] * 4
    assert other.contains(keys(refs[:4])).wait(WAIT).statuses == (Status.OK,) * 4


def test_runs_of_one_block(opened: Open, settings: RemoteSettings) -> None:
    options = settings.options.replace(f"run={RUN}", "run=1")
    refs = chain_refs(3)
    writer, reader = opened(options=options), opened(options=options)
    put(writer, refs, BLOCK)
    assert objects_in(writer) == sorted(path_of(writer, name(ref)) for ref in refs)
    assert statuses(reader, refs) == [Status.OK] * 3
    assert statuses(reader, refs[1:2]) == [Status.OK]
    assert opened(options=options).reserve(refs, [BLOCK] * 3, ["raw"] * 3, "w") == [Exists(ready=True)] * 3
    other = opened(options=options)
    assert other.remove([refs[1].key]).wait(WAIT).statuses == (Status.OK,)
    assert statuses(other, refs) == [Status.OK, Status.MISS, Status.MISS]


def test_what_is_no_whole_run_is_refused(tier: RemoteTier) -> None:
    refs = chain_refs(8)
    for part in (refs[:3], refs[1:5], refs[:6]):
        results = put(tier, part, BLOCK)
        refused = results[len(part) // RUN * RUN if part[0].depth == 0 else 0 :]
        assert refused
        assert all(result == Full("incomplete_run") for result in refused)
    assert objects_in(tier) == [path_of(tier, name(refs[3]))]
    assert tier.stats()["reservations"] == 0


def test_the_rest_of_a_run_is_read_by_range(tier: RemoteTier, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = chain_refs(12)
    put(tier, refs, BLOCK)
    other = opened()
    ranges = []
    get = obstore.get_async

    def counted(store: object, path: str, *, options: dict) -> object:
        ranges.append(options["range"])
        return get(store, path, options=options)

    monkeypatch.setattr(obstore, "get_async", counted)
    assert statuses(other, refs[6:12]) == [Status.OK] * 6
    start = table_bytes(RUN)
    # Who takes lossy blocks, too, asks for both.
    tables = [(0, start)] * 4
    assert sorted(ranges) == sorted([*tables, (start + 2 * BLOCK, start + 4 * BLOCK), (start, start + 4 * BLOCK)])


def test_no_run_is_torn_where_many_bytes_move(tier: RemoteTier, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are moved in windows of 4 MiB; a run of 6 MiB is one."""
    size, refs = 3 << 19, chain_refs(8)
    put(tier, refs, size)
    assert len(objects_in(tier)) == 2
    other = opened()
    whole = []
    get = other._backend.get
    monkeypatch.setattr(other._backend, "get", lambda items, limit: whole.append(len(items)) or get(items, limit))
    found = load(other, keys(refs[1:]))
    assert all(data == content(ref, size) for ref, (_, data) in zip(refs[1:], found, strict=True))
    assert sorted(whole) == [3, 4]


def test_a_missing_run_ends_what_is_found(tier: RemoteTier) -> None:
    refs = chain_refs(12)
    put(tier, refs, BLOCK)
    take_away(tier, name(refs[7]))
    time.sleep(0.6)
    assert statuses(tier, refs) == [Status.OK] * 4 + [Status.MISS] * 8


def test_another_length_of_runs_is_another_store(opened: Open, settings: RemoteSettings) -> None:
    refs = chain_refs(8)
    put(opened(), refs, BLOCK)
    other = opened(options=settings.options.replace(f"run={RUN}", "run=2"))
    assert set(statuses(other, refs)) == {Status.MISS}
    put(other, refs, BLOCK)
    assert statuses(other, refs[:6]) == [Status.OK] * 6


@pytest.mark.parametrize("settings", ["directory"], indirect=True)
def test_long_chains(tier: RemoteTier, opened: Open) -> None:
    refs = chain_refs(700)
    results = tier.reserve(refs, [8] * 700, ["raw"] * 700, "writer")
    assert tier.write([(slot, content(slot.ref, 8)) for slot in results]).wait(60).statuses == (Status.OK,) * 700
    tier.commit(results)
    other = opened()
    done = other.acquire(keys(refs[3:]), "reader").wait(60)
    assert [handle.ref for handle in done.handles] == refs[3:]
    other.release(done.handles)
    assert len(other.acquire(keys(refs[1:692]), "reader").wait(60).handles) == 691
    other.release_owner("reader")
    assert other.stats()["leases"] == 0


# ---- several writers


def test_the_first_writer_of_a_run_wins(tier: RemoteTier, opened: Open) -> None:
    refs = chain_refs(RUN)
    other = opened()
    mine, theirs = (one.reserve(refs, [BLOCK] * RUN, ["raw"] * RUN, "writer") for one in (tier, other))
    assert all(isinstance(slot, Handle) for slot in (*mine, *theirs))
    assert tier.write([(slot, content(slot.ref, BLOCK)) for slot in mine]).wait(WAIT).statuses == (Status.OK,) * RUN
    before = content_of(tier, name(refs[3]))
    late = [(slot, memoryview(bytes(BLOCK))) for slot in theirs]
    assert other.write(late).wait(WAIT).statuses == (Status.OK,) * RUN
    tier.commit(mine)
    other.commit(theirs)
    assert content_of(tier, name(refs[3])) == before
    assert statuses(other, refs) == statuses(tier, refs) == [Status.OK] * RUN
    assert opened().reserve(refs, [BLOCK] * RUN, ["raw"] * RUN, "w") == [Exists(ready=True)] * RUN


def test_many_writers_and_readers(opened: Open) -> None:
    refs = chain_refs(8)
    tiers = [opened() for _ in range(4)]
    errors: list[BaseException] = []

    def work(tier: RemoteTier, number: int) -> None:
        try:
            for _ in range(4):
                put(tier, refs[: 4 + number % 2 * 4], BLOCK)
                assert Status.CORRUPT not in statuses(tier, refs)
        except BaseException as error:  # noqa: BLE001  a thread's top level
            errors.append(error)

    threads = [threading.Thread(target=work, args=(tier, number)) for number, tier in enumerate(tiers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    time.sleep(0.6)
    assert all(statuses(tier, refs) == [Status.OK] * 8 for tier in tiers)


def test_chains_that_part_within_a_run_each_have_their_own_version(tier: RemoteTier, opened: Open) -> None:
    """Blocks in common are in both objects, computed twice and not to the last bit the same."""
    one = chain_refs(RUN)
    two = branch(one, 3, seed=1)
    tier.commit(write(tier, one, lambda _: memoryview(b"1" * BLOCK)))
    tier.commit(write(tier, two, lambda _: memoryview(b"2" * BLOCK)))
    for reader in (tier, opened()):
        for refs, byte in ((one, b"1"), (two, b"2"), (one, b"1")):
            assert [data for _, data in load(reader, keys(refs))] == [byte * BLOCK] * RUN
        leased = reader.acquire(keys(one), "reader").wait(WAIT).handles
        reader.release(reader.acquire(keys(two), "other").wait(WAIT).handles)
        out = [(handle, memoryview(bytearray(BLOCK))) for handle in leased]
        assert reader.read(out).wait(WAIT).statuses == (Status.OK,) * RUN
        assert all(data == b"1" * BLOCK for _, data in out)
        reader.release(leased)


def test_removing_one_leaves_the_other_branch(tier: RemoteTier) -> None:
    one = chain_refs(RUN)
    two = branch(one, 3, seed=1)
    put(tier, one, BLOCK)
    tier.abort(write(tier, two, lambda ref: content(ref, BLOCK)))
    tier.flush()
    assert objects_in(tier) == [path_of(tier, name(one[3]))]
    assert statuses(tier, one) == [Status.OK] * RUN
    put(tier, two, BLOCK)
    assert tier.remove([two[3].key]).wait(WAIT).statuses == (Status.OK,)
    assert statuses(tier, one) == [Status.OK] * RUN
    # A block in common is in every object that has it.
    put(tier, two, BLOCK)
    assert tier.remove([one[0].key]).wait(WAIT).statuses == (Status.OK,)
    assert objects_in(tier) == []


def test_an_exact_run_makes_the_lossy_one_superfluous(tier: RemoteTier, opened: Open) -> None:
    lossy, exact = chain_refs(RUN, exact=False), chain_refs(RUN)
    put(tier, lossy, BLOCK)
    assert statuses(tier, lossy) == [Status.OK] * RUN
    assert set(tier.acquire(keys(exact), "reader", exact=True).wait(WAIT).statuses) == {Status.MISS}
    assert all(isinstance(result, Handle) for result in put(tier, exact, BLOCK))
    tier.flush()
    assert objects_in(tier) == [path_of(tier, name(exact[3]))]
    for reader in (tier, opened()):
        assert statuses(reader, exact) == [Status.OK] * RUN
        assert put(reader, lossy, BLOCK) == [Exists(ready=True)] * RUN


def test_clear_takes_the_runs_of_one_namespace(tier: RemoteTier, opened: Open) -> None:
    one, two = chain_refs(8, salt="one"), chain_refs(8, salt="two")
    put(tier, one, BLOCK)
    put(tier, two, BLOCK)
    other = opened()
    assert other.clear(one[0].ns).wait(WAIT).statuses == (Status.OK,)
    assert objects_in(tier) == sorted(path_of(tier, name(two[at])) for at in (3, 7))
    assert statuses(other, two) == [Status.OK] * 8
    other.clear().wait(WAIT)
    assert objects_in(tier) == []


# ---- what happens to objects


def _empty(data: bytearray) -> bytes:
    return b""


def _cut_in_the_table(data: bytearray) -> bytes:
    return data[: table_bytes(RUN) // 2]


def _cut_in_the_bytes(data: bytearray) -> bytes:
    return data[: table_bytes(RUN) + BLOCK + 10]


def _longer(data: bytearray) -> bytes:
    return data + b"tail"


def _flipped_in_the_table(data: bytearray) -> bytes:
    data[60] ^= 1
    return data


def _garbage(data: bytearray) -> bytes:
    return bytes(len(data))


DAMAGE = (_empty, _cut_in_the_table, _cut_in_the_bytes, _longer, _flipped_in_the_table, _garbage)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_object_is_a_miss_and_goes(opened: Open, damage: Callable[[bytearray], bytes]) -> None:
    writer, reader = opened(), opened()
    refs = chain_refs(8)
    put(writer, refs, BLOCK)
    replace(writer, name(refs[7]), damage(content_of(writer, name(refs[7]))))
    found = statuses(reader, refs)
    assert found[:4] == [Status.OK] * 4
    assert set(found[4:]) == {Status.CORRUPT}
    assert met(reader, "corrupt") == 1
    assert objects_in(reader) == [path_of(reader, name(refs[3]))]
    # Somebody writes it again.
    put(reader, refs, BLOCK)
    assert statuses(reader, refs) == [Status.OK] * 8


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_object_is_written_over(opened: Open, damage: Callable[[bytearray], bytes]) -> None:
    refs = chain_refs(RUN)
    put(opened(), refs, BLOCK)
    tier = opened()
    replace(tier, name(refs[3]), damage(content_of(tier, name(refs[3]))))
    assert all(isinstance(result, Handle) for result in put(tier, refs, BLOCK))
    assert statuses(tier, refs) == [Status.OK] * RUN


def test_a_flipped_bit_costs_its_own_block_and_what_comes_after(tier: RemoteTier) -> None:
    refs = chain_refs(8)
    put(tier, refs, BLOCK)
    flip(tier, name(refs[7]), table_bytes(RUN) + 2 * BLOCK + 77)
    assert statuses(tier, refs) == [Status.OK] * 6 + [Status.CORRUPT, Status.OK]
    assert met(tier, "corrupt") == 1
    assert statuses(tier, refs) == [Status.OK] * 4 + [Status.MISS] * 4


def test_intact_bytes_under_another_name(tier: RemoteTier, opened: Open) -> None:
    one, two = chain_refs(RUN), chain_refs(RUN, seed=1)
    put(tier, one, BLOCK)
    put(tier, two, BLOCK)
    replace(tier, name(two[3]), content_of(tier, name(one[3])))
    assert set(statuses(opened(), two)) == {Status.CORRUPT}
    assert statuses(opened(), one) == [Status.OK] * RUN


def test_what_happens_between_lease_and_read(tier: RemoteTier, opened: Open) -> None:
    gone, replaced, rewritten, damaged = (chain_refs(RUN, seed=seed) for seed in range(4))
    for refs in (gone, replaced, rewritten, damaged):
        put(tier, refs, BLOCK)
    reader = opened()
    leases = [reader.acquire(keys(refs), "reader").wait(WAIT).handles for refs in (gone, replaced, rewritten, damaged)]
    assert [len(handles) for handles in leases] == [RUN] * 4
    take_away(tier, name(gone[3]))
    replace(tier, name(rewritten[3]), content_of(tier, name(rewritten[3])))
    replace(tier, name(damaged[3]), content_of(tier, name(damaged[3]))[:-1])
    # Somebody's newer version: sound, and other bytes than were leased.
    take_away(tier, name(replaced[3]))
    newer = opened()
    newer.commit(write(newer, replaced, lambda _: memoryview(bytes(BLOCK))))
    expected = (Status.MISS, Status.MISS, Status.OK, Status.CORRUPT)
    for handles, status in zip(leases, expected, strict=True):
        out = [(handle, memoryview(bytearray(BLOCK))) for handle in handles]
        assert reader.read(out).wait(WAIT).statuses == (status,) * RUN
        if status is Status.OK:
            assert all(data == content(handle.ref, BLOCK) for handle, data in out)
    assert met(reader, "gone") == 2 * RUN
    reader.release_owner("reader")
    assert [data for _, data in load(newer, keys(replaced))] == [bytes(BLOCK)] * RUN
    assert run_length(reader, gone) == 0


def test_a_store_that_tells_no_versions(tier: RemoteTier, opened: Open) -> None:
    refs = chain_refs(RUN)
    put(tier, refs, BLOCK)
    reader = opened()
    reader.release(reader.acquire(keys(refs), "reader").wait(WAIT).handles)
    directory = reader._backend._directory
    known, _ = directory.find(name(refs[3]))
    directory.put(known.last, known.table, None)
    assert statuses(reader, refs) == [Status.OK] * RUN
    directory.put(known.last, known.table, None)
    handles = reader.acquire(keys(refs), "reader").wait(WAIT).handles
    replace(tier, name(refs[3]), content_of(tier, name(refs[3]))[:-1])
    out = [(handle, memoryview(bytearray(BLOCK))) for handle in handles]
    assert reader.read(out).wait(WAIT).statuses == (Status.CORRUPT,) * RUN
    reader.release(handles)
    assert objects_in(reader) == []


def test_other_files_are_left_alone(tier: RemoteTier) -> None:
    root = path_of(tier, name(chain_refs(1)[0])).rpartition("/")[0].rpartition("/")[0]
    for path in (f"{root}/readme", f"{root}/00/{'0' * 32}x", f"{root}/00/{'0' * 30}e", "elsewhere/file"):
        obstore.put(tier._backend._store, path, b"mine")
    put(tier, chain_refs(RUN), BLOCK)
    assert tier.stats()["blocks"] == RUN
    tier.clear().wait(WAIT)
    assert len(objects_in(tier)) == 4
