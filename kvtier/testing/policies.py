"""PolicySuite: what every `EvictionPolicy` must do."""

import random
from collections.abc import Callable, Iterable, Sequence

from kvtier.hints import NO_HINT, Hint
from kvtier.policies import EvictionPolicy

__all__ = ["PolicySuite"]

_DEAD = Hint(reuse="none")


def _key(slot: int) -> bytes:
    return slot.to_bytes(16, "little")


class PolicySuite:
    """Subclass it in a module that pytest collects, and say how to make the policy.

    Attributes:
        recency: the policy is LRU-like: of two unrelated blocks the one used longer ago leaves first.
        hinted: the policy honours hints and duplicates; one that ignores them breaks nothing.
    """

    recency = True
    hinted = True
    now = 1000.0

    def make_policy(self, clock: Callable[[], float]) -> EvictionPolicy:
        """A new, empty policy for at least 100 blocks, which takes the time from `clock`."""
        raise NotImplementedError

    def _policy(self) -> EvictionPolicy:
        return self.make_policy(lambda: self.now)

    def _insert(self, policy: EvictionPolicy, slots: Sequence[int], hint: Hint = NO_HINT) -> None:
        """Roots, a second after what was before."""
        self.now += 1
        policy.insert(slots, [_key(slot) for slot in slots], [None] * len(slots), [hint] * len(slots))

    def _chain(self, slots: Iterable[int]) -> EvictionPolicy:
        policy = self._policy()
        deepest_first = list(slots)[::-1]
        policy.insert(deepest_first, [_key(slot) for slot in deepest_first], [*deepest_first[1:], None])
        return policy

    # ---- the tree

    def test_empty_policy_has_no_victims(self) -> None:
        assert self._policy().victims(10) == []

    def test_deepest_leaves_first(self) -> None:
        policy = self._chain(range(5))
        assert policy.victims(3) == [4, 3, 2]

    def test_a_parent_follows_its_children_in_one_call(self) -> None:
        policy = self._chain(range(5))
        assert policy.victims(99) == [4, 3, 2, 1, 0]

    def test_a_parent_waits_for_all_its_children(self) -> None:
        policy = self._chain(range(2))
        policy.insert([2], [_key(2)], [1])
        policy.insert([3], [_key(3)], [1])
        policy.pin([3])
        assert policy.victims(99) == [2]
        policy.unpin([3])
        assert sorted(policy.victims(99)) == [0, 1, 2, 3]

    def test_an_adopted_child_leaves_before_its_parent(self) -> None:
        policy = self._policy()
        self._insert(policy, [1])
        self._insert(policy, [0])
        policy.adopt(1, 0)
        policy.hit([1])
        assert policy.victims(2) == [1, 0]
        policy.pin([1])
        assert policy.victims(2) == []
        policy.unpin([1])
        policy.remove([1, 0])
        assert policy.victims(2) == []

    def test_asking_changes_nothing(self) -> None:
        policy = self._chain(range(8))
        incoming = [_key(100), _key(101)]
        assert policy.victims(4, incoming) == policy.victims(4, incoming)
        assert policy.victims(0) == []

    def test_pins_count(self) -> None:
        policy = self._policy()
        self._insert(policy, [0])
        policy.pin([0])
        policy.pin([0])
        policy.unpin([0])
        assert policy.victims(1) == []
        policy.unpin([0])
        assert policy.victims(1) == [0]

    def test_a_removed_slot_can_be_reused(self) -> None:
        policy = self._chain(range(3))
        policy.pin([2])
        policy.remove([2, 1])
        assert policy.victims(9) == [0]
        self._insert(policy, [1])
        self._insert(policy, [2])
        assert sorted(policy.victims(9)) == [0, 1, 2]

    def test_use_delays_eviction(self) -> None:
        if not self.recency:
            return
        policy = self._policy()
        self._insert(policy, [0, 1, 2])
        policy.hit([0])
        assert policy.victims(3) == [1, 2, 0]

    def test_slots_far_apart(self) -> None:
        policy = self._policy()
        policy.insert([100_000], [_key(1)], [7])
        policy.insert([7], [_key(0)], [None])
        assert policy.victims(2) == [100_000, 7]

    def test_evicted_keys_may_come_back(self) -> None:
        policy = self._policy()
        slots = range(20)
        self._insert(policy, slots)
        for turn in range(50):
            policy.hit([slot for slot in slots if slot % 3 == turn % 3])
            victim = policy.victims(1, [_key(turn % 25)])
            policy.remove(victim, evicted=True)
            policy.insert(victim, [_key(turn % 25)], [None])
        assert sorted(policy.victims(99)) == list(slots)

    # ---- hints

    def test_what_will_not_be_used_again_leaves_first(self) -> None:
        if not self.hinted:
            return
        policy = self._policy()
        self._insert(policy, [0, 1])
        self._insert(policy, [2], _DEAD)
        assert policy.victims(3)[0] == 2
        policy.hint([1], [_DEAD])
        assert sorted(policy.victims(3)[:2]) == [1, 2]
        policy.hint([1, 2], [NO_HINT, NO_HINT])
        assert policy.victims(1) == [0]

    def test_a_dead_parent_waits_for_its_child(self) -> None:
        policy = self._chain(range(3))
        self._insert(policy, [9])
        policy.hint([0, 1], [_DEAD, _DEAD])
        policy.pin([2])
        assert policy.victims(9) == [9]
        policy.unpin([2])
        assert sorted(policy.victims(9)) == [0, 1, 2, 9]

    def test_ttl_counts_from_the_last_use(self) -> None:
        if not self.hinted:
            return
        policy = self._policy()
        self._insert(policy, [0, 1])
        self._insert(policy, [2], Hint(ttl=10))
        self.now += 9
        assert policy.victims(1) == [0]
        policy.hit([2])
        self.now += 9
        assert policy.victims(1) == [0]
        self.now += 2
        assert policy.victims(1) == [2]
        policy.hit([2])
        assert policy.victims(1) == [0]
        self.now += 11
        assert policy.victims(1) == [2]

    def test_age_is_weighed_by_priority(self) -> None:
        if not (self.hinted and self.recency):
            return
        policy = self._policy()
        self._insert(policy, [0], Hint(priority=4))
        self.now += 29
        self._insert(policy, [1])
        self.now += 5
        assert policy.victims(2) == [0, 1], "35 s at weight 4 are more than 5 s"
        self.now += 10
        assert policy.victims(2) == [1, 0], "45 s at weight 4 are less than 15 s"

    def test_infinite_priority_is_strict_until_it_expires(self) -> None:
        if not self.hinted:
            return
        policy = self._policy()
        self._insert(policy, [0], Hint(priority=float("inf"), priority_ttl=100))
        self._insert(policy, [1])
        self.now += 90
        self._insert(policy, [2], Hint(priority=2))
        assert policy.victims(3)[-1] == 0
        policy.hit([0])
        self.now += 90
        assert policy.victims(3)[-1] == 0, "a use renews it"
        self.now += 20
        assert set(policy.victims(2)) == {0, 1}, "only the weight of 2 is left of two, and the youngest has it"

    def test_what_the_tier_above_holds_too_leaves_first(self) -> None:
        if not self.hinted:
            return
        policy = self._policy()
        self._insert(policy, [0, 1])
        self._insert(policy, [2], Hint(priority=float("inf")))
        policy.duplicate([2], above=True)
        assert policy.victims(1) == [2]
        policy.hit([2])
        assert policy.victims(1) == [2]
        policy.duplicate([2], above=False)
        assert policy.victims(3)[-1] == 2

    # ---- everything together

    def test_random_events_against_a_tree(self) -> None:
        dice = random.Random(20)  # noqa: S311
        policy, tree = self._policy(), _Tree()
        for _ in range(3000):
            self._random_event(policy, tree, dice)
            tree.check(policy.victims(dice.randrange(12), [_key(dice.randrange(90)) for _ in range(3)]))
        for slot in list(tree.pins):
            policy.unpin([slot] * tree.pins.pop(slot))
        everything = policy.victims(10_000)
        tree.check(everything)
        assert set(everything) == set(tree.parents)

    def _random_event(self, policy: EvictionPolicy, tree: "_Tree", dice: random.Random) -> None:
        self.now += dice.random() * 20
        live = list(tree.parents)
        event = dice.choice(["insert", "insert", "hit", "evict", "pin", "unpin", "hint", "duplicate", "adopt"])
        if event == "insert" and len(live) < 60:
            slot = next(slot for slot in range(61) if slot not in tree.parents)
            parent = dice.choice([None, *live])
            tree.parents[slot] = parent
            policy.insert([slot], [_key(dice.randrange(90))], [parent], [_random_hint(dice)])
        elif event == "evict":
            victims = policy.victims(dice.randrange(6))
            policy.remove(victims, evicted=dice.random() < 0.9)
            for slot in victims:
                del tree.parents[slot]
        elif event == "unpin" and tree.pins:
            tree.unpin(policy, dice.choice(list(tree.pins)))
        elif event == "adopt":
            tree.adopt(policy, dice)
        elif live:
            self._touch(event, policy, tree, dice.sample(live, dice.randint(1, len(live))), dice)

    def _touch(self, event: str, policy: EvictionPolicy, tree: "_Tree", slots: list[int], dice: random.Random) -> None:
        if event == "hit":
            policy.hit(slots)
        elif event == "hint":
            policy.hint(slots, [_random_hint(dice) for _ in slots])
        elif event == "duplicate":
            policy.duplicate(slots, above=dice.random() < 0.5)
        elif event == "pin":
            tree.pins[slots[0]] = tree.pins.get(slots[0], 0) + 1
            policy.pin(slots[:1])


def _random_hint(dice: random.Random) -> Hint:
    return Hint(
        priority=dice.choice([1, 1, 0.5, 3, float("inf")]),
        priority_ttl=dice.choice([5.0, 100.0]),
        ttl=dice.choice([None, None, 0, 30.0]),
        reuse=dice.choice(["unknown", "unknown", "likely", "none"]),
    )


class _Tree:
    """What is live, whose child it is and how often it is pinned."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}
        self.pins: dict[int, int] = {}

    def unpin(self, policy: EvictionPolicy, slot: int) -> None:
        policy.unpin([slot])
        self.pins[slot] -= 1
        if not self.pins[slot]:
            del self.pins[slot]

    def adopt(self, policy: EvictionPolicy, dice: random.Random) -> None:
        """Give a root a parent that does not descend from it."""
        roots = [slot for slot, parent in self.parents.items() if parent is None]
        if not roots:
            return
        child = dice.choice(roots)
        strangers = [slot for slot in self.parents if child not in self._line(slot)]
        if strangers:
            self.parents[child] = dice.choice(strangers)
            policy.adopt(child, self.parents[child] or 0)

    def _line(self, slot: int | None) -> list[int]:
        line = []
        while slot is not None:
            line.append(slot)
            slot = self.parents[slot]
        return line

    def check(self, victims: Sequence[int]) -> None:
        left = dict(self.parents)
        for slot in victims:
            assert slot in left, f"{slot} is not live, or a victim twice"
            assert slot not in self.pins, f"{slot} is pinned"
            del left[slot]
            assert slot not in left.values(), f"{slot} leaves before its children"
