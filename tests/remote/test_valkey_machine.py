"""Two remote tiers on one server beside a dictionary: whatever they and the server do, they agree on what is there."""

import contextlib
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from valkey_world import PREFIX, Server, open_tier

from kvtier.remote import ENVELOPE_BYTES, record_name
from kvtier.testing.blocks import chain_refs, content, put, run_length
from kvtier.tiers import BlockRef, Handle, Status

BLOCK = 700
LENGTH = 5
CHAINS = st.integers(0, 2)
WHO = st.integers(0, 1)
LENGTHS = st.integers(1, LENGTH)
_started: list[Server] = []


def refs_of(chain: int, length: int, exact: bool = True) -> list[BlockRef]:
    """Chains 0 and 1 are of one namespace, chain 2 is of another."""
    return chain_refs(LENGTH, seed=chain, salt="other" if chain == 2 else "", exact=exact)[:length]


class RemoteMachine(RuleBasedStateMachine):
    """model: name of a record -> whether its bytes are sound."""

    @initialize()
    def start(self) -> None:
        if not _started:
            _started.append(Server(Path(tempfile.mkdtemp(prefix="kvtier-machine-")) / "valkey"))
        self.server = _started[0]
        self.client = self.server.client()
        self.client.flushall()
        self.tiers = [open_tier(self.server.url), open_tier(self.server.url)]
        self.model: dict[bytes, bool] = {}
        self.held: list[tuple[int, Handle, bool]] = []

    def _found(self, ref: BlockRef, *, exact: bool) -> bytes | None:
        """The name of the record that a look-up finds."""
        names = [record_name(ref.key, exact=True)] + ([] if exact else [record_name(ref.key, exact=False)])
        return next((name for name in names if name in self.model), None)

    def _run(self, refs: list[BlockRef], *, exact: bool) -> list[bytes]:
        names: list[bytes] = []
        for ref in refs:
            name = self._found(ref, exact=exact)
            if name is None:
                break
            names.append(name)
        return names

    @rule(who=WHO, chain=CHAINS, length=LENGTHS, exact=st.booleans())
    def put(self, who: int, chain: int, length: int, exact: bool) -> None:
        refs = refs_of(chain, length, exact)
        results = put(self.tiers[who], refs, BLOCK)
        self.tiers[who].flush()
        for ref, result in zip(refs, results, strict=True):
            own, lossy = record_name(ref.key, exact=exact), record_name(ref.key, exact=False)
            known = own in self.model or record_name(ref.key, exact=True) in self.model
            assert isinstance(result, Handle) == (not known), (ref, result)
            if known:
                continue
            self.model[own] = True
            if exact and not any(self._is_held(who, lossy)):
                # What an exact record makes superfluous goes, with its last lease in that process.
                self.model.pop(lossy, None)

    def _is_held(self, who: int, name: bytes) -> list[Handle]:
        return [handle for holder, handle, _ in self.held if holder == who and handle.name == name]

    @rule(who=WHO, chain=CHAINS, length=LENGTHS, exact=st.booleans())
    def load(self, who: int, chain: int, length: int, exact: bool) -> None:
        refs = refs_of(chain, length)
        names = self._run(refs, exact=exact)
        done = self.tiers[who].acquire([ref.key for ref in refs], "reader", exact=exact).wait(30)
        assert [handle.name for handle in done.handles] == names
        assert done.statuses == (Status.OK,) * len(names) + (Status.MISS,) * (length - len(names))
        self._read(who, done.handles)
        self.tiers[who].release(done.handles)

    def _read(self, who: int, handles: tuple[Handle, ...] | list[Handle]) -> None:
        buffers = [memoryview(bytearray(BLOCK)) for _ in handles]
        statuses = self.tiers[who].read(list(zip(handles, buffers, strict=True))).wait(30).statuses
        for handle, buffer, status in zip(handles, buffers, statuses, strict=True):
            sound = self.model.get(handle.name)
            assert status is {True: Status.OK, False: Status.CORRUPT, None: Status.MISS}[sound]
            if status is Status.OK:
                assert buffer == content(handle.ref, BLOCK)
            elif status is Status.CORRUPT:
                del self.model[handle.name]

    @rule(who=WHO, chain=CHAINS, length=LENGTHS, exact=st.booleans())
    def lease(self, who: int, chain: int, length: int, exact: bool) -> None:
        done = self.tiers[who].acquire([ref.key for ref in refs_of(chain, length)], "holder", exact=exact).wait(30)
        self.held += [(who, handle, exact) for handle in done.handles]

    @rule(who=WHO)
    def use_and_release(self, who: int) -> None:
        mine = [handle for holder, handle, _ in self.held if holder == who]
        # One record may be leased several times, and damage is found by the first of them.
        for handle in mine:
            self._read(who, [handle])
        self.tiers[who].release(mine)
        self.tiers[who].flush()
        self.held = [one for one in self.held if one[0] != who]
        self._forget_unnamed()

    def _forget_unnamed(self) -> None:
        """Records that were only kept by leases are gone now: which ones, the server knows."""
        there = {name[len(PREFIX) :] for name in self.client.keys()}  # noqa: SIM118
        gone = set(self.model) - there
        assert all(not name.endswith(b"e") for name in gone), "an exact record went with a lease"
        for name in gone:
            del self.model[name]

    @rule(who=WHO, chain=CHAINS, at=st.integers(0, LENGTH - 1))
    def remove(self, who: int, chain: int, at: int) -> None:
        ref = refs_of(chain, LENGTH)[at]
        names = [record_name(ref.key, exact=exact) for exact in (True, False)]
        if any(self._is_held(who, name) for name in names):
            return
        there = any(name in self.model for name in names)
        statuses = self.tiers[who].remove([ref.key]).wait(30).statuses
        assert statuses == (Status.OK if there else Status.MISS,)
        for name in names:
            self.model.pop(name, None)

    @rule(who=WHO, chain=CHAINS)
    def clear(self, who: int, chain: int) -> None:
        if any(holder == who for holder, _, _ in self.held):
            return
        refs = refs_of(chain, 1)
        self.tiers[who].clear(refs[0].ns).wait(30)
        keys = {ref.key for one in ((2,) if chain == 2 else (0, 1)) for ref in refs_of(one, LENGTH)}
        self.model = {name: sound for name, sound in self.model.items() if name[:-1] not in keys}

    @rule(chain=CHAINS, at=st.integers(0, LENGTH - 1))
    def server_drops(self, chain: int, at: int) -> None:
        name = record_name(refs_of(chain, LENGTH)[at].key, exact=True)
        self.client.delete(PREFIX + name)
        self.model.pop(name, None)

    @rule(chain=CHAINS, at=st.integers(0, LENGTH - 1))
    def server_damages(self, chain: int, at: int) -> None:
        name = record_name(refs_of(chain, LENGTH)[at].key, exact=True)
        if self.model.get(name):
            self.client.setrange(PREFIX + name, ENVELOPE_BYTES + 10, b"??")
            self.model[name] = False

    @rule()
    def server_starts_empty(self) -> None:
        self.client.flushall()
        self.model.clear()

    @invariant()
    def look_ups_agree(self) -> None:
        for who, tier in enumerate(self.tiers):
            hidden = {handle.name for holder, handle, _ in self.held if holder == who}
            for chain in range(3):
                refs = refs_of(chain, LENGTH)
                if not hidden.intersection(record_name(ref.key, exact=False) for ref in refs):
                    assert run_length(tier, refs) == len(self._run(refs, exact=False))

    def teardown(self) -> None:
        for tier in getattr(self, "tiers", ()):
            tier.close()
        with contextlib.suppress(AttributeError):
            self.client.close()


TestRemoteMachine = RemoteMachine.TestCase
TestRemoteMachine.settings = settings(max_examples=25, stateful_step_count=20)


def teardown_module() -> None:
    for one in _started:
        one.kill()
    _started.clear()
