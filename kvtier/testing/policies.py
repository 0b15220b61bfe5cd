"""PolicySuite: what every `EvictionPolicy` must do."""

import random
from collections.abc import Sequence

from kvtier.policies import EvictionPolicy

__all__ = ["PolicySuite"]


class PolicySuite:
    """Subclass it in a module that pytest collects, and say how to make the policy.

    Attributes:
        recency: the policy is LRU-like: of two unrelated blocks the one used longer ago leaves first.
    """

    recency = True

    def make_policy(self) -> EvictionPolicy:
        """A new, empty policy."""
        raise NotImplementedError

    def test_empty_policy_has_no_victims(self) -> None:
        assert self.make_policy().victims(10) == []

    def test_deepest_leaves_first(self) -> None:
        policy = self._chain(range(5))
        assert policy.victims(3) == [4, 3, 2]

    def test_a_parent_follows_its_children_in_one_call(self) -> None:
        policy = self._chain(range(5))
        assert policy.victims(99) == [4, 3, 2, 1, 0]

    def test_a_parent_waits_for_all_its_children(self) -> None:
        policy = self._chain(range(2))
        policy.insert([2], [1])
        policy.insert([3], [1])
        policy.pin([3])
        assert policy.victims(99) == [2]
        policy.unpin([3])
        assert sorted(policy.victims(99)) == [0, 1, 2, 3]

    def test_asking_changes_nothing(self) -> None:
        policy = self._chain(range(8))
        assert policy.victims(4) == policy.victims(4)
        assert policy.victims(0) == []

    def test_pins_count(self) -> None:
        policy = self.make_policy()
        policy.insert([0], [None])
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
        policy.insert([1], [None])
        policy.insert([2], [None])
        assert sorted(policy.victims(9)) == [0, 1, 2]

    def test_use_delays_eviction(self) -> None:
        if not self.recency:
            return
        policy = self.make_policy()
        policy.insert([0, 1, 2], [None, None, None])
        policy.hit([0])
        assert policy.victims(3) == [1, 2, 0]

    def test_slots_far_apart(self) -> None:
        policy = self.make_policy()
        policy.insert([100_000], [7])
        policy.insert([7], [None])
        assert policy.victims(2) == [100_000, 7]

    def test_random_events_against_a_tree(self) -> None:
        dice = random.Random(20)  # noqa: S311
        policy, tree = self.make_policy(), _Tree()
        for _ in range(3000):
            self._random_event(policy, tree, dice)
            tree.check(policy.victims(dice.randrange(12)))
        for slot in list(tree.pins):
            policy.unpin([slot] * tree.pins.pop(slot))
        everything = policy.victims(10_000)
        tree.check(everything)
        assert set(everything) == set(tree.parents)

    def _random_event(self, policy: EvictionPolicy, tree: "_Tree", dice: random.Random) -> None:
        live = list(tree.parents)
        event = dice.choice(["insert", "insert", "hit", "evict", "pin", "unpin"])
        if event == "insert" and len(live) < 60:
            slot = next(slot for slot in range(61) if slot not in tree.parents)
            parent = dice.choice([None, *live])
            tree.parents[slot] = parent
            policy.insert([slot], [parent])
        elif event == "hit" and live:
            policy.hit(dice.sample(live, dice.randint(1, len(live))))
        elif event == "evict":
            victims = policy.victims(dice.randrange(6))
            tree.check(victims)
            policy.remove(victims)
            for slot in victims:
                del tree.parents[slot]
        elif event == "pin" and live:
            slot = dice.choice(live)
            tree.pins[slot] = tree.pins.get(slot, 0) + 1
            policy.pin([slot])
        elif event == "unpin" and tree.pins:
            slot = dice.choice(list(tree.pins))
            policy.unpin([slot])
            tree.pins[slot] -= 1
            if not tree.pins[slot]:
                del tree.pins[slot]

    def _chain(self, slots: Sequence[int]) -> EvictionPolicy:
        policy = self.make_policy()
        deepest_first = list(reversed(slots))
        policy.insert(deepest_first, [*deepest_first[1:], None])
        return policy


class _Tree:
    """What is live, whose child it is and how often it is pinned."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}
        self.pins: dict[int, int] = {}

    def check(self, victims: Sequence[int]) -> None:
        left = dict(self.parents)
        for slot in victims:
            assert slot in left, f"{slot} is not live, or a victim twice"
            assert slot not in self.pins, f"{slot} is pinned"
            del left[slot]
            assert slot not in left.values(), f"{slot} leaves before its children"
