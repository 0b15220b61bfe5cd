"""The host tier against a dict: any order of verbs, two sizes of block, two formats, every policy, tiny capacity
that changes, policies that are replaced."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvtier.cpu import HostTier
from kvtier.formats import fidelity
from kvtier.hints import Hint
from kvtier.policies import make_policy
from kvtier.testing.blocks import chain_refs, content
from kvtier.tiers import BlockRef, Exists, Full, Handle, Status

CHAINS = [chain_refs(6, seed=seed, salt=salt, exact=True) for seed in range(2) for salt in ("a", "b")]
PARENTS = {ref.key: ref.parent for chain in CHAINS for ref in chain}
PAGES = 14

chains = st.sampled_from(CHAINS)
owners = st.sampled_from(["x", "y"])
formats = st.sampled_from(["raw", "int4r"])
hints = st.sampled_from([Hint(), Hint(reuse="none"), Hint(priority=4), Hint(ttl=0), Hint(reuse="likely", session="s")])
ranges = st.tuples(st.integers(0, 5), st.integers(1, 6)).map(lambda cut: slice(cut[0], cut[0] + cut[1]))


def nbytes(ref: BlockRef) -> int:
    return 12288 if ref.depth == 1 else 3000


def rank(ref: BlockRef, fmt: str) -> tuple[bool, int]:
    return ref.exact, fidelity(fmt)


class HostTierMachine(RuleBasedStateMachine):
    policy = "lru"
    reservations = Bundle("reservations")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(PAGES * 4096, policy=make_policy(self.policy, PAGES), limit_bytes=2 * PAGES * 4096)
        self.pages = PAGES
        self.ready: dict[bytes, tuple[bool, int]] = {}  # key -> fidelity
        self.parent: dict[bytes, bytes | None] = {}  # only of ready keys, only ready parents
        self.held: dict[Handle, str] = {}  # live handle -> "reserved" | "written" | "leased"
        self.outlived: set[Handle] = set()  # leases whose record was removed or replaced since

    # ---- the model

    def pending(self, key: bytes) -> list[tuple[bool, int]]:
        return [rank(h.ref, h.fmt) for h, state in self.held.items() if state != "leased" and h.ref.key == key]

    def drop(self, key: bytes) -> None:
        for child in [child for child, parent in self.parent.items() if parent == key]:
            self.drop(child)
        self.ready.pop(key, None)
        self.parent.pop(key, None)

    def sync_evictions(self) -> None:
        """Whatever the tier evicted was free to go, and left no child behind."""
        keys = list(self.ready)
        statuses = self.tier.contains(keys).wait().statuses
        gone = {key for key, status in zip(keys, statuses, strict=True) if status is Status.MISS}
        for key in gone:
            assert not any(
                state == "leased" and h.ref.key == key and h not in self.outlived for h, state in self.held.items()
            ), "a leased block was evicted"
        for child, parent in self.parent.items():
            assert child in gone or parent not in gone, "a child outlived its parent"
        for key in gone:
            self.ready.pop(key)
            self.parent.pop(key)

    # ---- writers

    @rule(target=reservations, refs=chains, cut=ranges, exact=st.booleans(), fmt=formats, owner=owners, hint=hints)
    def reserve(self, refs: list[BlockRef], cut: slice, exact: bool, fmt: str, owner: str, hint: Hint):
        wanted = [ref._replace(exact=exact) for ref in refs[cut]]
        before = {ref.key: (self.ready.get(ref.key), self.pending(ref.key)) for ref in wanted}
        count, better = len(wanted), (exact, fidelity(fmt))
        results = self.tier.reserve(wanted, [nbytes(ref) for ref in wanted], [fmt] * count, owner, [hint] * count)
        refused: set[bytes] = set()
        for ref, result in zip(wanted, results, strict=True):
            present, pending = before[ref.key]
            if isinstance(result, Exists) and result.ready:
                assert present is not None
                assert present >= better
            elif isinstance(result, Exists):
                assert any(there >= better for there in pending)
            else:
                assert present is None or present < better, "what a batch finds stays"
                assert not any(there >= better for there in pending)
            if ref.parent in refused:
                assert isinstance(result, Exists) or result == Full("parent_refused")
                refused.add(ref.key)
            if isinstance(result, Full):
                refused.add(ref.key)
            if isinstance(result, Handle):
                self.held[result] = "reserved"
        self.sync_evictions()
        return multiple(*(result for result in results if isinstance(result, Handle)))

    @rule(handle=reservations)
    def write(self, handle: Handle) -> None:
        if self.held.get(handle) in ("reserved", "written"):
            done = self.tier.write([(handle, content(handle.ref, handle.nbytes))]).wait()
            assert done.statuses == (Status.OK,)
            self.held[handle] = "written"

    @rule(handle=reservations)
    def fill_in_place(self, handle: Handle) -> None:
        if self.held.get(handle) in ("reserved", "written"):
            self.tier.buffer(handle)[: handle.nbytes] = content(handle.ref, handle.nbytes)
            self.tier.seal([handle])
            self.held[handle] = "written"

    @rule(handle=consumes(reservations))
    def commit(self, handle: Handle) -> None:
        if self.held.get(handle) != "written":
            return
        self.tier.commit([handle])
        del self.held[handle]
        key = handle.ref.key
        better = rank(handle.ref, handle.fmt)
        if key not in self.ready:
            self.parent[key] = handle.ref.parent if handle.ref.parent in self.ready else None
            self.ready[key] = better
            self.parent.update((child, key) for child in self.ready if PARENTS[child] == key)
        elif better > self.ready[key]:
            self.ready[key] = better
            self.outlived.update(h for h, state in self.held.items() if state == "leased" and h.ref.key == key)

    @rule(one=reservations, other=reservations, refs=chains, at=st.integers(0, 4), exact=st.booleans(), owner=owners)
    def rename(self, one: Handle, other: Handle, refs: list[BlockRef], at: int, exact: bool, owner: str) -> None:
        pairs = dict(zip((one, other), [ref._replace(exact=exact) for ref in refs[at : at + 2]], strict=True))
        if any(self.held.get(h, "leased") == "leased" or h.nbytes != nbytes(ref) for h, ref in pairs.items()):
            return
        before = {handle: handle.ref for handle in pairs}
        results = self.tier.rename(list(pairs), list(pairs.values()), owner, [Hint()] * len(pairs))
        for (handle, ref), result in zip(pairs.items(), results, strict=True):
            better, present = rank(ref, handle.fmt), self.ready.get(ref.key)
            if isinstance(result, Exists):
                assert result.ready == (present is not None and present >= better)
                assert result.ready or any(there >= better for there in self.pending(ref.key))
                assert handle.ref == before[handle]
            else:
                assert result is handle
                assert (handle.ref, handle.owner) == (ref, owner)
                assert present is None or present < better
                assert self.pending(ref.key).count(better) == 1
                self.held[handle] = "reserved"

    @rule(handle=reservations)
    def abort(self, handle: Handle) -> None:
        self.tier.abort([handle])
        if self.held.get(handle) in ("reserved", "written"):
            del self.held[handle]

    # ---- readers

    @rule(target=leases, refs=chains, cut=ranges, owner=owners, exact=st.booleans())
    def acquire(self, refs: list[BlockRef], cut: slice, owner: str, exact: bool):
        keys = [ref.key for ref in refs[cut]]
        good = [key in self.ready and self.ready[key][0] >= exact for key in keys]
        there = self.tier.contains(keys, exact=exact).wait().statuses
        assert there == tuple(Status.OK if found else Status.MISS for found in good)
        done = self.tier.acquire(keys, owner, exact=exact).wait()
        run = (*good, False).index(False)
        assert done.statuses == (Status.OK,) * run + (Status.MISS,) * (len(keys) - run)
        assert [rank(h.ref, h.fmt) for h in done.handles] == [self.ready[key] for key in keys[:run]]
        self.held.update(dict.fromkeys(done.handles, "leased"))
        return multiple(*done.handles)

    @rule(handle=leases)
    def read(self, handle: Handle) -> None:
        if handle in self.held:
            out = memoryview(bytearray(handle.nbytes))
            assert self.tier.read([(handle, out)]).wait().statuses == (Status.OK,)
            assert out == content(handle.ref, handle.nbytes)
            assert self.tier.buffer(handle)[: handle.nbytes] == out

    @rule(handle=consumes(leases))
    def release(self, handle: Handle) -> None:
        if self.held.pop(handle, None):
            self.tier.release([handle])

    @rule(owner=owners)
    def release_owner(self, owner: str) -> None:
        self.tier.release_owner(owner)
        for handle in [handle for handle in self.held if handle.owner == owner]:
            del self.held[handle]

    # ---- order

    @rule(refs=chains, cut=ranges, hint=hints)
    def hint(self, refs: list[BlockRef], cut: slice, hint: Hint) -> None:
        keys = [ref.key for ref in refs[cut]]
        self.tier.hint(keys, [hint] * len(keys))

    @rule(refs=chains, cut=ranges, above=st.booleans())
    def duplicate(self, refs: list[BlockRef], cut: slice, above: bool) -> None:
        self.tier.duplicate([ref.key for ref in refs[cut]], above=above)

    @rule(count=st.integers(0, 30))
    def coldest(self, count: int) -> None:
        keys = self.tier.coldest(count)
        assert keys == self.tier.coldest(count)
        left = dict(self.parent)
        leased = {h.ref.key for h, state in self.held.items() if state == "leased" and h not in self.outlived}
        for key in keys:
            assert key not in leased
            del left[key]
            assert key not in left.values(), "a child would outlive its parent"

    # ---- removal

    @rule(refs=chains, cut=ranges)
    def remove(self, refs: list[BlockRef], cut: slice) -> None:
        keys = [ref.key for ref in refs[cut]]
        expected = tuple(Status.OK if key in self.ready else Status.MISS for key in keys)
        assert self.tier.remove(keys).wait().statuses == expected
        for key in keys:
            self.drop(key)
        self.forget_leases_of_gone()

    @rule(refs=chains)
    def clear(self, refs: list[BlockRef]) -> None:
        self.tier.clear(refs[0].ns).wait()
        for chain in CHAINS:
            for ref in chain:
                if ref.ns == refs[0].ns:
                    self.drop(ref.key)
        self.forget_leases_of_gone()

    def forget_leases_of_gone(self) -> None:
        self.outlived.update(h for h, state in self.held.items() if state == "leased" and h.ref.key not in self.ready)

    # ---- at run time

    @rule(pages=st.integers(1, 2 * PAGES))
    def resize(self, pages: int) -> None:
        beyond = self.tier.resize(pages * 4096)
        self.pages = pages
        assert beyond == max(self.tier.stats()["bytes"] - pages * 4096, 0)

    @rule(name=st.sampled_from(["lru", "arc", "clock2", "s3fifo"]))
    def set_policy(self, name: str) -> None:
        self.tier.set_policy(make_policy(name, PAGES))

    # ---- always

    @invariant()
    def sound(self) -> None:
        self.sync_evictions()
        self.tier.check()
        stats = self.tier.stats()
        states = list(self.held.values())
        assert stats["blocks"] == len(self.ready)
        assert stats["leases"] == states.count("leased")
        assert stats["reservations"] == len(states) - states.count("leased")
        assert stats["capacity_bytes"] == self.pages * 4096
        if stats["bytes"] > stats["capacity_bytes"]:
            assert self.tier.coldest(1) == [], "what could leave a tier that was made smaller did not"

    def teardown(self) -> None:
        for owner in ("x", "y"):
            self.tier.release_owner(owner)
        self.tier.clear().wait()
        assert self.tier.stats()["bytes"] == 0
        self.tier.check()
        self.tier.close()


class ArcHostTierMachine(HostTierMachine):
    policy = "arc"


class S3FifoHostTierMachine(HostTierMachine):
    policy = "s3fifo"


TestHostTierMachine = HostTierMachine.TestCase
TestHostTierMachine.settings = settings(max_examples=80, stateful_step_count=50)
TestArcHostTierMachine = ArcHostTierMachine.TestCase
TestS3FifoHostTierMachine = S3FifoHostTierMachine.TestCase
for machine in (ArcHostTierMachine, S3FifoHostTierMachine):
    machine.TestCase.settings = settings(max_examples=25, stateful_step_count=50)
