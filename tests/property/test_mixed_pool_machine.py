"""MixedBlockPool and MixedBlockTable against a model: blocks of which some layers keep the last window only.

A place's content is the token prefix that its KV would be computed from, in blocks as in slots; a block's key is the
prefix up to its end. So whatever was reused too early shows as content of other tokens.
"""

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvtier.errors import CapacityError, LeaseError
from kvtier.gpu.mixed import MixedBlockPool
from kvtier.gpu.pool import Amount
from kvtier.gpu.windows import most_blocks
from kvtier.hooks import NO_BLOCK

# Texts of few kinds, so that prefixes meet.
TEXTS = [[0] * 40, [0] * 9 + [1] * 31, [1] * 40]
TOKENS = st.builds(lambda text, count: text[:count], st.sampled_from(TEXTS), st.integers(0, 24))
FEW = st.lists(st.integers(0, 1), max_size=5)


def _key(prefix):
    return bytes([len(prefix), *prefix])


class _Sequence:
    def __init__(self, table, tokens, behind=0):
        self.table = table
        self.tokens = list(tokens)
        self.behind = behind


class MixedPoolMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(
        num_blocks=st.integers(1, 12), spare=st.integers(0, 4), size=st.integers(1, 4), window=st.integers(1, 9)
    )
    def start(self, num_blocks, spare, size, window):
        self.size, self.window = size, window
        slots = most_blocks(num_blocks * size, 1, size, window) + spare
        self.pool = MixedBlockPool(num_blocks, slots, size, window)
        self.content = {block: [None] * size for block in range(num_blocks)}
        self.slots = {slot: [None] * size for slot in range(slots)}
        self.live = []
        self.names = {}  # key -> (block, exact)
        self.where = {}  # block -> the slot of its windowed part
        self.kept = []  # blocks that nobody reads and that have a windowed part, the one left behind first first

    # ---- the model

    def references(self):
        return Counter(block for sequence in self.live for block in sequence.table.ids)

    def readers(self):
        return Counter(block for sequence in self.live for block in sequence.table.ids[sequence.behind :])

    def named(self, block):
        return next((key for key, (holder, _) in self.names.items() if holder == block), None)

    def first_read(self, num_tokens):
        """The first block that the token after so many attends to."""
        return max(0, num_tokens + 1 - self.window) // self.size

    def settle(self, left=()):
        """After a change: what became of the parts of blocks that were read until now, the last one first."""
        references, readers = self.references(), self.readers()
        # A block that is free and was given to somebody else has no name any more.
        self.names = {key: held for key, held in self.names.items() if self.pool.is_published(held[0])}
        self.kept = [block for block in self.kept if not readers[block]]
        self.kept += [block for block in reversed(left) if not readers[block] and block not in self.kept]
        self.kept = [block for block in self.kept if self.named(block) is not None]
        for block in list(self.where):
            if not readers[block] and self.named(block) is None:
                del self.where[block]
        return references

    def written(self, sequence, start, stop):
        for at in range(start, stop):
            prefix, block = tuple(sequence.tokens[: at + 1]), sequence.table.ids[at // self.size]
            assert self.pool.is_writable(block)
            self.content[block][at % self.size] = prefix
            slot = sequence.table.windowed_ids[at // self.size]
            if slot != NO_BLOCK:
                self.slots[slot][at % self.size] = prefix

    def allocated(self, fresh, idle):
        """These blocks got slots: first idle ones of no block, then those of the blocks left behind first."""
        evicted = self.kept[: max(0, len(fresh) - (idle - len(self.kept)))]
        for block in evicted:
            del self.where[block]
        del self.kept[: len(evicted)]
        for block in fresh:
            slot = self.pool.slot(block)
            assert slot not in self.where.values()
            self.where[block] = slot
            self.slots[slot] = [("garbage", block)] * self.size
            self.content[block] = [("garbage", block)] * self.size

    # ---- tables

    @rule(target=sequences)
    def new(self):
        sequence = _Sequence(self.pool.table(), [])
        self.live.append(sequence)
        return sequence

    @rule(target=sequences, text=TOKENS, exact=st.booleans(), chunk=st.integers(1, 12))
    def compute(self, text, exact, chunk):
        """A whole life, as the engine has it: found as far as possible, the rest computed chunk by chunk, and named."""
        sequence = self.found(text, exact=exact) or self.new()
        while len(sequence.tokens) < len(text):
            at = len(sequence.tokens)
            self.extend(sequence, text[at : at + chunk], 0)
            if len(sequence.tokens) == at:
                break
            for block in range(len(sequence.tokens) // self.size):
                self.name(sequence, block, exact)
            self.leave_behind(sequence)
        return sequence

    @rule(sequence=sequences, tokens=FEW, back=st.integers(0, 2))
    def extend(self, sequence, tokens, back):
        """As a step does: nothing is written before the window's first token."""
        start = max(len(sequence.tokens) - back, sequence.behind * self.size, 0)
        stop, table, before = start + len(tokens), sequence.table, list(sequence.table.ids)
        missing, idle = table.missing(stop, start), self.pool.num_slots - self.pool.used_slots
        if missing > self.pool.free_blocks:
            with pytest.raises(CapacityError):
                table.extend(stop, start)
            assert list(table.ids) == before
            return
        kept = {block: list(slots) for block, slots in self.content.items()}
        kept_slots = {slot: list(values) for slot, values in self.slots.items()}
        named_and_free = [block for block in self.kept if not self.references()[block]]
        copies = table.extend(stop, start)
        fresh = [block for at, block in enumerate(table.ids) if at >= len(before) or block != before[at]]
        assert len(fresh) == missing
        # What was named and free and is somebody's now lost its name, and its windowed part with it.
        for block in set(named_and_free) & set(fresh):
            self.kept.remove(block)
            del self.where[block]
        self.names = {key: held for key, held in self.names.items() if held[0] not in fresh}
        self.allocated(fresh, idle)
        for copy in copies:
            self.content[copy.dst] = kept[copy.src]
            self.slots[copy.windowed_dst] = kept_slots[copy.windowed_src]
            assert copy.windowed_dst == self.where[copy.dst]
        sequence.tokens[start:] = tokens
        self.settle([old for old, new in zip(before, table.ids, strict=False) if old != new])
        self.written(sequence, start, stop)

    @rule(sequence=sequences)
    def leave_behind(self, sequence):
        behind = max(0, len(sequence.tokens) - self.window) // self.size
        left = sequence.table.ids[sequence.behind : behind]
        sequence.table.leave_behind(len(sequence.tokens))
        sequence.behind = max(sequence.behind, behind)
        assert list(sequence.table.windowed_ids).count(NO_BLOCK) == sequence.behind
        self.settle(left)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        forked = _Sequence(sequence.table.fork(), sequence.tokens, sequence.behind)
        self.live.append(forked)
        return forked

    @rule(sequence=sequences, back=st.integers(0, 3))
    def roll_back(self, sequence, back):
        keep = max(len(sequence.tokens) - back, sequence.behind * self.size)
        before = list(sequence.table.ids)
        sequence.table.truncate(keep)
        del sequence.tokens[keep:]
        self.settle(before[len(sequence.table.ids) :])

    @rule(sequence=consumes(sequences))
    def release(self, sequence):
        left = list(sequence.table.ids)[sequence.behind :]
        self.live.remove(sequence)
        sequence.table.release()
        sequence.table.release()
        self.settle(left)

    @rule(tokens=st.integers(1, 40))
    def load(self, tokens):
        """What comes from elsewhere has windowed parts in its last window only."""
        table, first = self.pool.table(), self.first_read(tokens)
        blocks = -(-tokens // self.size)
        table.leave_behind(tokens + 1)
        inside, before = max(0, blocks - first), list(table.ids)
        if not self.pool.fits(Amount(blocks, inside)):
            with pytest.raises(CapacityError):
                table.extend(tokens, 0)
            assert list(table.ids) == before
            return
        used = self.pool.used_slots
        table.extend(tokens, 0)
        assert len(table.ids) == blocks
        assert self.pool.used_slots - used == inside
        table.release()
        # The model does not follow it: what it took has no name, and what it took it from is no more there.
        self.names = {key: held for key, held in self.names.items() if self.pool.is_published(held[0])}
        self.kept = [block for block in self.kept if self.pool.slot(block) == self.where.get(block)]
        self.where = {block: slot for block, slot in self.where.items() if self.pool.slot(block) == slot}
        self.settle()

    @rule(block=st.integers(0, 11))
    def what_nobody_reads_is_not_left_behind(self, block):
        if block < self.pool.num_blocks:
            with pytest.raises(LeaseError):
                self.pool.unread([block] * (self.readers()[block] + 1))
            if self.pool.slot(block) == NO_BLOCK:
                with pytest.raises(LeaseError):
                    self.pool.read([block])

    # ---- names

    @rule(sequence=sequences, data=st.data(), exact=st.booleans())
    def publish(self, sequence, data, exact):
        full = len(sequence.tokens) // self.size
        if full:
            self.name(sequence, data.draw(st.integers(0, full - 1)), exact)

    def name(self, sequence, at, exact):
        block, key = sequence.table.ids[at], _key(sequence.tokens[: (at + 1) * self.size])
        if self.named(block) not in (None, key):
            return
        self.pool.publish(block, key, exact)
        holder, was_exact = self.names.get(key, (None, False))
        fuller = holder is not None and holder not in self.where and block in self.where and exact >= was_exact
        if holder is None or (holder != block and ((exact and not was_exact) or fuller)):
            self.names[key] = (block, exact)
        self.settle()

    @rule(target=sequences, tokens=TOKENS, exact=st.booleans())
    def match(self, tokens, exact):
        return self.found(tokens, exact=exact) or multiple()

    def found(self, tokens, *, exact):
        keys = [_key(tokens[:stop]) for stop in range(self.size, len(tokens) + 1, self.size)]
        run = []
        for key in keys:
            block, is_exact = self.names.get(key, (None, False))
            if block is None or (exact and not is_exact):
                break
            run.append(block)
        fits = [
            n
            for n in range(len(run) + 1)
            if all(block in self.where for block in run[self.first_read(n * self.size) : n])
        ]
        assert self.pool.leading(keys, exact=exact) == max(fits)
        found = self.pool.match(keys, exact=exact)
        assert found == run[: max(fits)]
        if not found:
            return None
        behind = self.first_read(len(found) * self.size)
        sequence = _Sequence(self.pool.table(found), tokens[: len(found) * self.size], behind)
        self.live.append(sequence)
        self.settle()
        return sequence

    @rule()
    def forget(self):
        free = {block for block, _ in self.names.values()} - set(self.references())
        assert self.pool.forget() == len(free)
        self.names = {key: held for key, held in self.names.items() if held[0] not in free}
        self.settle()

    # ---- what always holds

    @invariant()
    def books_are_right(self):
        self.pool.check()
        references, readers = self.references(), self.readers()
        for block in self.content:
            assert self.pool.references(block) == references[block]
            assert self.pool.is_published(block) == (self.named(block) is not None)
            assert self.pool.slot(block) == self.where.get(block, NO_BLOCK)
            assert not readers[block] or block in self.where
        assert self.pool.used_slots == len(readers)
        assert self.pool.used_blocks == len(references)

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for sequence in self.live:
            windowed = sequence.table.windowed_ids
            for at in range(len(sequence.tokens)):
                prefix, block = tuple(sequence.tokens[: at + 1]), at // self.size
                assert self.content[sequence.table.ids[block]][at % self.size] == prefix
                if block >= sequence.behind:
                    assert self.slots[windowed[block]][at % self.size] == prefix

    @invariant()
    def published_blocks_hold_what_their_name_says(self):
        for key, (block, _) in self.names.items():
            assert _key(self.content[block][-1]) == key
            if block in self.where:
                assert _key(self.slots[self.where[block]][-1]) == key

    @invariant()
    def what_tables_free_is_what_comes_free(self):
        if not self.live:
            return
        chosen = self.live[::2]
        freed = self.pool.freed_by(sequence.table for sequence in chosen)
        others = [sequence for sequence in self.live if sequence not in chosen]
        held = {block for sequence in chosen for block in sequence.table.ids}
        held -= {block for sequence in others for block in sequence.table.ids}
        read = {block for sequence in chosen for block in sequence.table.ids[sequence.behind :]}
        read -= {block for sequence in others for block in sequence.table.ids[sequence.behind :]}
        assert freed == Amount(len(held), len(read))

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for sequence in self.live:
            sequence.table.release()
        assert self.pool.used_blocks == self.pool.used_slots == 0
        self.pool.check()


TestMixedPool = MixedPoolMachine.TestCase
TestMixedPool.settings = settings(max_examples=50, stateful_step_count=40)


def test_busy_pools() -> None:
    """What the machine draws is mostly short; here pools are full, and parts are lost and computed again."""
    lost = 0
    for seed in range(60):
        dice, machine = Random(seed), MixedPoolMachine()
        machine.start(dice.randrange(6, 13), dice.randrange(5), dice.randrange(1, 4), dice.randrange(1, 8))
        for _ in range(60):
            text = dice.choice(TEXTS)[: dice.randrange(24)]
            verb = dice.choice(("compute", "compute", "release", "release", "fork", "roll_back", "extend", "load"))
            if verb == "compute":
                machine.compute(text, dice.random() < 0.7, dice.randrange(1, 12))
            elif verb == "load":
                machine.load(dice.randrange(1, 40))
            elif machine.live:
                sequence = dice.choice(machine.live)
                more = {"extend": ([dice.randrange(2)] * 3, dice.randrange(3)), "roll_back": (dice.randrange(4),)}
                getattr(machine, verb)(sequence, *more.get(verb, ()))
            machine.books_are_right()
            machine.every_sequence_reads_its_own_tokens()
            machine.published_blocks_hold_what_their_name_says()
            machine.what_tables_free_is_what_comes_free()
            lost += sum(block not in machine.where for block, _ in machine.names.values())
        machine.teardown()
    assert lost > 1000
