"""Policies against a naive model: any order of events; LRU's whole order is predicted, the others' soundness."""

import math
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.hints import NO_HINT, Hint
from kvtier.policies import make_policy

SLOTS = 14
hints = st.builds(
    Hint,
    priority=st.sampled_from([1.0, 1.0, 0.5, 4.0, math.inf]),
    priority_ttl=st.sampled_from([10.0, 1000.0]),
    ttl=st.sampled_from([None, None, 0.0, 20.0]),
    reuse=st.sampled_from(["unknown", "unknown", "likely", "none"]),
)
picks = st.integers(0, SLOTS - 1)


@dataclass
class Record:
    parent: int | None
    stamp: tuple[float, int]  # last use: when, and which event
    hint: Hint
    hinted: float
    above: bool = False
    pins: int = 0

    def rank(self, now: float) -> tuple:
        """The smallest leaves first."""
        used = self.stamp[0]
        if self.above:
            return (0, self.stamp)
        if self.hint.reuse == "none" or (self.hint.ttl is not None and now >= used + self.hint.ttl):
            return (1, self.stamp)
        lapsed = now >= max(used, self.hinted) + self.hint.priority_ttl
        weight = 1.0 if lapsed else self.hint.priority
        # Within a class the older leaves first, whatever its age in seconds.
        return (2, weight == math.inf, -(now - used) / weight, self.stamp)


@dataclass
class Model:
    records: dict[int, Record] = field(default_factory=dict)

    def leaves(self) -> list[int]:
        parents = {record.parent for record in self.records.values()}
        return [slot for slot, record in self.records.items() if slot not in parents and not record.pins]

    def victims(self, count: int, now: float) -> list[int]:
        left, chosen = Model(dict(self.records)), []
        while len(chosen) < count and (leaves := left.leaves()):
            chosen.append(min(leaves, key=lambda slot: left.records[slot].rank(now)))
            del left.records[chosen[-1]]
        return chosen

    def descends(self, slot: int | None, ancestor: int) -> bool:
        while slot is not None and slot != ancestor:
            slot = self.records[slot].parent
        return slot == ancestor


class PolicyMachine(RuleBasedStateMachine):
    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.events = 0
        self.model = Model()
        self.policy = make_policy(self.name, SLOTS, lambda: self.now)

    def tick(self) -> tuple[float, int]:
        """Events come at uneven intervals, so that no two weighted ages are the same."""
        self.events += 1
        self.now += 0.1 + self.events * 0.6180339887 % 1
        return self.now, self.events

    @rule(first=picks, length=st.integers(1, 5), parent=st.none() | picks, hint=hints, hinted=st.booleans())
    def insert(self, first: int, length: int, parent: int | None, hint: Hint, hinted: bool) -> None:
        records = self.model.records
        chain = [slot for slot in range(first, min(first + length, SLOTS)) if slot not in records]
        if not chain:
            return
        above = parent if parent in records else None
        parents = [*reversed(chain[:-1]), above]
        deepest_first = chain[::-1]
        when = self.tick()[0]
        for slot, over in zip(deepest_first, parents, strict=True):
            self.events += 1
            records[slot] = Record(over, (when, self.events), hint if hinted else NO_HINT, when)
        keys = [bytes([slot]) * 16 for slot in deepest_first]
        self.policy.insert(deepest_first, keys, parents, [hint] * len(chain) if hinted else None)

    @rule(slots=st.lists(picks, max_size=5, unique=True))
    def hit(self, slots: list[int]) -> None:
        live = [slot for slot in slots if slot in self.model.records]
        when = self.tick()[0]
        for slot in live:
            self.events += 1
            self.model.records[slot].stamp = (when, self.events)
        self.policy.hit(live)

    @rule(slot=picks, hint=hints)
    def hint(self, slot: int, hint: Hint) -> None:
        if slot in self.model.records:
            self.tick()
            record = self.model.records[slot]
            record.hint, record.hinted = hint, self.now
            self.policy.hint([slot], [hint])

    @rule(slot=picks, above=st.booleans())
    def duplicate(self, slot: int, above: bool) -> None:
        if slot in self.model.records:
            self.tick()
            self.model.records[slot].above = above
            self.policy.duplicate([slot], above=above)

    @rule(slot=picks, parent=picks)
    def adopt(self, slot: int, parent: int) -> None:
        records = self.model.records
        if slot not in records or parent not in records or self.model.descends(parent, slot):
            return
        if records[slot].parent is None:
            records[slot].parent = parent
            self.policy.adopt(slot, parent)

    @rule(slot=picks)
    def pin(self, slot: int) -> None:
        if slot in self.model.records:
            self.model.records[slot].pins += 1
            self.policy.pin([slot])

    @precondition(lambda self: any(record.pins for record in self.model.records.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = [slot for slot, record in self.model.records.items() if record.pins]
        slot = data.draw(st.sampled_from(pinned))
        self.model.records[slot].pins -= 1
        self.policy.unpin([slot])

    @rule(count=st.integers(1, 4), evicted=st.booleans())
    def evict(self, count: int, evicted: bool) -> None:
        victims = self.policy.victims(count)
        self.policy.remove(victims, evicted=evicted)
        for slot in victims:
            del self.model.records[slot]

    @rule(slot=picks)
    def remove_pinned_or_not(self, slot: int) -> None:
        parents = {record.parent for record in self.model.records.values()}
        if slot in self.model.records and slot not in parents:
            del self.model.records[slot]
            self.policy.remove([slot])

    # They never add up to the time of a hint: the blocks of a batch are a nanosecond apart, and so lapse one by one.
    @rule(seconds=st.sampled_from([1.01, 9.13, 30.17]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(count=st.integers(0, 20))
    def ask(self, count: int) -> None:
        # At age nothing all weights are alike, but for the nanoseconds between the blocks of a batch.
        self.tick()
        assert self.policy.victims(count) == self.expected(count)

    def expected(self, count: int) -> list[int]:
        return self.model.victims(count, self.now)

    @invariant()
    def victims_are_sound(self) -> None:
        victims = self.policy.victims(SLOTS)
        assert len(victims) == len(set(victims)) == len(self.model.victims(SLOTS, self.now))
        left = dict(self.model.records)
        for slot in victims:
            assert not left.pop(slot).pins
            assert slot not in {record.parent for record in left.values()}


class ArcMachine(PolicyMachine):
    """Who leaves first among ordinary blocks is ARC's own affair; what hints say is not."""

    name = "arc"

    def expected(self, count: int) -> list[int]:
        found = self.policy.victims(count)
        assert self.ranks(found) == self.ranks(self.model.victims(count, self.now))
        return found

    def ranks(self, slots: list[int]) -> list[int]:
        """How many of the first victims are duplicates and dead: alike, while there are such leaves."""
        kinds = [self.model.records[slot].rank(self.now)[0] for slot in slots]
        ordinary = next((at for at, kind in enumerate(kinds) if kind == 2), len(kinds))
        return kinds[:ordinary]


class Clock2Machine(ArcMachine):
    name = "clock2"


class S3FifoMachine(ArcMachine):
    name = "s3fifo"


TestLruMachine = PolicyMachine.TestCase
TestLruMachine.settings = settings(max_examples=120, stateful_step_count=50)
TestArcMachine = ArcMachine.TestCase
TestClock2Machine = Clock2Machine.TestCase
TestS3FifoMachine = S3FifoMachine.TestCase
for machine in (ArcMachine, Clock2Machine, S3FifoMachine):
    machine.TestCase.settings = settings(max_examples=30, stateful_step_count=50)
