"""BlockPool and BlockTable: orders, limits and refusals that the state machine does not pin down one by one."""

import subprocess
import sys

import pytest

from kvtier.errors import CapacityError, KVTierError, LeaseError
from kvtier.gpu import BlockCopy, BlockPool, BlockTable


def _published(pool, *keys, exact=True):
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key, exact)
    return blocks


def test_the_books_are_kept_without_torch():
    code = "import sys, kvtier.gpu.pool, kvtier.gpu.table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (-1, 16), (4, 0)])
def test_a_pool_of_nothing_is_refused(blocks, size):
    with pytest.raises(CapacityError, match="at least 1"):
        BlockPool(blocks, size)


def test_nameless_blocks_go_first_then_the_least_recently_freed_tails_before_heads():
    pool = BlockPool(6, 4)
    old, young, plain = _published(pool, b"a", b"b"), _published(pool, b"c", b"d"), pool.allocate(2)
    pool.release(old)
    pool.release(young)
    pool.release(plain)
    assert set(pool.allocate(2)) == set(plain)
    assert pool.allocate(4) == [old[1], old[0], young[1], young[0]]
    assert pool.cached_blocks == 0


def test_a_match_protects_and_renews():
    pool = BlockPool(3, 4)
    blocks = _published(pool, b"a", b"b", b"c")
    pool.release(blocks)
    held = pool.match([b"a"])
    assert pool.free_blocks == 2
    pool.release(held)
    assert pool.allocate(3) == [blocks[2], blocks[1], blocks[0]]


def test_a_match_ends_at_the_first_block_that_is_missing_or_not_exact():
    pool = BlockPool(4, 4)
    first, third = _published(pool, b"a", b"c")
    (second,) = _published(pool, b"b", exact=False)
    assert pool.match([b"a", b"b", b"c"]) == [first]
    assert pool.match([b"a", b"b", b"c", b"d"], exact=False) == [first, second, third]
    assert pool.match([]) == []
    assert [pool.references(block) for block in (first, second, third)] == [3, 2, 2]


def test_an_exact_block_takes_the_name_of_one_that_is_not_and_never_the_other_way():
    pool = BlockPool(3, 4)
    (lossy,) = _published(pool, b"a", exact=False)
    pool.release([lossy])
    (exact,) = _published(pool, b"a")
    assert pool.match([b"a"]) == [exact]
    assert not pool.is_published(lossy)
    pool.check()
    (late,) = _published(pool, b"a", exact=False)
    assert not pool.is_published(late)
    assert pool.is_exact(exact)


def test_of_two_exact_blocks_the_first_keeps_the_name():
    pool = BlockPool(3, 4)
    first, second = pool.allocate(2)
    pool.publish(first, b"a", True)
    pool.publish(second, b"a", True)
    assert pool.match([b"a"]) == [first]


def test_a_free_block_that_lost_its_name_is_given_out_before_those_with_one():
    pool = BlockPool(3, 4)
    (named,) = _published(pool, b"b")
    (lossy,) = _published(pool, b"a", exact=False)
    pool.release([named])
    pool.release([lossy])
    _published(pool, b"a")
    pool.check()
    assert pool.allocate(1) == [lossy]


@pytest.mark.parametrize("verb", ["retain", "release"])
@pytest.mark.parametrize("wrong", [[0, 3], [0, -1], [0, 4]])
def test_what_nobody_holds_is_refused_before_anything_changes(verb, wrong):
    pool = BlockPool(4, 4)
    pool.allocate(2)
    with pytest.raises(LeaseError, match=str(wrong[1])):
        getattr(pool, verb)(wrong)
    assert pool.references(0) == 1
    pool.check()


def test_a_block_released_twice_in_one_call_is_refused():
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1)
    with pytest.raises(LeaseError, match="2 times"):
        pool.release([block, block])
    pool.retain([block])
    pool.release([block, block])
    assert pool.free_blocks == 2


def test_more_than_there_is_leaves_everything_as_it_was():
    pool = BlockPool(3, 4)
    pool.release(_published(pool, b"a"))
    with pytest.raises(CapacityError, match="4 blocks: 3 of 3"):
        pool.allocate(4)
    assert pool.cached_blocks == 1
    with pytest.raises(CapacityError):
        pool.allocate(-1)


def test_a_free_block_cannot_be_published():
    pool = BlockPool(2, 4)
    with pytest.raises(LeaseError):
        pool.publish(0, b"a", True)
    assert pool.cached_blocks == 0


def test_forget_spares_what_is_in_use():
    pool = BlockPool(4, 4)
    blocks = _published(pool, b"a", b"b", b"c")
    pool.release(blocks[1:])
    assert pool.forget() == 2
    assert pool.match([b"a", b"b"]) == [blocks[0]]
    pool.check()


def test_check_finds_a_leaked_block():
    pool = BlockPool(3, 4)
    pool.allocate(1)
    pool._references[0] = 0
    with pytest.raises(KVTierError, match="unreferenced"):
        pool.check()


# ---- tables


def test_only_the_block_that_the_write_starts_inside_of_is_copied():
    pool = BlockPool(8, 4)
    table = BlockTable(pool)
    table.extend(12, 0)
    before = list(table.ids)
    other = table.fork()
    assert table.missing(16, 6) == 3
    assert table.extend(16, 6) == [BlockCopy(before[1], table.ids[1])]
    assert list(other.ids) == before
    assert table.ids[0] == before[0]
    assert not set(table.ids[1:]) & set(before)
    # At a block's edge there is nothing to keep.
    assert other.fork().extend(8, 4) == []


def test_a_published_block_is_not_written_even_by_its_only_holder():
    pool = BlockPool(3, 4)
    table = BlockTable(pool)
    table.extend(4, 0)
    (block,) = table.ids
    pool.publish(block, b"a", True)
    assert table.extend(4, 3) == [BlockCopy(block, table.ids[0])]
    assert pool.match([b"a"]) == [block]


def test_a_table_that_cannot_grow_stays_as_it_was():
    pool = BlockPool(3, 4)
    table = BlockTable(pool)
    table.extend(8, 0)
    other = table.fork()
    before = list(table.ids)
    with pytest.raises(CapacityError):
        table.extend(12, 7)
    assert list(table.ids) == list(other.ids) == before
    assert table.missing(12, 8) == 1
    assert table.extend(12, 8) == []


def test_nothing_to_write_needs_nothing():
    pool = BlockPool(2, 4)
    table = BlockTable(pool)
    table.extend(4, 0)
    table.fork()
    assert table.missing(4, 4) == 0
    assert table.extend(4, 4) == []
    with pytest.raises(LeaseError, match=r"\[5, 6\)"):
        table.extend(6, 5)


def test_truncate_keeps_the_block_of_the_last_token_and_more_is_no_growth():
    pool = BlockPool(4, 4)
    table = BlockTable(pool)
    table.extend(16, 0)
    table.truncate(9)
    assert table.capacity_tokens == 12
    table.truncate(100)
    assert table.capacity_tokens == 12
    table.truncate(8)
    assert table.capacity_tokens == 8
    table.release()
    table.release()
    assert pool.free_blocks == 4
