"""What the events of a tier add up to is what the tier holds, at every moment, whatever happens to it."""

import random
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import test_host_tier_machine as host
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from kvtier.cpu import HostTier
from kvtier.events import EventLog
from kvtier.hints import Hint
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.nvme.space import Change
from kvtier.policies import make_policy
from kvtier.testing.blocks import chain_refs, content, load, put
from kvtier.tiers import BlockRef, Handle, Status, Tier

CHAINS = [chain_refs(8, seed=seed, salt=salt) for seed in range(3) for salt in ("a", "b")]
REFS = {ref.key: ref for chain in CHAINS for ref in chain}
SPACES = sorted({ref.ns for ref in REFS.values()})
BLOCK = 16 * 4096


class Fold:
    """A follower's view: key -> whether it is exact."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.sequence = 0
        self.view: dict[bytes, bool] = {}
        self.spaces: dict[bytes, int] = {}

    def catch_up(self) -> dict[bytes, bool]:
        while True:
            events, gap = self.log.since(self.sequence, 7)
            assert not gap
            if not events:
                return self.view
            for event in events:
                assert event.sequence == self.sequence + 1
                self.sequence = event.sequence
                if event.kind == "cleared":
                    gone: Iterable[bytes] = [key for key, ns in self.spaces.items() if event.ns in (None, ns)]
                else:
                    gone = event.keys if event.kind == "removed" else ()
                for key in gone:
                    assert event.kind == "cleared" or key in self.view, "removed, but was not there"
                    self.view.pop(key, None)
                    self.spaces.pop(key, None)
                self.view |= {ref.key: ref.exact for ref in event.refs}
                self.spaces |= {ref.key: ref.ns for ref in event.refs}


class FoldedHostMachine(host.HostTierMachine):
    policy = "s3fifo"

    def __init__(self) -> None:
        super().__init__()
        self.tier.close()
        self.log = EventLog(1 << 20)
        nbytes = host.PAGES * 4096
        policy = make_policy(self.policy, host.PAGES)
        self.tier = HostTier(nbytes, policy=policy, limit_bytes=2 * nbytes, events=self.log)
        self.fold = Fold(self.log)

    @rule(refs=host.chains, cut=host.ranges, exact=st.booleans())
    def put(self, refs: list[BlockRef], cut: slice, exact: bool) -> None:
        """All at once: left to chance, hardly a block would ever become ready."""
        self.reserve(refs=refs, cut=cut, exact=exact, fmt="raw", owner="x", hint=Hint())
        for handle in [handle for handle, state in self.held.items() if state == "reserved"]:
            self.write(handle=handle)
            self.commit(handle=handle)
            # A tier that was made smaller evicts with every commit.
            self.sync_evictions()

    @invariant()
    def adds_up(self) -> None:
        self.sync_evictions()
        assert self.fold.catch_up() == {key: better[0] for key, better in self.ready.items()}


TestFoldedHost = FoldedHostMachine.TestCase
TestFoldedHost.settings = settings(max_examples=40, stateful_step_count=30)


def held(tier: Tier) -> dict[bytes, bool]:
    keys = list(REFS)
    there = tier.contains(keys).wait().statuses
    exact = tier.contains(keys, exact=True).wait().statuses
    return {key: also is Status.OK for key, found, also in zip(keys, there, exact, strict=True) if found is Status.OK}


def change(tier: Tier, verb: str, chain: int, start: int, stop: int) -> None:
    refs = CHAINS[chain][start : start + stop]
    match verb:
        case "put":
            put(tier, refs, BLOCK, f"writer{threading.get_ident()}")
        case "lossy":
            put(tier, [ref._replace(exact=False) for ref in refs], BLOCK, f"writer{threading.get_ident()}")
        case "remove":
            tier.remove([ref.key for ref in refs]).wait()
        case "read":
            load(tier, [ref.key for ref in refs], f"reader{threading.get_ident()}")
        case "clear":
            tier.clear(SPACES[chain % len(SPACES)]).wait()
        case "drop":
            reserved = tier.reserve(refs, [BLOCK] * len(refs), ["raw"] * len(refs), "gone")
            tier.abort([handle for handle in reserved if isinstance(handle, Handle)])


VERBS = ["put"] * 6 + ["lossy", "lossy", "remove", "read", "clear", "drop"]
changes = st.tuples(st.sampled_from(VERBS), st.integers(0, len(CHAINS) - 1), st.integers(0, 7), st.integers(1, 8))


@given(st.lists(changes, min_size=5, max_size=25))
@settings(max_examples=30)
def test_what_nvme_tells_adds_up(steps: list[tuple[str, int, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        log = EventLog(1 << 20)
        tier = NvmeTier(Path(place), 24 * BLOCK, NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0), events=log)
        try:
            fold = Fold(log)
            for step in steps:
                change(tier, *step)
                assert fold.catch_up() == held(tier)
        finally:
            tier.close()


def test_what_threads_do_to_nvme_at_once_adds_up_in_the_order_of_the_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell, chances = Change.tell, random.Random(5)

    def late(self: Change, *arguments: Any) -> None:
        # Whoever committed later could be first to tell.
        time.sleep(chances.random() * 0.003)
        tell(self, *arguments)

    monkeypatch.setattr(Change, "tell", late)
    log = EventLog(1 << 20)
    tier = NvmeTier(tmp_path, 24 * BLOCK, NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0), events=log)
    try:

        def work(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(40):
                verb, chain = chance.choice(VERBS), chance.randrange(2)
                change(tier, verb, chain, chance.randrange(4), chance.randrange(1, 8))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert Fold(log).catch_up() == held(tier)
        reasons = {event.reason for event in log.since(0, 1 << 20).events}
        assert {"removed", "cleared", ""} <= reasons
    finally:
        tier.close()


def test_a_damaged_block_is_told_as_damaged() -> None:
    log = EventLog()
    tier = HostTier(4 * BLOCK, events=log)
    put(tier, CHAINS[0][:2], BLOCK)
    handle = tier.acquire([CHAINS[0][0].key], "x").wait().handles[0]
    tier._memories([handle])[0][:4] = b"oops"
    tier.release([handle])
    assert tier.acquire([CHAINS[0][0].key], "x").wait().statuses == (Status.CORRUPT,)
    event = log.since(0).events[-1]
    assert (event.kind, event.tier, event.reason) == ("removed", "host", "damaged")
    assert set(event.keys) == {ref.key for ref in CHAINS[0][:2]}, "the block below it went with it"
    tier.close()
    assert log.since(0).events[-1].reason == "closed"


def test_one_call_of_a_tier_is_one_event() -> None:
    log = EventLog()
    tier = HostTier(8 * BLOCK, events=log)
    put(tier, CHAINS[0], BLOCK)
    assert [(event.kind, len(event.refs)) for event in log.since(0).events] == [("stored", 8)]
    before = log.last
    put(tier, CHAINS[2], BLOCK)
    assert [(event.kind, event.reason, len(event.keys)) for event in log.since(before).events] == [
        ("removed", "capacity", 8),
        ("stored", "", 8),
    ]
    assert content(CHAINS[2][0], BLOCK) == load(tier, [CHAINS[2][0].key])[0][1]
    tier.close()


def test_a_better_version_replaces_without_a_removal(tmp_path: Path) -> None:
    log = EventLog()
    lossy = [ref._replace(exact=False) for ref in CHAINS[0][:2]]
    nvme = NvmeTier(tmp_path, 24 * BLOCK, NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0), events=log)
    for tier in (HostTier(8 * BLOCK, events=log), nvme):
        put(tier, lossy, BLOCK)
        put(tier, CHAINS[0][:2], BLOCK)
        told = [(event.kind, [ref.exact for ref in event.refs]) for event in log.since(0).events]
        assert told[-2:] == [("stored", [False, False]), ("stored", [True, True])]
        tier.close()
