"""What a device pool tells its listener, with what `publish` returns, adds up to the names that it has."""

import random
from collections.abc import Sequence

import pytest

from kvtier.gpu.pool import BlockPool


class Names:
    def __init__(self, pool: BlockPool) -> None:
        self.there: set[bytes] = set()
        self.calls = 0
        pool.listener = self

    def named(self, keys: Sequence[bytes], parent: bytes | None, tokens: Sequence[int]) -> None:
        assert self.there.isdisjoint(keys)
        self.there.update(keys)

    def unnamed(self, keys: Sequence[bytes]) -> None:
        self.calls += 1
        assert self.there.issuperset(keys)
        self.there.difference_update(keys)


@pytest.mark.parametrize("seed", range(20))
def test_names_told_are_the_names_there_are(seed: int) -> None:
    chance = random.Random(seed)
    pool = BlockPool(12, 4)
    names = Names(pool)
    held: list[int] = []
    for _ in range(300):
        match chance.choice(["take", "publish", "publish", "release", "match", "forget"]):
            case "take" if pool.free_blocks:
                held += pool.allocate(chance.randint(1, pool.free_blocks))
            case "publish" if held:
                block, key = chance.choice(held), bytes([chance.randrange(10)]) * 32
                if not pool.is_published(block) and pool.publish(block, key, chance.random() < 0.5):
                    names.named([key], None, [])
            case "release" if held:
                pool.release([held.pop(chance.randrange(len(held)))])
            case "match":
                keys = [bytes([at]) * 32 for at in chance.sample(range(10), 3)]
                held += pool.match(keys, exact=chance.random() < 0.5)
            case "forget" if chance.random() < 0.1:
                pool.forget()
        pool.check()
        assert names.there == set(pool._published)


def test_one_allocation_is_one_call() -> None:
    pool = BlockPool(6, 4)
    names = Names(pool)
    ids = pool.allocate(6)
    for at in range(4):
        assert pool.publish(ids[at], bytes([at]), exact=True)
        names.named([bytes([at])], None, [])
    assert not pool.publish(ids[0], bytes([0]), exact=True), "it has that name"
    pool.release(ids)
    pool.allocate(6)
    assert (names.calls, names.there) == (1, set())
