"""The same tokens from every tier, loaded by the request that needs them or ahead of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_world import BLOCK, Vllm, tiers, tokens_of, whole_blocks

PROMPTS = [tokens_of(seed, count) for seed, count in enumerate((100, 200, 257, 330))]


@pytest.fixture(scope="module", params=["sync", "async"])
def load(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(load: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(load) / "nvme"


@pytest.fixture(scope="module")
def vllm(tiny: Path, load: str, directory: Path) -> Iterator[Vllm]:
    with Vllm(tiny, tiers(directory, load=load)) as vllm:
        yield vllm


def test_each_tier_gives_the_same_tokens(vllm, reference):
    expected, blocks = reference(PROMPTS, 8), whole_blocks(PROMPTS)
    assert vllm.loading(PROMPTS) == (expected, {})
    assert vllm.loading(PROMPTS) == (expected, {})  # from the device
    vllm.only("host")
    assert vllm.loading(PROMPTS) == (expected, {"host": blocks})
    vllm.only("nvme")
    assert vllm.loading(PROMPTS) == (expected, {"nvme": blocks})
    # They are in host again.
    vllm.only("host")
    assert vllm.loading(PROMPTS) == (expected, {"host": blocks})
    vllm.check_at_rest()


def test_what_the_device_has_is_not_loaded(vllm, reference):
    long = tokens_of(50, 10 * BLOCK + 5)
    short = long[: 4 * BLOCK + 5]
    expected = reference([short, long], 8)
    vllm.tokens([long])
    vllm.only("host")
    assert vllm.loading([short]) == (expected[:1], {"host": 4})
    assert vllm.loading([long]) == (expected[1:], {"host": 6})


def test_a_conversation_finds_its_own_answers(vllm, reference):
    prompt = tokens_of(51, BLOCK + 10)
    for turn in range(4):
        (expected,) = reference([prompt], 40)
        vllm.only("nvme" if turn % 2 else "host")
        answers, loaded = vllm.loading([prompt], 40)
        assert answers == [expected]
        assert sum(loaded.values()) == (whole_blocks([prompt]) if turn else 0)
        prompt = [*prompt, *expected, *tokens_of(60 + turn, 7)]


def test_requests_with_one_prefix_load_it_once(vllm, reference):
    prefix = tokens_of(70, 8 * BLOCK)
    prompts = [[*prefix, *tokens_of(71 + each, 20)] for each in range(4)]
    expected = reference(prompts, 8)
    assert vllm.tokens(prompts) == expected
    vllm.only("nvme")
    assert vllm.loading(prompts) == (expected, {"nvme": 8})
    vllm.only("host")
    assert vllm.loading(prompts) == (expected, {"host": 8})
    vllm.check_at_rest()


def test_equal_requests_load_once(vllm, reference):
    prompts = [tokens_of(80, 6 * BLOCK + 1)] * 5
    expected = reference(prompts, 8)
    assert vllm.tokens(prompts) == expected
    vllm.only("nvme")
    assert vllm.loading(prompts) == (expected, {"nvme": 6})


def test_what_was_loaded_for_one_token_stays_on_the_device(vllm, reference):
    prompts = [tokens_of(85, 6 * BLOCK + 1)]
    expected = reference(prompts, 1)
    vllm.tokens(prompts, 1)
    vllm.only("host")
    assert vllm.loading(prompts, 1) == (expected, {"host": 6})
    (answer,) = vllm.generate(prompts, 1)
    assert (answer.cached, vllm.loading(prompts, 1)) == (6 * BLOCK, (expected, {}))


def test_the_reset_of_the_connector_empties_every_tier(vllm, reference):
    prompts = [tokens_of(90, 5 * BLOCK + 1)]
    expected = reference(prompts, 8)
    vllm.tokens(prompts)
    vllm.settle()
    assert vllm.llm.reset_prefix_cache(reset_connector=True)
    assert vllm.loading(prompts) == (expected, {})
    vllm.only("host")
    assert vllm.loading(prompts) == (expected, {"host": 5})
