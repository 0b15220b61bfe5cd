"""Runs against models: the store against sets of runs, the arithmetic against counting, the table against bit flips."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from objects_world import objects_in, path_of
from store_world import BLOCK, NS, content, fetched, key, nothing_is_held

from kvtier.config.remote import RemoteSettings
from kvtier.cpu import HostTier
from kvtier.remote import open_remote
from kvtier.remote.envelope import ENVELOPE_BYTES
from kvtier.remote.objects.packing import pack_table, table_bytes, unpack_table
from kvtier.store import TieredStore
from kvtier.store.runs import columns, interleaved, run_ends, whole_runs
from kvtier.tiers import BlockRef

RUN, DEPTH, FORK = 4, 11, 6
CHAINS = ("a", "b", "a'", "b'")

chains = st.sampled_from(CHAINS)


def chain_keys(chain: str, stop: int = DEPTH) -> list[bytes]:
    """A chain with a mark has its first blocks in common with the one without."""
    return [key(chain if depth >= FORK else chain[0], depth) for depth in range(stop)]


def chain_items(chain: str, stop: int) -> list[tuple[BlockRef, memoryview]]:
    named = chain_keys(chain, stop)
    refs = [BlockRef(name, NS, at, named[at - 1] if at else None, True) for at, name in enumerate(named)]
    return [(ref, memoryview(content(ref.key))) for ref in refs]


class RunsMachine(RuleBasedStateMachine):
    """Host is large: what was put and completed a run is below, until it is deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.remote = open_remote(RemoteSettings(url="memory:///", options=f"run={RUN}", absent_ttl=0))
        self.store = TieredStore(HostTier(256 * BLOCK), [self.remote])
        self.below: dict[bytes, list[bytes]] = {}

    @rule(chain=chains, stop=st.integers(1, DEPTH))
    def put(self, chain: str, stop: int) -> None:
        assert self.store.put(chain_items(chain, stop)).result(30).dropped == 0
        named = chain_keys(chain, stop)
        for end in range(RUN - 1, stop, RUN):
            self.below[named[end]] = named[end - RUN + 1 : end + 1]

    @rule(chain=chains, at=st.integers(0, DEPTH - 1))
    def delete(self, chain: str, at: int) -> None:
        self.store.flush()
        gone = chain_keys(chain)[at]
        self.store.delete([gone])
        self.below = {last: run for last, run in self.below.items() if gone not in run}

    @rule()
    def host_is_emptied(self) -> None:
        self.store.flush()
        self.store.clear("host")

    @rule(chain=chains, first=st.integers(0, DEPTH - 1))
    def load(self, chain: str, first: int) -> None:
        """From below alone: the whole runs from there on, and not a block more."""
        self.host_is_emptied()
        named, held = chain_keys(chain), self._held(chain, first)
        # A look-up leaps: what it finds beyond a hole is no promise.
        assert len(self.store.match(named[first:], depth=first).tiers) >= held
        lease = self.store.acquire(named[first:], "test", depth=first).result(30)
        assert len(lease) == held
        self.store.release(lease)
        assert fetched(self.store, named) == self._held(chain, 0)

    def _held(self, chain: str, first: int) -> int:
        """How many blocks from `first` on are in leading runs."""
        named, stop = chain_keys(chain), first // RUN * RUN
        while stop + RUN <= DEPTH and named[stop + RUN - 1] in self.below:
            stop += RUN
        return max(stop - first, 0)

    @rule(chain=chains)
    def load_from_anywhere(self, chain: str) -> None:
        found = len(self.store.acquire(chain_keys(chain), "test").result(30))
        self.store.release_owner("test")
        assert fetched(self.store, chain_keys(chain)) >= found

    @invariant()
    def below_are_whole_runs_alone(self) -> None:
        self.store.flush()
        assert objects_in(self.remote) == sorted(path_of(self.remote, last + b"e") for last in self.below)
        assert nothing_is_held(self.store)

    def teardown(self) -> None:
        self.store.close()


TestRuns = RunsMachine.TestCase
TestRuns.settings = settings(max_examples=25, stateful_step_count=20)


@given(
    blocks=st.integers(0, 20),
    first=st.integers(0, 40),
    parts=st.integers(1, 3),
    depth=st.integers(0, 9),
    run=st.integers(1, 5),
)
@settings(max_examples=50)
def test_columns_are_what_runs_can_be_found_by(blocks: int, first: int, parts: int, depth: int, run: int) -> None:
    keys = [b"%d.%d" % (block, part) for block in range(depth, depth + blocks) for part in range(parts)]
    first = min(first, max(len(keys) - 1, 0))
    found = columns(keys, first, parts, depth, run)
    whole = (depth + blocks) // run * run
    for at, column in enumerate(found):
        rest = [(block, part) for block in range(depth, depth + blocks) for part in range(parts)][first:][at::parts]
        assert column == [b"%d.%d" % (block, part) for block, part in rest if block < whole]
    leading, rest = interleaved(found)
    assert leading == keys[first : max((whole - depth) * parts, first)] if run == 1 or blocks else leading == []
    assert rest == []
    assert [depth + end for end in run_ends(blocks, depth, run)] == [
        block for block in range(depth, depth + blocks) if block % run == run - 1
    ]


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4))
@settings(max_examples=50)
def test_what_is_interleaved_is_the_leading_part(lengths: list[int]) -> None:
    parts = len(lengths)
    found = [[(block, part) for block in range(length)] for part, length in enumerate(lengths)]
    have = {item for column in found for item in column}
    expected = []
    for item in ((block, part) for block in range(7) for part in range(parts)):
        if item not in have:
            break
        expected.append(item)
    leading, rest = interleaved(found)
    assert leading == expected
    assert sorted([*leading, *rest]) == sorted(have)


@given(run=st.integers(1, 4), kept=st.lists(st.booleans(), max_size=5))
@settings(max_examples=50)
def test_whole_runs(run: int, kept: list[bool]) -> None:
    items = chain_items("a", len(kept) * run)
    flags = [flag for flag in kept for _ in range(run)]
    assert whole_runs(items, flags, run) == [item for item, flag in zip(items, flags, strict=True) if flag]
    for at in range(len(flags)):
        fewer = [flag and place != at for place, flag in enumerate(flags)]
        without = [flag and place // run != at // run for place, flag in enumerate(flags)]
        assert whole_runs(items, fewer, run) == whole_runs(items, without, run)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), data=st.data())
@settings(max_examples=50)
def test_a_damaged_table_is_none(sizes: list[int], data: st.DataObject) -> None:
    run = len(sizes)
    names = [bytes([at]) * 16 + b"e" for at in range(run)]
    heads = [bytes([at]) * ENVELOPE_BYTES for at in range(run)]
    packed = pack_table(names, heads, sizes)
    whole = table_bytes(run) + sum(sizes)
    table = unpack_table(names[-1], packed, whole, run)
    assert table is not None
    assert [record.nbytes for record in table.records] == sizes
    assert table.records[0].offset == len(packed) == table_bytes(run)
    bit = data.draw(st.integers(0, 8 * len(packed) - 1))
    flipped = bytearray(packed)
    flipped[bit // 8] ^= 1 << bit % 8
    assert unpack_table(names[-1], bytes(flipped), whole, run) is None
    assert unpack_table(names[-1], packed[: data.draw(st.integers(0, len(packed) - 1))], whole, run) is None
    assert unpack_table(names[-1], packed, data.draw(st.integers(0, 100).filter(lambda n: n != whole)), run) is None
    assert unpack_table(b"?" * 17, packed, whole, run) is None
    assert unpack_table(names[-1], packed, whole, run + 1) is None
