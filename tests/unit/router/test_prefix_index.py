"""PrefixIndex: the leading run that an engine has, by tier, whatever it calls its blocks."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.events.frames import BlockEvent, BlockRemoved, BlocksCleared, BlockStored
from kvtier.gpu.pool import BlockPool
from kvtier.router.hashing import pack_extra, text_keys, token_keys
from kvtier.router.index import Level, PrefixIndex

SIZE = 4
TOKENS = list(range(100, 100 + 6 * SIZE))
KEYS = token_keys(TOKENS, SIZE)


def stored(
    first: int, last: int, medium: str | None = "GPU", tokens: list[int] = TOKENS, **more: object
) -> BlockStored:
    """Blocks first..last, which the engine calls 1000, 1001, …"""
    return BlockStored(
        [1000 + at for at in range(first, last)],
        999 + first if first else None,
        tokens[first * SIZE : last * SIZE],
        SIZE,
        None,
        medium,
        more.pop("lora_name", None),
        **more,
    )


def index_of(*events: BlockEvent, bound: int = 1000) -> PrefixIndex:
    index = PrefixIndex(bound)
    index.apply(events)
    return index


def test_the_leading_run_is_found_each_block_where_it_is_nearest() -> None:
    index = index_of(stored(0, 2), stored(0, 4, "CPU"), stored(3, 5, "STORAGE"), stored(5, 6, locality="REMOTE"))
    assert index.match(KEYS) == [2, 2, 1, 1]
    assert index.match(KEYS[:3]) == [2, 1, 0, 0]
    assert index.match(token_keys([1, *TOKENS], SIZE)) == [0, 0, 0, 0]
    assert index.block_size == SIZE


def test_told_twice_is_there_once() -> None:
    index = index_of(stored(0, 2), stored(0, 2))
    index.apply([BlockRemoved([1000, 1001], "GPU"), BlockRemoved([1000], "GPU")])
    assert index.match(KEYS) == [0, 0, 0, 0]


def test_a_hole_ends_the_run() -> None:
    index = index_of(stored(0, 5), BlockRemoved([1002], "GPU"))
    assert index.match(KEYS) == [2, 0, 0, 0]
    index.apply([stored(2, 3)])
    assert index.match(KEYS) == [5, 0, 0, 0]


def test_what_is_known_may_be_told_without_tokens() -> None:
    index = index_of(stored(0, 2), BlockStored([1000, 1001, 7], None, [], 0, None, "CPU", None))
    index.apply([BlockRemoved([1000, 1001], "GPU")])
    assert index.match(KEYS) == [0, 2, 0, 0]
    assert index.counts().orphans == 1


def test_a_block_without_its_parent_is_counted_not_guessed() -> None:
    index = index_of(stored(2, 4))
    assert index.counts() == ((0, 0, 0, 0), 2, 0)
    index.apply([stored(0, 2), stored(2, 4)])
    assert index.match(KEYS) == [4, 0, 0, 0]


def test_adapters_and_salts_separate_equal_tokens() -> None:
    index = index_of(stored(0, 2, lora_name="fr"))
    assert index.match(KEYS) == [0, 0, 0, 0]
    lora = pack_extra(["fr"])
    assert index.match(token_keys(TOKENS, SIZE, extras=[lora] * 6)) == [2, 0, 0, 0]
    index = index_of(stored(0, 2, extra_keys=[["salt"], None]))
    assert index.match(KEYS) == [0, 0, 0, 0]
    assert index.match(token_keys(TOKENS, SIZE, extras={0: pack_extra(["salt"])})) == [2, 0, 0, 0]


def test_groups_of_a_hybrid_model_hold_a_block_together() -> None:
    index = index_of(stored(0, 2, group_idx=0), stored(0, 2, group_idx=1))
    index.apply([BlockRemoved([1000, 1001], "GPU", group_idx=1)])
    assert index.match(KEYS) == [2, 0, 0, 0]
    index.apply([BlockRemoved([1000, 1001], "GPU", group_idx=0)])
    assert index.match(KEYS) == [0, 0, 0, 0]
    assert index.counts().blocks == (0, 0, 0, 0)


def test_a_name_that_means_another_block_now() -> None:
    others = [9] * len(TOKENS)
    index = index_of(stored(0, 2), stored(0, 1, tokens=others))
    assert index.match(KEYS) == [0, 0, 0, 0]
    assert index.match(token_keys(others, SIZE)) == [1, 0, 0, 0]


def test_with_a_sliding_window_only_its_blocks_have_to_be_there() -> None:
    sliding = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
    index = index_of(stored(0, 6, **sliding))
    assert index.match(KEYS) == [6, 0, 0, 0]
    index.apply([BlockRemoved([1000, 1001, 1002, 1003], "GPU")])
    assert index.match(KEYS) == [6, 0, 0, 0], "the token after six blocks attends to the last two"
    assert index.match(KEYS[:5]) == [0, 0, 0, 0], "that after five would need the fourth"
    index.apply([BlockRemoved([1005], "GPU"), stored(0, 2, "CPU", **sliding)])
    assert index.match(KEYS) == [0, 2, 0, 0]
    index.apply([stored(0, 1)])
    index.apply([stored(2, 6), BlockRemoved([1001], "CPU")])
    assert index.match(KEYS) == [1, 0, 0, 0], "a hybrid model needs all"


@given(st.sets(st.integers(0, 9)), st.integers(1, 30), st.integers(0, 10))
@settings(max_examples=50)
def test_windows_as_the_engine_s_own_pool_looks_them_up(there: set[int], window: int, asked: int) -> None:
    tokens = list(range(10 * SIZE))
    keys = token_keys(tokens, SIZE)
    index, pool = PrefixIndex(100), BlockPool(10, SIZE, window)
    index.apply([
        BlockStored(
            list(range(10)), None, tokens, SIZE, None, "GPU", None,
            kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=window,
        ),
        BlockRemoved([at for at in range(10) if at not in there], "GPU"),
    ])  # fmt: skip
    ids = pool.allocate(10)
    for at in there:
        pool.publish(ids[at], keys[at], exact=True)
    assert index.match(keys[:asked]) == [pool.leading(keys[:asked]), 0, 0, 0]


def test_cleared_and_reset_forget_all() -> None:
    for forget in (lambda index: index.apply([BlocksCleared()]), lambda index: index.reset()):
        index = index_of(stored(0, 6), stored(0, 6, "CPU"))
        forget(index)
        assert index.match(KEYS) == [0, 0, 0, 0]
        assert index.counts().blocks == (0, 0, 0, 0)


def test_memory_is_bounded() -> None:
    index = PrefixIndex(10)
    for seed in range(50):
        index.apply([BlockStored([seed], None, [seed] * SIZE, SIZE, None, "GPU", None)])
    assert sum(index.counts().blocks) == 10
    assert index.counts().forgotten == 40
    assert index.match(token_keys([49] * SIZE, SIZE)) == [1, 0, 0, 0]
    assert index.match(token_keys([39] * SIZE, SIZE)) == [0, 0, 0, 0]


def test_tokens_that_are_none_do_no_harm() -> None:
    index = index_of(
        BlockStored([1], None, [-5, 1, 2, 3], SIZE, None, "GPU", None),
        BlockStored([2], None, [2**70, 1, 2, 3], SIZE, None, "GPU", None),
    )
    assert index.counts().orphans == 2


def test_expected_blocks_count_as_the_device_s() -> None:
    assert index_of(stored(0, 2, "CPU")).match(KEYS, set(KEYS[1:3])) == [2, 1, 0, 0]


def test_keys_of_text_and_tokens() -> None:
    assert token_keys([*TOKENS, 1], SIZE) == KEYS, "full blocks only"
    assert token_keys(TOKENS[SIZE:], SIZE, KEYS[0]) == KEYS[1:]
    assert len({*KEYS, *text_keys("x" * 64 * 6)}) == 12
    assert text_keys("ab" * 100)[:3] == text_keys("ab" * 200)[:3]
    assert text_keys("ab" * 100) != text_keys("ab" * 100, "salt")
    assert text_keys("short") == []


walks = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "clear"]),
        st.integers(0, 3),
        st.tuples(st.integers(0, 5), st.integers(1, 6)).filter(lambda cut: cut[0] < cut[1]),
    ),
    max_size=40,
)


@given(walks)
@settings(max_examples=50)
def test_against_sets(walk: list[tuple[str, int, tuple[int, int]]]) -> None:
    index = PrefixIndex(1000)
    media = ["GPU", "CPU", "STORAGE", "REMOTE"]
    held: list[set[int]] = [set() for _ in Level]
    for verb, level, (start, stop) in walk:
        medium, locality = (media[level], None) if level < 3 else ("STORAGE", "REMOTE")
        parent_known = start == 0 or any(start - 1 in one for one in held)
        if verb == "store":
            index.apply([stored(start, stop, medium, locality=locality)])
            # Blocks that are known elsewhere need no parent.
            for at in range(start, stop):
                if parent_known or any(at in one for one in held):
                    held[level].add(at)
        elif verb == "remove":
            index.apply([BlockRemoved([1000 + at for at in range(start, stop)], medium, locality=locality)])
            held[level] -= set(range(start, stop))
        else:
            index.apply([BlocksCleared()])
            held = [set() for _ in Level]
        run = Counter[int]()
        for at in range(6):
            nearest = next((level for level in Level if at in held[level]), None)
            if nearest is None:
                break
            run[nearest] += 1
        assert index.match(KEYS) == [run[level] for level in Level]
        assert index.counts().blocks == tuple(len(one) for one in held)


def test_a_thousand_prompts_hash_alike_in_any_split() -> None:
    chance = random.Random(3)
    for _ in range(100):
        tokens = [chance.randrange(2**32) for _ in range(chance.randrange(40))]
        cut = chance.randrange(len(tokens) // SIZE + 1)
        keys = token_keys(tokens, SIZE)
        assert keys[:cut] + token_keys(tokens[cut * SIZE :], SIZE, keys[cut - 1] if cut else b"") == keys
