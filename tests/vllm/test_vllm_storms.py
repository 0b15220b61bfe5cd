"""Many requests that come, give way and are aborted at any moment: no wrong token, and nothing held afterwards."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_llama import BLOCK_BYTES
from vllm.v1.request import RequestStatus
from vllm_world import BLOCK, Answer, Vllm, tiers, tokens_of, whole_blocks

FAMILIES = [tokens_of(300 + family, 5 * BLOCK) for family in range(6)]
OUTPUT = 40
STORM_STEPS = 400
NOTHING = Answer([], 0, None)


def prompts() -> list[list[int]]:
    """Of each family some that share one to five of its blocks, with tails of their own."""
    dice = random.Random(1)
    return [
        [*family[: dice.randint(1, 5) * BLOCK], *tokens_of(400 + number, dice.randint(1, 40))]
        for number, family in enumerate(FAMILIES * 4)
    ]


def statuses(vllm: Vllm, names: list[str]) -> dict[str, str]:
    """Name -> state of the requests that the scheduler still knows; it adds something of its own to their names."""
    known = {name.rpartition("-")[0]: request for name, request in vllm.scheduler.requests.items()}
    return {name: RequestStatus(known[name].status).name for name in names if name in known}


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_aborts_in_every_state(tiny, tmp_path, reference, load, policy):
    choices = prompts()
    expected = dict(zip(map(tuple, choices), reference(choices, OUTPUT), strict=True))
    dice = random.Random(f"{load} {policy}")
    met: Counter[str] = Counter()
    asked: dict[str, list[int]] = {}
    ended: list[str] = []
    with Vllm(
        tiny,
        tiers(tmp_path / "nvme", host="1MiB", load=load),
        policy=policy,
        blocks=20,
        max_model_len=256,
        max_num_seqs=6,
        max_num_batched_tokens=96,
    ) as vllm:
        for _ in range(STORM_STEPS):
            alive = [name for name in asked if name not in vllm.answers or vllm.answers[name].reason is None]
            if len(alive) < 8 and dice.random() < 0.5:
                prompt = dice.choice(choices)
                asked[vllm.submit(prompt, OUTPUT)] = prompt
            if alive and dice.random() < 0.2:
                states = statuses(vllm, alive)
                state = dice.choice(sorted(set(states.values())))  # each as often as the others
                victim = dice.choice([name for name in alive if states[name] == state])
                met[state] += 1
                vllm.abort([victim, *ended])  # of those that ended in this very step nobody knows any more
                prompt, so_far = asked.pop(victim), vllm.answers.pop(victim, NOTHING).tokens
                assert so_far == expected[tuple(prompt)][: len(so_far)]
            if dice.random() < 0.05:
                vllm.store.clear("host")
            vllm.step()
            ended = [name for name in alive if name in vllm.answers and vllm.answers[name].reason is not None]
        vllm.run()
        for name, prompt in asked.items():
            answer = vllm.answers[name]
            assert (answer.tokens, answer.reason) == (expected[tuple(prompt)], "length")
        assert sum(vllm.loaded().values()) > 0
        vllm.check_at_rest()
        # All of the pool and of the tiers can be used: nothing leaked.
        vllm.forget()
        vllm.store.clear()
        assert {name: vllm.value("occupied_bytes", tier=name) for name in ("host", "nvme")} == {"host": 0, "nvme": 0}
        assert vllm.tokens(choices[:4], OUTPUT) == [expected[tuple(prompt)] for prompt in choices[:4]]
    wanted = {"WAITING", "RUNNING", "PREEMPTED", *(["WAITING_FOR_REMOTE_KVS"] if load == "async" else [])}
    assert wanted <= set(met)


@pytest.fixture(scope="module", params=["sync", "async"])
def small(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Vllm]:
    """A device that cannot hold four requests at once."""
    with Vllm(tiny, tiers(load=request.param), blocks=20, max_model_len=256, max_num_seqs=8) as vllm:
        yield vllm


def preemptions(vllm: Vllm) -> int:
    return next(int(metric.value) for metric in vllm.llm.get_metrics() if metric.name == "vllm:num_preemptions")


def test_preempted_requests_come_back_from_host(small, reference):
    asked = [tokens_of(700 + each, 109) for each in range(4)]
    expected = reference(asked, 96)
    assert small.tokens(asked, 96) == expected
    assert preemptions(small) > 0
    small.only("host")
    before = sum(small.loaded().values())
    assert small.tokens(asked, 96) == expected
    assert sum(small.loaded().values()) - before >= whole_blocks(asked) * BLOCK_BYTES
    small.check_at_rest()


def test_a_working_set_beyond_the_device_is_loaded_again(small, reference):
    prefixes = [tokens_of(720 + each, 5 * BLOCK) for each in range(6)]
    asked = [
        [*prefix, *tokens_of(730 + 10 * turn + each, 9)] for turn in range(3) for each, prefix in enumerate(prefixes)
    ]
    expected = reference(asked, 8)
    small.only("host")
    before = sum(small.loaded().values())
    for prompt, answer in zip(asked, expected, strict=True):
        assert small.tokens([prompt]) == [answer]
    # 19 blocks hold three of the six at most: by turns, none is there when it is asked for again.
    assert sum(small.loaded().values()) - before == 12 * 5 * BLOCK_BYTES
    small.check_at_rest()


def test_small_loads_pass_a_large_request_that_does_not_fit(small, reference):
    """Parked loads hold blocks while the head of the queue needs nearly all of them."""
    little = [tokens_of(760 + each, 2 * BLOCK + 5) for each in range(6)]
    large = tokens_of(770, 7 * BLOCK)
    expected = reference([*little, large], 8)
    small.tokens(little)
    small.only("host")
    assert small.tokens([large, *little, large]) == [expected[-1], *expected]
    small.check_at_rest()
