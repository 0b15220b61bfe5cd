"""BlockPool and BlockTable against a model of lists and dictionaries, with simulated block contents.

A slot's content is the token prefix that its KV would be computed from, a block's key is the prefix up to its end:
so a block that is reused, overwritten or named wrongly shows as content that belongs to other tokens.
"""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvtier.errors import CapacityError, LeaseError
from kvtier.gpu import BlockPool, BlockTable

# Equal beginnings are what makes names meet.
TOKENS = st.integers(0, 12).map(lambda count: [0] * count) | st.lists(st.integers(0, 1), max_size=12)


def _key(prefix):
    return bytes([len(prefix), *prefix])


class _Sequence:
    def __init__(self, table, tokens):
        self.table = table
        self.tokens = list(tokens)


class BlockPoolMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(num_blocks=st.integers(1, 9), block_size=st.integers(1, 4))
    def start(self, num_blocks, block_size):
        self.size = block_size
        self.pool = BlockPool(num_blocks, block_size)
        self.content = {block: [None] * block_size for block in range(num_blocks)}
        self.live = []
        self.names = {}  # key -> (block, exact)
        self.lru = []  # free blocks with a name, least recently freed first

    # ---- the model

    def references(self):
        return Counter(block for sequence in self.live for block in sequence.table.ids)

    def named(self, block):
        return next((key for key, (holder, _) in self.names.items() if holder == block), None)

    def taken(self, blocks):
        """The pool gave these out: names of free blocks go last, in the order of their release."""
        free_and_nameless = self.pool.num_blocks - len(self.held_before) - len(self.lru)
        evicted = blocks[free_and_nameless:]
        assert evicted == self.lru[: len(evicted)]
        assert all(self.named(block) is None for block in blocks[:free_and_nameless])
        del self.lru[: len(evicted)]
        for block in evicted:
            del self.names[self.named(block)]
        for block in blocks:
            self.content[block] = [("garbage", block)] * self.size

    def dropped(self, blocks):
        """Called after the tables changed: which of these are free now, the last one first."""
        references = self.references()
        self.lru += [block for block in reversed(blocks) if not references[block] and self.named(block) is not None]

    # ---- tables

    @rule(target=sequences)
    def new(self):
        sequence = _Sequence(BlockTable(self.pool), [])
        self.live.append(sequence)
        return sequence

    @rule(sequence=sequences, data=st.data(), tokens=TOKENS)
    def extend(self, sequence, data, tokens):
        start = data.draw(st.integers(0, len(sequence.tokens)))
        stop, table = start + len(tokens), sequence.table
        before, free = list(table.ids), self.pool.free_blocks
        self.held_before = set(self.references())
        missing = table.missing(stop, start)
        if missing > free:
            with pytest.raises(CapacityError):
                table.extend(stop, start)
            assert list(table.ids) == before
            return
        kept = {block: list(slots) for block, slots in self.content.items()}
        copies = table.extend(stop, start)
        fresh = [block for at, block in enumerate(table.ids) if at >= len(before) or block != before[at]]
        assert len(fresh) == missing == len(set(fresh))
        self.taken(fresh)
        for copy in copies:
            assert copy.dst in fresh
            self.content[copy.dst] = kept[copy.src]
        self.dropped([old for old, new in zip(before, table.ids, strict=False) if old != new])
        sequence.tokens[start:] = tokens
        for at in range(start, stop):
            block = table.ids[at // self.size]
            assert self.pool.is_writable(block)
            self.content[block][at % self.size] = tuple(sequence.tokens[: at + 1])

    @rule(sequence=sequences, beyond=st.integers(1, 5))
    def extend_past_a_gap(self, sequence, beyond):
        start = sequence.table.capacity_tokens + beyond
        with pytest.raises(LeaseError):
            sequence.table.extend(start + 1, start)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        forked = _Sequence(sequence.table.fork(), sequence.tokens)
        self.live.append(forked)
        return forked

    @rule(sequence=sequences, data=st.data())
    def truncate(self, sequence, data):
        keep = data.draw(st.integers(0, len(sequence.tokens)))
        before = list(sequence.table.ids)
        sequence.table.truncate(keep)
        del sequence.tokens[keep:]
        assert len(sequence.table.ids) == min(len(before), -(-keep // self.size))
        self.dropped(before[len(sequence.table.ids) :])

    @rule(sequence=consumes(sequences))
    def release(self, sequence):
        before = list(sequence.table.ids)
        self.live.remove(sequence)
        sequence.table.release()
        sequence.table.release()
        self.dropped(before)

    @rule(block=st.integers(-2, 10))
    def release_what_nobody_holds(self, block):
        held = self.references()[block]
        with pytest.raises(LeaseError):
            self.pool.release([block] * (held + 1))

    # ---- names

    @rule(sequence=sequences, data=st.data(), exact=st.booleans())
    def publish(self, sequence, data, exact):
        full = len(sequence.tokens) // self.size
        if not full:
            return
        at = data.draw(st.integers(0, full - 1))
        block, key = sequence.table.ids[at], _key(sequence.tokens[: (at + 1) * self.size])
        self.pool.publish(block, key, exact)
        holder, holder_exact = self.names.get(key, (None, False))
        if holder is None or (holder != block and exact and not holder_exact):
            self.names[key] = (block, exact)
            self.lru = [free for free in self.lru if free != holder]

    @rule(sequence=sequences)
    def publish_under_another_name(self, sequence):
        for block in sequence.table.ids:
            if self.named(block) is not None:
                with pytest.raises(LeaseError):
                    self.pool.publish(block, b"another", True)

    @rule(target=sequences, tokens=TOKENS, exact=st.booleans())
    def match(self, tokens, exact):
        keys = [_key(tokens[:stop]) for stop in range(self.size, len(tokens) + 1, self.size)]
        expected = []
        for key in keys:
            block, is_exact = self.names.get(key, (None, False))
            if block is None or (exact and not is_exact):
                break
            expected.append(block)
        found = self.pool.match(keys, exact=exact)
        assert found == expected
        self.lru = [block for block in self.lru if block not in found]
        if not found:
            return multiple()
        sequence = _Sequence(BlockTable(self.pool, found), tokens[: len(found) * self.size])
        self.live.append(sequence)
        return sequence

    @rule()
    def forget(self):
        assert self.pool.forget() == len(self.lru)
        self.names = {key: held for key, held in self.names.items() if held[0] not in self.lru}
        self.lru = []

    # ---- what always holds

    @invariant()
    def books_are_right(self):
        self.pool.check()
        references = self.references()
        for block in self.content:
            assert self.pool.references(block) == references[block]
            name = self.named(block)
            assert self.pool.is_published(block) == (name is not None)
            assert self.pool.is_exact(block) == (name is not None and self.names[name][1])
            assert self.pool.is_writable(block) == (references[block] == 1 and name is None)
        assert self.pool.used_blocks == len(references)
        assert self.pool.free_blocks + self.pool.used_blocks == self.pool.num_blocks
        assert self.pool.cached_blocks == len(self.names)

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for sequence in self.live:
            assert sequence.table.capacity_tokens >= len(sequence.tokens)
            for at in range(len(sequence.tokens)):
                slot = self.content[sequence.table.ids[at // self.size]][at % self.size]
                assert slot == tuple(sequence.tokens[: at + 1])

    @invariant()
    def published_blocks_hold_what_their_name_says(self):
        for key, (block, _) in self.names.items():
            assert _key(self.content[block][-1]) == key

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for sequence in self.live:
            sequence.table.release()
        assert self.pool.free_blocks == self.pool.num_blocks
        self.pool.check()


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=150, stateful_step_count=40)
