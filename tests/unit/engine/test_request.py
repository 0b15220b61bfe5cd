import hashlib
from itertools import product

import numpy as np
import pytest

from kvtier.engine import SamplingParams
from kvtier.engine.request import Request, State
from kvtier.errors import RequestError
from kvtier.gpu.pool import BlockPool
from kvtier.gpu.table import BlockTable

SIZE = 4


def make(prompt: int = 6, max_tokens: int | None = 5, limit: int = 100) -> Request:
    return Request("r", range(prompt), SamplingParams(max_tokens=max_tokens), 0, block_size=SIZE, limit=limit)


def table() -> BlockTable:
    pool = BlockPool(8, SIZE)
    return BlockTable(pool, pool.allocate(3))


MOVES = {
    State.LOADING: lambda request: request.start_loading(table(), 4),
    State.RUNNING: lambda request: request.start_running(table(), 4),
    State.WAITING: lambda request: request.preempt(),
    State.SWAPPING_OUT: lambda request: request.swap_out(),
    State.SWAPPED: lambda request: request.finish_swap(),
    State.FINISHED: lambda request: request.end(State.FINISHED),
    State.ABORTED: lambda request: request.end(State.ABORTED),
}
PATHS = {
    State.WAITING: [],
    State.LOADING: [State.LOADING],
    State.RUNNING: [State.RUNNING],
    State.SWAPPING_OUT: [State.RUNNING, State.SWAPPING_OUT],
    State.SWAPPED: [State.RUNNING, State.SWAPPING_OUT, State.SWAPPED],
    State.FINISHED: [State.RUNNING, State.FINISHED],
    State.ABORTED: [State.ABORTED],
}
LEGAL = {
    (State.WAITING, State.LOADING),
    (State.WAITING, State.RUNNING),
    (State.WAITING, State.ABORTED),
    (State.LOADING, State.RUNNING),
    (State.LOADING, State.ABORTED),
    (State.WAITING, State.FINISHED),
    (State.SWAPPING_OUT, State.FINISHED),
    (State.SWAPPED, State.FINISHED),
    (State.RUNNING, State.WAITING),
    (State.RUNNING, State.SWAPPING_OUT),
    (State.SWAPPING_OUT, State.SWAPPED),
    (State.SWAPPING_OUT, State.ABORTED),
    (State.SWAPPED, State.LOADING),
    (State.SWAPPED, State.RUNNING),
    (State.SWAPPED, State.ABORTED),
    (State.RUNNING, State.FINISHED),
    (State.RUNNING, State.ABORTED),
}


@pytest.mark.parametrize(("state", "following"), list(product(State, State)))
def test_only_the_documented_transitions(state: State, following: State) -> None:
    request = make()
    for step in PATHS[state]:
        MOVES[step](request)
    if (state, following) in LEGAL:
        MOVES[following](request)
        assert request.state is following
    else:
        with pytest.raises(RequestError, match=f"cannot go from {state.value} to {following.value}"):
            MOVES[following](request)
        assert request.state is state


def test_chain_names_prompt_and_output_whatever_the_split() -> None:
    request = make(prompt=6)
    for token in range(6, 13):
        request.append([token], 0.0)
    expected, parent = [], b""
    for block in range(3):
        tokens = np.arange(SIZE * block, SIZE * (block + 1), dtype="<u4").tobytes()
        parent = hashlib.sha256(parent + tokens).digest()
        expected.append(parent)
    assert list(request.chain) == expected
    assert (request.num_tokens, request.num_output, request.reusable_blocks) == (13, 7, 3)


@pytest.mark.parametrize(("length", "blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_last_token_is_never_reused(length: int, blocks: int) -> None:
    assert make(prompt=length).reusable_blocks == blocks


@pytest.mark.parametrize(
    ("max_tokens", "limit", "expected"), [(5, 100, 11), (5, 8, 8), (None, 100, 100), (100, 100, 100)]
)
def test_output_ends_at_the_context(max_tokens: int | None, limit: int, expected: int) -> None:
    assert make(prompt=6, max_tokens=max_tokens, limit=limit).max_tokens == expected


def test_what_is_computed_on_inexact_kv_is_not_exact() -> None:
    request = make()
    request.start_loading(table(), 0)
    assert request.exact
    request.finish_loading(4, exact=False)
    assert not request.exact
    request.preempt()
    assert request.exact
    assert request.num_computed == 0


def test_a_load_that_brought_nothing_taints_nothing() -> None:
    request = make()
    request.start_loading(table(), 4)
    request.finish_loading(4, exact=False)
    assert request.exact


def test_a_request_without_blocks_says_so() -> None:
    with pytest.raises(RequestError, match="'r' is waiting and holds no blocks"):
        _ = make().blocks
