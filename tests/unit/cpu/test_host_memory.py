"""What only the host tier promises: memory in place, sizes side by side, owners, errors before changes."""

import time
from collections.abc import Callable, Sequence

import pytest

from kvtier.cpu import HostTier
from kvtier.errors import CapacityError, FormatMismatch, LeaseError, TierUnavailable
from kvtier.hints import NO_HINT, Hint
from kvtier.metrics import Metrics
from kvtier.native.checksum import copy_checksums
from kvtier.policies import LruPolicy
from kvtier.testing.blocks import chain_refs, content, load, put, run_length
from kvtier.tiers import Exists, Full, Handle, Status

SIZE = 8192


def reserve(tier: HostTier, refs, owner: str = "writer") -> list[Handle]:
    results = tier.reserve(refs, [SIZE] * len(refs), ["raw"] * len(refs), owner)
    return [result for result in results if isinstance(result, Handle)]


def test_records_are_filled_and_read_in_place() -> None:
    refs = chain_refs(3)
    tier = HostTier(SIZE * 4)
    handles = tier.reserve(refs, [5000] * 3, ["raw"] * 3, "writer")
    assert all(isinstance(handle, Handle) for handle in handles)
    for handle in handles:
        view = tier.buffer(handle)
        assert view.nbytes == 8192
        view[:] = b"\xff" * 8192
        view[:5000] = content(handle.ref, 5000)
    with pytest.raises(LeaseError, match="never completely written"):
        tier.commit(handles)
    tier.seal(handles)
    tier.commit(handles)
    leased = tier.acquire([ref.key for ref in refs], "reader").wait().handles
    for handle in leased:
        view = tier.buffer(handle)
        assert view.readonly
        assert view[:5000] == content(handle.ref, 5000)
        assert bytes(view[5000:]) == bytes(3192), "padding shows what was there before"
        span = tier.span(handle)
        assert (span.region, span.nbytes) == (tier.regions()[0].region, 5000)
    tier.release(leased)


def test_a_reserved_child_keeps_its_parent() -> None:
    parent = chain_refs(1, seed=1)
    chain = chain_refs(2, seed=1)
    tier = HostTier(SIZE * 4)
    put(tier, parent, SIZE)
    child = reserve(tier, chain[1:])
    for seed in range(2, 8):
        put(tier, chain_refs(2, seed=seed), SIZE)
    assert run_length(tier, parent) == 1
    tier.write([(child[0], content(child[0].ref, SIZE))])
    tier.commit(child)
    assert [status for status, _ in load(tier, [ref.key for ref in chain])] == [Status.OK, Status.OK]
    for seed in range(2, 8):
        put(tier, chain_refs(2, seed=seed), SIZE)
    assert run_length(tier, parent) == 0


def test_other_block_sizes_push_each_other_out() -> None:
    tier = HostTier(1 << 20)
    put(tier, chain_refs(256, seed=1), 4096)
    assert isinstance(put(tier, chain_refs(1, seed=2), 1 << 20)[0], Handle)
    assert tier.stats()["blocks"] == 1
    assert isinstance(put(tier, chain_refs(1, seed=3), 4096)[0], Handle)
    assert tier.stats()["bytes"] == 4096
    tier.check()


def test_release_owner_ends_everything_of_one_owner() -> None:
    tier = HostTier(SIZE * 8)
    put(tier, chain_refs(2), SIZE)
    keys = [ref.key for ref in chain_refs(2)]
    gone = tier.acquire(keys, "gone").wait().handles
    kept = tier.acquire(keys, "kept").wait().handles
    reserve(tier, chain_refs(3, seed=4), "gone")
    tier.release_owner("gone")
    tier.release_owner("gone")
    assert (tier.stats()["leases"], tier.stats()["reservations"]) == (2, 0)
    with pytest.raises(LeaseError):
        tier.release(gone)
    tier.release(kept)
    tier.check()


def test_exact_may_be_written_while_lossy_is_in_flight() -> None:
    lossy, exact = chain_refs(1, exact=False), chain_refs(1)
    tier = HostTier(SIZE * 4)
    slow = reserve(tier, lossy)
    put(tier, exact, SIZE)
    tier.write([(slow[0], content(lossy[0], SIZE))])
    tier.commit(slow)
    assert load(tier, [exact[0].key]) == [(Status.OK, bytes(content(exact[0], SIZE)))]
    assert tier.stats()["bytes"] == SIZE
    tier.check()


def test_replacing_a_parent_keeps_its_children() -> None:
    tier = HostTier(SIZE * 8)
    lossy = chain_refs(3, exact=False)
    put(tier, lossy, SIZE)
    leased = tier.acquire([lossy[0].key], "reader").wait().handles
    put(tier, chain_refs(1), SIZE)
    assert run_length(tier, lossy) == 3
    tier.check()
    assert tier.remove([lossy[0].key]).wait().statuses == (Status.OK,)
    assert tier.stats()["blocks"] == 0
    tier.release(leased)
    assert tier.stats()["bytes"] == 0


def test_a_child_in_the_middle_of_a_batch_keeps_its_parent() -> None:
    tier = HostTier(SIZE * 4)
    oldest, parent, *newer = (chain_refs(1, seed=seed) for seed in range(1, 5))
    for refs in (oldest, parent, *newer):
        put(tier, refs, SIZE)
    child = chain_refs(2, seed=2)[1:]
    put(tier, [*chain_refs(1, seed=9), *child], SIZE)
    assert [run_length(tier, refs) for refs in (oldest, parent, child, *newer)] == [0, 1, 1, 0, 1]


def test_an_old_lease_does_not_pin_the_version_that_replaced_it() -> None:
    tier = HostTier(SIZE * 4)
    put(tier, chain_refs(1, exact=False), SIZE)
    old = tier.acquire([chain_refs(1)[0].key], "reader").wait().handles
    put(tier, chain_refs(1), SIZE)
    put(tier, chain_refs(3, seed=2), SIZE)
    assert run_length(tier, chain_refs(1)) == 0
    assert tier.buffer(old[0]) == content(old[0].ref, SIZE)
    tier.release(old)
    assert tier.stats()["bytes"] == 3 * SIZE
    tier.check()


class RecordingPolicy(LruPolicy):
    """LRU that remembers what it heard."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, list[int]]] = []

    def insert(self, slots: Sequence[int], keys, parents, hints=None) -> None:
        self.heard.append(("insert", list(slots)))
        super().insert(slots, keys, parents, hints)

    def hit(self, slots: Sequence[int]) -> None:
        self.heard.append(("hit", list(slots)))
        super().hit(slots)


def test_the_policy_hears_of_batches_deepest_first() -> None:
    policy = RecordingPolicy()
    tier = HostTier(SIZE * 4, policy=policy)
    refs = chain_refs(3)
    put(tier, refs, SIZE)
    load(tier, [ref.key for ref in refs])
    assert policy.heard == [("insert", [2, 1, 0]), ("hit", [2, 1, 0])]


def hook_bytes(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Run `call` once, in the middle of the next operation that reads or moves bytes."""
    waiting = [call]

    def checksums(*args) -> list[bytes]:
        while waiting:
            waiting.pop()()
        return copy_checksums(*args)

    monkeypatch.setattr("kvtier.cpu.tier.copy_checksums", checksums)


def test_abort_during_a_write_does_not_free_the_memory_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = HostTier(SIZE)
    handles = reserve(tier, chain_refs(1))
    seen: list[object] = []

    def interfere() -> None:
        tier.abort(handles)
        seen.extend(tier.reserve(chain_refs(1, seed=2), [SIZE], ["raw"], "other"))

    hook_bytes(monkeypatch, interfere)
    tier.write([(handles[0], content(handles[0].ref, SIZE))])
    assert seen == [Full("no_space")]
    assert tier.stats()["bytes"] == 0
    put(tier, chain_refs(1, seed=2), SIZE)
    assert run_length(tier, chain_refs(1, seed=2)) == 1
    tier.check()


def test_release_during_a_read_does_not_free_the_memory_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = HostTier(SIZE)
    refs = chain_refs(1)
    put(tier, refs, SIZE)
    leased = tier.acquire([refs[0].key], "reader").wait().handles
    seen: list[object] = []

    def interfere() -> None:
        tier.remove([refs[0].key])
        tier.release_owner("reader")
        seen.extend(tier.reserve(chain_refs(1, seed=2), [SIZE], ["raw"], "other"))

    hook_bytes(monkeypatch, interfere)
    out = memoryview(bytearray(SIZE))
    assert tier.read([(leased[0], out)]).wait().statuses == (Status.OK,)
    assert out == content(refs[0], SIZE)
    assert seen == [Full("no_space")]
    assert tier.stats()["bytes"] == 0
    tier.check()


def test_deadline_in_the_middle_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = HostTier(SIZE * 4)
    refs = chain_refs(3)
    keys = [ref.key for ref in refs]
    put(tier, refs, SIZE)
    deadline = time.monotonic() + 3600
    monkeypatch.setattr("kvtier.cpu.batches._WINDOW_BYTES", SIZE)
    hook_bytes(monkeypatch, lambda: monkeypatch.setattr("kvtier.cpu.tier.expired", lambda _: True))
    done = tier.acquire(keys, "reader", deadline).wait()
    assert done.statuses == (Status.OK, Status.TIMEOUT, Status.TIMEOUT)
    assert tier.stats()["leases"] == 1
    tier.release(done.handles)


def test_bad_input_is_refused_before_anything_changes() -> None:
    tier = HostTier(SIZE * 4)
    refs = chain_refs(2)
    with pytest.raises(FormatMismatch, match="as many of each"):
        tier.reserve(refs, [SIZE], ["raw"], "w")
    for size, fmt in ((0, "raw"), (-1, "raw"), (SIZE, ""), (SIZE, "x" * 17), (SIZE, "é")):
        with pytest.raises(FormatMismatch, match="expected at least 1 byte"):
            tier.reserve(refs, [SIZE, size], ["raw", fmt], "w")
    with pytest.raises(FormatMismatch, match="key of 2 bytes"):
        tier.reserve([refs[0]._replace(key=b"ab")], [SIZE], ["raw"], "w")
    handles = reserve(tier, refs)
    with pytest.raises(FormatMismatch, match="at least 8192 bytes"):
        tier.write([(handles[0], content(refs[0], SIZE)), (handles[1], memoryview(bytes(SIZE - 1)))])
    with pytest.raises(LeaseError, match="never completely written"):
        tier.commit(handles[:1])
    tier.write([(handle, content(handle.ref, SIZE)) for handle in handles])
    tier.commit(handles)
    leased = tier.acquire([ref.key for ref in refs], "r").wait().handles
    with pytest.raises(FormatMismatch, match="writable"):
        tier.read([(leased[0], memoryview(bytes(SIZE)))])
    with pytest.raises(LeaseError, match="no live reservation"):
        tier.write([(leased[0], content(refs[0], SIZE))])
    with pytest.raises(LeaseError, match="no live hold"):
        HostTier(SIZE).span(leased[0])
    tier.release(leased)
    assert tier.stats()["reservations"] == 0


def test_closed_tier_says_so_and_views_survive() -> None:
    tier = HostTier(SIZE * 4)
    refs = chain_refs(1)
    put(tier, refs, SIZE)
    leased = tier.acquire([refs[0].key], "reader").wait().handles
    view = tier.buffer(leased[0])
    tier.close()
    assert view == content(refs[0], SIZE)
    tier.release(leased)
    tier.abort(leased)
    for call in (lambda: tier.contains([b""]), lambda: reserve(tier, refs), tier.clear):
        with pytest.raises(TierUnavailable, match="closed"):
            call()
    assert (tier.stats()["blocks"], tier.stats()["bytes"], tier.stats()["leases"]) == (0, 0, 0)


def test_capacity_is_checked() -> None:
    with pytest.raises(CapacityError, match="host: capacity of 100 bytes: expected"):
        HostTier(100)


def test_metrics_tell_what_happened() -> None:
    metrics = Metrics()
    tier = HostTier(SIZE * 4, metrics=metrics, name="ram")
    put(tier, chain_refs(4), SIZE)
    put(tier, chain_refs(3, seed=1), SIZE)
    load(tier, [ref.key for ref in chain_refs(4, seed=1)])
    assert isinstance(tier.reserve(chain_refs(1, seed=2), [SIZE * 5], ["raw"], "w")[0], Full)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"kvtier_{name}", {"tier": "ram", **labels})

    assert value("written_bytes_total") == 7 * SIZE
    assert value("evicted_blocks_total", reason="capacity") == 3
    assert value("hit_blocks_total") == 3
    assert value("missed_blocks_total") == 1
    assert value("read_bytes_total") == 3 * SIZE
    assert value("dropped_blocks_total", reason="oversized") == 1
    assert value("occupied_bytes") == 4 * SIZE
    assert value("capacity_bytes") == 4 * SIZE


def test_duplicate_in_one_batch_is_in_flight() -> None:
    tier = HostTier(SIZE * 4)
    refs = chain_refs(1)
    first, second = tier.reserve(refs * 2, [SIZE] * 2, ["raw"] * 2, "w")
    assert isinstance(first, Handle)
    assert second == Exists(ready=False)


DEAD = Hint(reuse="none")


def test_hints_given_with_a_reservation_or_later_decide_who_leaves() -> None:
    tier = HostTier(SIZE * 4)
    dead, ordinary = chain_refs(1, seed=1), chain_refs(3, seed=2)
    put(tier, ordinary, SIZE)
    handles = tier.reserve(dead, [SIZE], ["raw"], "writer", [DEAD])
    tier.write([(handles[0], content(dead[0], SIZE))])
    tier.commit(handles)
    put(tier, chain_refs(1, seed=3), SIZE)
    assert (run_length(tier, dead), run_length(tier, ordinary)) == (0, 3)
    tier.hint([ref.key for ref in chain_refs(1, seed=3)] + [b"absent"], [DEAD, DEAD])
    put(tier, chain_refs(1, seed=4), SIZE)
    assert (run_length(tier, chain_refs(1, seed=3)), run_length(tier, ordinary)) == (0, 3)
    with pytest.raises(FormatMismatch, match="1 keys, 0 hints"):
        tier.hint([b"k"], [])
    with pytest.raises(FormatMismatch, match="2 hints"):
        tier.reserve(dead, [SIZE], ["raw"], "writer", [DEAD, NO_HINT])
    tier.check()


def test_what_the_device_holds_too_leaves_first_and_only_when_room_is_needed() -> None:
    tier = HostTier(SIZE * 4)
    below, above = chain_refs(2, seed=1), chain_refs(2, seed=2)
    put(tier, below, SIZE)
    put(tier, above, SIZE)
    tier.duplicate([*(ref.key for ref in above), b"absent"], above=True)
    assert tier.stats()["blocks"] == 4
    assert tier.coldest(9) == [ref.key for ref in (*above[::-1], *below[::-1])]
    put(tier, chain_refs(1, seed=3), SIZE)
    assert (run_length(tier, below), run_length(tier, above)) == (2, 1)
    tier.duplicate([above[0].key], above=False)
    put(tier, chain_refs(1, seed=4), SIZE)
    assert (run_length(tier, below), run_length(tier, above)) == (1, 1)


def test_coldest_names_the_next_victims_and_evicts_none() -> None:
    tier = HostTier(SIZE * 4)
    refs = chain_refs(4)
    put(tier, refs, SIZE)
    expected = [ref.key for ref in refs[::-1]]
    assert tier.coldest(2) == expected[:2]
    assert tier.coldest(9) == expected
    assert tier.stats()["blocks"] == 4
    put(tier, chain_refs(2, seed=1), SIZE)
    assert [run_length(tier, [ref]) for ref in refs] == [1, 1, 0, 0]


def test_the_stores_own_leases_are_no_use_of_a_block() -> None:
    metrics = Metrics()
    tier = HostTier(SIZE * 2, metrics=metrics)
    old, new = chain_refs(1, seed=1), chain_refs(1, seed=2)
    put(tier, old, SIZE)
    put(tier, new, SIZE)
    load(tier, [old[0].key], "store.writeback")
    assert tier.coldest(1) == [old[0].key]
    assert metrics.value("hit_blocks_total", tier="host") == 0
    load(tier, [old[0].key], "request")
    assert tier.coldest(1) == [new[0].key]
    assert metrics.value("hit_blocks_total", tier="host") == 1


def test_a_child_finds_the_parent_that_arrives_later() -> None:
    tier = HostTier(SIZE * 8)
    refs = chain_refs(3)
    put(tier, refs[2:], SIZE)
    put(tier, refs[:1], SIZE)
    tier.check()
    put(tier, refs[1:2], SIZE)
    tier.check()
    load(tier, [refs[2].key])
    assert tier.coldest(9) == [ref.key for ref in refs[::-1]], "the child goes before the parent, used later or not"
    tier.remove([refs[0].key])
    assert tier.stats()["blocks"] == 0
    tier.check()


def test_what_a_batch_finds_does_not_leave_for_it() -> None:
    tier = HostTier(SIZE * 2)
    found = chain_refs(2, seed=1)
    put(tier, found, SIZE)
    wanted = [*found, *chain_refs(1, seed=2)]
    results = tier.reserve(wanted, [SIZE] * 3, ["raw"] * 3, "writer")
    assert results == [Exists(ready=True), Exists(ready=True), Full("no_space")]
    assert tier.stats()["blocks"] == 2
    put(tier, chain_refs(2, seed=2), SIZE)
    assert run_length(tier, found) == 0, "nothing stayed pinned"


def test_eviction_looks_at_no_pinned_block() -> None:
    """A thousand leased blocks, colder than all others, are passed over once and not for every victim."""
    tier = HostTier(4096 * 1100)
    pinned = chain_refs(1000, seed=1)
    put(tier, pinned, 4096)
    leased = tier.acquire([ref.key for ref in pinned], "reader").wait().handles
    queue = tier._table._policy._order._queue
    looked_at: list[int] = []
    step_out = queue.step_out
    queue.step_out = lambda slot: (looked_at.append(slot), step_out(slot))
    for seed in range(2, 302):
        put(tier, chain_refs(1, seed=seed), 4096)
    assert len(looked_at) < 1000 + 3 * 300
    assert run_length(tier, pinned) == 1000
    tier.release(leased)
    put(tier, chain_refs(1, seed=999), 4096)
    assert run_length(tier, pinned) == 999
    tier.check()


def test_copies_out_a_run_and_lets_go_of_it() -> None:
    metrics = Metrics()
    tier = HostTier(SIZE * 4, metrics=metrics)
    refs = chain_refs(4)
    keys = [ref.key for ref in refs]
    put(tier, refs[:3], SIZE)
    outs = [bytearray(SIZE) for _ in refs]
    statuses = tier.copy_out(keys, list(map(memoryview, outs)), "reader").wait().statuses
    assert statuses == (Status.OK, Status.OK, Status.OK, Status.MISS)
    assert [memoryview(out) for out in outs[:3]] == [content(ref, SIZE) for ref in refs[:3]]
    assert tier.stats()["leases"] == 0
    assert metrics.value("hit_blocks_total", tier="host") == 3
    assert metrics.value("missed_blocks_total", tier="host") == 1
    assert metrics.value("read_bytes_total", tier="host") == 3 * SIZE
    tier.check()


def test_copies_out_no_damaged_block() -> None:
    tier = HostTier(SIZE * 4)
    refs = chain_refs(3)
    keys = [ref.key for ref in refs]
    put(tier, refs, SIZE)
    handle = tier.acquire(keys[1:2], "reader").wait().handles[0]
    tier._memories([handle])[0][9] ^= 1
    tier.release([handle])
    statuses = tier.copy_out(keys, [memoryview(bytearray(SIZE))] * 3, "reader").wait().statuses
    assert statuses == (Status.OK, Status.CORRUPT, Status.MISS)
    assert tier.stats()["blocks"] == 1
    for buffers in (
        [memoryview(bytearray(SIZE))],
        [memoryview(bytearray(SIZE - 1))] * 3,
        [memoryview(bytes(SIZE))] * 3,
    ):
        with pytest.raises(FormatMismatch):
            tier.copy_out(keys, buffers, "reader")
    assert tier.stats()["leases"] == 0
    tier.check()


def test_says_once_what_was_evicted() -> None:
    tier = HostTier(SIZE * 4)
    put(tier, chain_refs(4), SIZE)
    assert tier.take_evicted() == []
    put(tier, chain_refs(2, seed=2), SIZE)
    assert tier.take_evicted() == [ref.key for ref in chain_refs(4)[:1:-1]]
    assert tier.take_evicted() == []
    tier.remove([chain_refs(4)[0].key])
    assert tier.take_evicted() == []


def test_a_batch_into_a_full_tier_evicts_as_many_as_it_needs_and_not_what_it_hangs_from() -> None:
    tier = HostTier(SIZE * 8)
    trunk, old = chain_refs(5, seed=1), chain_refs(6, seed=2)
    put(tier, trunk[:2], SIZE)
    put(tier, old, SIZE)
    # The trunk is the coldest, but the batch builds upon it: the deepest of the other chain leave.
    put(tier, trunk[2:], SIZE)
    assert (run_length(tier, trunk), run_length(tier, old)) == (5, 3)
    assert tier.take_evicted() == [ref.key for ref in reversed(old[3:])]
    assert tier.stats()["evicted"] == 3
    tier.check()
    leased = tier.acquire([ref.key for ref in trunk], "reader").wait().handles
    results = tier.reserve(chain_refs(4, seed=3), [SIZE] * 4, ["raw"] * 4, "writer")
    assert [isinstance(result, Handle) for result in results] == [True, True, True, False]
    tier.abort([result for result in results if isinstance(result, Handle)])
    tier.release(leased)
    # Victims of another size: one by one, until there is room.
    put(tier, chain_refs(2, seed=4), SIZE * 2)
    assert run_length(tier, chain_refs(2, seed=4)) == 2
    assert tier.stats()["bytes"] <= SIZE * 8
    tier.check()


def test_a_policy_that_dies_while_a_batch_looks_for_room_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = LruPolicy()
    tier = HostTier(SIZE * 4, policy=policy)
    put(tier, chain_refs(3), SIZE)

    def broken(*_: object) -> list[int]:
        raise RuntimeError("no idea")

    with monkeypatch.context() as patched:
        patched.setattr(policy, "victims", broken)
        with pytest.raises(RuntimeError, match="no idea"):
            tier.reserve(chain_refs(2, seed=1), [SIZE] * 2, ["raw"] * 2, "writer")
        assert tier.stats()["bytes"] == SIZE * 3
    assert tier.stats()["reservations"] == 0
    put(tier, chain_refs(4, seed=2), SIZE)
    assert run_length(tier, chain_refs(4, seed=2)) == 4
    tier.check()
