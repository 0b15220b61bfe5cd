"""TierSuite: what every `Tier` must do. OpenTierSuite: what is left where the tier does not choose what leaves."""

import random
import threading
import time
from typing import cast

from kvtier.formats import fidelity, names
from kvtier.metrics import Metrics
from kvtier.testing.blocks import chain_refs, content, load, put, raises_lease_error, run_length
from kvtier.testing.tier_case import WAIT, TierCase
from kvtier.testing.tier_eviction import EvictionSuite
from kvtier.testing.tier_hints import HintSuite
from kvtier.tiers import BlockRef, Exists, Handle, ListingTier, Status, Ticket, Tier

__all__ = ["OpenTierSuite", "TierSuite"]


class OpenTierSuite(TierCase):
    """For a tier whose other side keeps to a capacity of its own and takes whatever comes, such as a server.

    Subclass it in a module that pytest collects, set `bounded = False`, and say how to make and how to damage the tier
    (see `TierCase`).
    """

    # ---- one block's life

    def test_round_trip(self) -> None:
        refs = chain_refs(5)
        with self._tier() as tier:
            assert all(isinstance(result, Handle) for result in self._put(tier, refs))
            self._assert_loads(tier, refs)
            assert tier.stats()["blocks"] == 5
            tier.flush()
            self._assert_loads(tier, refs)
            self._assert_idle(tier)

    def test_odd_sizes_round_trip(self) -> None:
        refs = chain_refs(4)
        sizes = [1, 4095, 4097, self.block_bytes - 1]
        with self._tier() as tier:
            for ref, nbytes in zip(refs, sizes, strict=True):
                put(tier, [ref], nbytes)
            found = load(tier, [ref.key for ref in refs])
            assert [data for _, data in found] == [
                bytes(content(ref, nbytes)) for ref, nbytes in zip(refs, sizes, strict=True)
            ]

    def test_empty_batches(self) -> None:
        with self._tier() as tier:
            assert tier.contains([]).wait(WAIT).statuses == ()
            assert tier.acquire([], "o").wait(WAIT).statuses == ()
            assert tier.read([]).wait(WAIT).statuses == ()
            assert tier.write([]).wait(WAIT).statuses == ()
            assert tier.remove([]).wait(WAIT).statuses == ()
            assert tier.reserve([], [], [], "o") == []
            tier.commit([])
            tier.abort([])
            tier.release([])

    def test_invisible_until_commit(self) -> None:
        refs = chain_refs(2)
        keys = [ref.key for ref in refs]
        with self._tier() as tier:
            handles = self._reserved(tier, refs)
            assert load(tier, keys)[0][0] is Status.MISS
            self._write(tier, handles)
            assert run_length(tier, refs) == 0
            assert load(tier, keys)[0][0] is Status.MISS
            tier.commit(handles)
            self._assert_loads(tier, refs)
            self._assert_idle(tier)

    def test_first_writer_wins(self) -> None:
        refs = chain_refs(2)
        with self._tier() as tier:
            handles = self._reserved(tier, refs)
            assert self._reserve(tier, refs, "late") == [Exists(ready=False)] * 2
            self._write(tier, handles)
            tier.commit(handles)
            assert self._reserve(tier, refs, "late") == [Exists(ready=True)] * 2
            self._assert_loads(tier, refs)
            self._assert_idle(tier)

    def test_exact_replaces_lossy_but_not_the_other_way_round(self) -> None:
        lossy, exact = chain_refs(1, exact=False), chain_refs(1)
        with self._tier() as tier:
            self._put(tier, lossy)
            assert self._reserve(tier, lossy) == [Exists(ready=True)]
            old = tier.acquire([lossy[0].key], "reader").wait(WAIT).handles
            assert not old[0].ref.exact
            assert isinstance(self._put(tier, exact)[0], Handle)
            assert self._read(tier, old) == [content(lossy[0], self.block_bytes)]
            tier.release(old)
            self._assert_loads(tier, exact)
            assert self._reserve(tier, lossy) == [Exists(ready=True)]
            assert tier.stats()["blocks"] == 1
            self._assert_idle(tier)

    def test_a_format_of_higher_fidelity_replaces_a_lower_one(self) -> None:
        refs = chain_refs(2, exact=False)
        low, *_, high = sorted(names(), key=fidelity)
        assert fidelity(low) < fidelity(high)
        with self._tier() as tier:
            self._put_with(tier, refs, low)
            assert all(isinstance(result, Handle) for result in self._put_with(tier, refs, high))
            assert self._put_with(tier, refs, low) == [Exists(ready=True)] * 2
            assert self._put_with(tier, refs, high) == [Exists(ready=True)] * 2
            handles = tier.acquire([ref.key for ref in refs], "reader").wait(WAIT).handles
            assert [handle.fmt for handle in handles] == [high] * 2
            tier.release(handles)
            assert tier.stats()["blocks"] == 2
            exact = chain_refs(2)
            assert all(isinstance(result, Handle) for result in self._put_with(tier, exact, low))
            self._assert_loads(tier, exact)
            self._assert_idle(tier)

    def test_of_two_versions_in_flight_the_better_one_stays(self) -> None:
        lossy, exact = chain_refs(1, exact=False), chain_refs(1)
        with self._tier() as tier:
            slow = self._reserved(tier, lossy)
            assert self._reserve(tier, lossy) == [Exists(ready=False)]
            fast = self._reserved(tier, exact)
            assert self._reserve(tier, lossy) == [Exists(ready=False)]
            for handles in (fast, slow):
                self._write(tier, handles)
                tier.commit(handles)
            self._assert_loads(tier, exact)
            assert tier.stats()["blocks"] == 1
            self._assert_idle(tier)

    # ---- looking up

    def test_acquire_takes_the_longest_leading_run(self) -> None:
        refs = chain_refs(6)
        keys = [ref.key for ref in refs]
        with self._tier() as tier:
            self._put(tier, refs[:3])
            done = tier.acquire(keys, "reader").wait(WAIT)
            assert [handle.ref for handle in done.handles] == refs[:3]
            assert done.statuses[:3] == (Status.OK,) * 3
            assert Status.OK not in done.statuses[3:]
            assert len(done.statuses) == 6
            assert tier.stats()["leases"] == 3
            tier.release(done.handles)
            assert tier.acquire(keys[4:], "reader").wait(WAIT).handles == ()
            self._assert_idle(tier)

    def test_who_asks_for_exact_blocks_gets_no_other(self) -> None:
        lossy, exact = chain_refs(5, exact=False), chain_refs(5)
        mixed = [*exact[:2], lossy[2], *exact[3:]]
        keys = [ref.key for ref in mixed]
        with self._tier() as tier:
            self._put(tier, mixed)
            statuses = tier.contains(keys, exact=True).wait(WAIT).statuses
            assert statuses == (Status.OK, Status.OK, Status.MISS, Status.OK, Status.OK)
            done = tier.acquire(keys, "reader", exact=True).wait(WAIT)
            assert [handle.ref for handle in done.handles] == mixed[:2]
            assert Status.OK not in done.statuses[2:]
            tier.release(done.handles)
            done = tier.acquire(keys, "reader").wait(WAIT)
            assert [handle.ref.exact for handle in done.handles] == [True, True, False, True, True]
            tier.release(done.handles)
            self._assert_idle(tier)

    def test_namespaces_with_equal_tokens_are_independent(self) -> None:
        one, two = chain_refs(4, salt="one"), chain_refs(4, salt="two")
        with self._tier() as tier:
            self._put(tier, one)
            assert run_length(tier, two) == 0
            self._put(tier, two)
            self._assert_loads(tier, one)
            self._assert_loads(tier, two)
            assert tier.clear(one[0].ns).wait(WAIT).statuses == (Status.OK,)
            assert run_length(tier, one) == 0
            self._assert_loads(tier, two)

    def test_several_namespaces_are_cleared_at_once(self) -> None:
        chains = [chain_refs(4, salt=salt) for salt in ("one", "two", "three")]
        with self._tier() as tier:
            for refs in chains:
                self._put(tier, refs)
            gone = {chains[0][0].ns, chains[2][0].ns}
            assert tier.clear(gone).wait(WAIT).statuses == (Status.OK,)
            assert [run_length(tier, refs) for refs in chains] == [0, 4, 0]
            self._assert_loads(tier, chains[1])
            assert tier.clear(()).wait(WAIT).statuses == (Status.OK,)
            self._assert_loads(tier, chains[1])

    def test_what_a_namespace_has_is_listed(self) -> None:
        one, two = chain_refs(5, salt="one"), chain_refs(3, salt="two", exact=False)
        with self._tier() as tier:
            if not tier.caps.listing:
                return
            self._put(tier, one)
            self._put(tier, two)
            assert tier.remove([one[-1].key]).wait(WAIT).statuses == (Status.OK,)
            reserved = self._reserved(tier, chain_refs(1, seed=9, salt="one"))
            for refs in (one[:-1], two):
                listed = [key for keys in cast(ListingTier, tier).listed(refs[0].ns) for key in keys]
                assert set(listed) == {ref.key for ref in refs}
            assert not any(cast(ListingTier, tier).listed(chain_refs(1, salt="three")[0].ns))
            tier.abort(reserved)

    def test_past_deadline_is_timeout_without_side_effects(self) -> None:
        refs = chain_refs(3)
        keys = [ref.key for ref in refs]
        past = time.monotonic() - 1
        late = (Status.TIMEOUT,) * 3
        with self._tier() as tier:
            handles = self._reserved(tier, refs)
            items = [(handle, content(handle.ref, self.block_bytes)) for handle in handles]
            assert tier.write(items, past).wait(WAIT).statuses == late
            assert raises_lease_error(tier.commit, handles)
            self._write(tier, handles)
            tier.commit(handles)
            assert tier.contains(keys, past).wait(WAIT).statuses == late
            done = tier.acquire(keys, "reader", past).wait(WAIT)
            assert (done.statuses, done.handles) == (late, ())
            leased = tier.acquire(keys, "reader").wait(WAIT).handles
            out = [(handle, memoryview(bytearray(handle.nbytes))) for handle in leased]
            assert tier.read(out, past).wait(WAIT).statuses == late
            tier.release(leased)
            self._assert_loads(tier, refs)
            self._assert_idle(tier)

    def test_poll_delivers_each_ticket_once(self) -> None:
        refs = chain_refs(2)
        keys = [ref.key for ref in refs]
        with self._tier() as tier:
            self._put(tier, refs)
            tier.poll()
            tickets = [tier.contains(keys), tier.acquire(keys, "reader")]
            seen: list[Ticket] = []
            end = time.monotonic() + WAIT
            while len(seen) < 2 and time.monotonic() < end:
                seen += [done.ticket for done in tier.poll()]
            assert sorted(map(id, seen)) == sorted(map(id, tickets))
            assert tier.poll() == []
            tier.release(tickets[1].wait(WAIT).handles)

    # ---- holds

    def test_double_release_is_an_error(self) -> None:
        refs = chain_refs(2)
        with self._tier() as tier:
            self._put(tier, refs)
            handles = tier.acquire([ref.key for ref in refs], "reader").wait(WAIT).handles
            assert raises_lease_error(tier.release, [handles[0], handles[0]])
            assert tier.stats()["leases"] == 2
            tier.release(handles)
            assert raises_lease_error(tier.release, handles[:1])
            self._assert_idle(tier)

    def test_commit_needs_a_live_and_written_reservation(self) -> None:
        refs = chain_refs(3)
        with self._tier() as tier:
            written, unwritten, aborted = self._reserved(tier, refs)
            self._write(tier, [written, aborted])
            assert raises_lease_error(tier.commit, [written, unwritten])
            assert run_length(tier, refs) == 0
            tier.abort([aborted])
            assert raises_lease_error(tier.commit, [aborted])
            tier.commit([written])
            assert raises_lease_error(tier.commit, [written])
            assert raises_lease_error(tier.release, [unwritten])
            tier.abort([unwritten])
            self._assert_loads(tier, refs[:1])
            self._assert_idle(tier)

    def test_abort_is_idempotent_and_leaves_committed_blocks_alone(self) -> None:
        refs = chain_refs(3)
        with self._tier() as tier:
            kept = self._reserved(tier, refs[:1])
            self._write(tier, kept)
            tier.commit(kept)
            dropped = self._reserved(tier, refs[1:])
            tier.abort([*dropped, *kept])
            tier.abort(dropped)
            assert run_length(tier, refs) == 1
            self._assert_idle(tier)
            self._put(tier, refs)
            self._assert_loads(tier, refs)

    def test_release_owner_ends_all_that_it_holds(self) -> None:
        refs, more = chain_refs(3), chain_refs(2, seed=1)
        keys = [ref.key for ref in refs]
        with self._tier() as tier:
            self._put(tier, refs)
            gone = tier.acquire(keys, "gone").wait(WAIT).handles
            kept = tier.acquire(keys, "kept").wait(WAIT).handles
            reserved = [result for result in self._reserve(tier, more, "gone") if isinstance(result, Handle)]
            tier.release_owner("gone")
            tier.release_owner("gone")
            tier.release_owner("nobody")
            assert (tier.stats()["leases"], tier.stats()["reservations"]) == (3, 0)
            assert raises_lease_error(tier.release, gone)
            assert raises_lease_error(tier.commit, reserved)
            tier.abort(reserved)
            assert self._read(tier, kept) == [content(ref, self.block_bytes) for ref in refs]
            tier.release(kept)
            self._assert_idle(tier)

    def test_remove_while_leased(self) -> None:
        refs = chain_refs(2)
        keys = [ref.key for ref in refs]
        with self._tier() as tier:
            self._put(tier, refs)
            leased = tier.acquire(keys, "reader").wait(WAIT).handles
            assert tier.remove(keys).wait(WAIT).statuses == (Status.OK, Status.OK)
            assert run_length(tier, refs) == 0
            self._put(tier, refs)
            self._put(tier, chain_refs(self.capacity_blocks, seed=9))
            assert self._read(tier, leased) == [content(ref, self.block_bytes) for ref in refs]
            tier.release(leased)
            tier.clear().wait(WAIT)
            assert tier.stats()["bytes"] == 0
            self._assert_idle(tier)

    # ---- removal

    def test_remove_takes_descendants(self) -> None:
        refs = chain_refs(5)
        keys = [ref.key for ref in refs]
        with self._tier() as tier:
            self._put(tier, refs)
            assert tier.remove(keys[2:3]).wait(WAIT).statuses == (Status.OK,)
            assert [status for status, _ in load(tier, keys)] == [Status.OK] * 2 + [Status.MISS] * 3
            if self.eager_closure:
                assert tier.stats()["blocks"] == 2
            assert tier.remove(keys[2:3]).wait(WAIT).statuses == (Status.MISS,)
            self._put(tier, refs)
            self._assert_loads(tier, refs)

    def test_damaged_block_is_corrupt_once_and_then_a_miss(self) -> None:
        refs = chain_refs(4)
        keys = [ref.key for ref in refs]
        metrics = Metrics()
        with self._tier(metrics) as tier:
            self._put(tier, refs)
            tier.flush()
            self.corrupt(tier, keys[2])
            first = [status for status, _ in load(tier, keys)]
            assert first[:3] == [Status.OK, Status.OK, Status.CORRUPT]
            again = [status for status, _ in load(tier, keys)]
            assert again == [Status.OK, Status.OK, Status.MISS, Status.MISS]
            labels = {"tier": tier.name}
            assert metrics.registry.get_sample_value("kvtier_corrupt_blocks_total", labels) == 1
            self._put(tier, refs)
            self._assert_loads(tier, refs)
            self._assert_idle(tier)

    def test_a_parent_that_arrives_later_is_the_parent_still(self) -> None:
        refs = chain_refs(3)
        with self._tier() as tier:
            self._put(tier, refs[2:])
            self._put(tier, refs[1:2])
            self._put(tier, refs[:1])
            self._assert_loads(tier, refs)
            tier.remove([refs[0].key]).wait(WAIT)
            if self.eager_closure:
                assert tier.stats()["blocks"] == 0
            assert run_length(tier, refs) == 0
            self._put(tier, refs)
            self._assert_loads(tier, refs)

    # ---- the whole

    def test_accounting_does_not_drift(self) -> None:
        dice = random.Random(4)  # noqa: S311
        chains = [chain_refs(self.capacity_blocks // 2, seed=seed) for seed in range(8)]
        with self._tier() as tier:
            for _ in range(150):
                refs = dice.choice(chains)
                part = refs[: dice.randint(1, len(refs))]
                event = dice.choice(["put", "put", "load", "remove", "abort"])
                if event == "put":
                    self._put(tier, part)
                elif event == "load":
                    load(tier, [ref.key for ref in part])
                elif event == "remove":
                    tier.remove([part[-1].key]).wait(WAIT)
                else:
                    tier.abort([got for got in self._reserve(tier, part) if isinstance(got, Handle)])
                self._assert_idle(tier)
            tier.clear().wait(WAIT)
            stats = tier.stats()
            assert (stats["blocks"], stats["bytes"]) == (0, 0)

    def test_eight_threads_never_see_wrong_bytes(self) -> None:
        chains = [chain_refs(self.capacity_blocks // 2, seed=seed) for seed in range(6)]
        wrong: list[BlockRef] = []
        errors: list[BaseException] = []

        def work(tier: Tier, number: int) -> None:
            dice = random.Random(number)  # noqa: S311
            try:
                for _ in range(25):
                    refs = dice.choice(chains)[: dice.randint(1, self.capacity_blocks // 2)]
                    if dice.random() < 0.1:
                        tier.remove([refs[-1].key]).wait(WAIT)
                    put(tier, refs, self.block_bytes, f"writer-{number}")
                    found = load(tier, [ref.key for ref in refs], f"reader-{number}")
                    for ref, (status, data) in zip(refs, found, strict=True):
                        if status is Status.OK and data != content(ref, self.block_bytes):
                            wrong.append(ref)
            except BaseException as error:  # noqa: BLE001  a thread's top level
                errors.append(error)

        metrics = Metrics()
        with self._tier(metrics) as tier:
            threads = [threading.Thread(target=work, args=(tier, number)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert errors == []
            assert wrong == []
            assert not metrics.registry.get_sample_value("kvtier_corrupt_blocks_total", {"tier": tier.name})
            self._assert_idle(tier)
            tier.clear().wait(WAIT)
            assert tier.stats()["bytes"] == 0

    def test_close_is_idempotent(self) -> None:
        with self._tier() as tier:
            self._put(tier, chain_refs(2))
            tier.close()
            tier.close()


class TierSuite(OpenTierSuite, EvictionSuite, HintSuite):
    """Subclass it in a module that pytest collects, and say how to make and how to damage the tier (see `TierCase`)."""
