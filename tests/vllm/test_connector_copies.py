"""Copies into vLLM's own memory that fail under the connector's hands, and loads that several requests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_world import BLOCK, Vllm, tokens_of, whole_blocks

from kvtier.gpu.copies.mover import Mover
from kvtier.gpu.streams.runs import Direction

PROMPT = tokens_of(1700, 6 * BLOCK + 9)
COUSIN = [*PROMPT[: 4 * BLOCK], *tokens_of(1701, 40)]


class Broken:
    """Refuses the copies of every block from the `good`-th on that a batch brings to the device; None: none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.good: int | None = None
        self.refused = 0
        fits = Mover._decode

        def decode(mover: Mover, moves):  # type: ignore[no-untyped-def]
            found = yield from fits(mover, moves)
            if self.good is None or mover._direction is not Direction.TO_DEVICE:
                return found
            self.refused += max(0, found - self.good)
            return min(found, self.good)

        monkeypatch.setattr(Mover, "_decode", decode)


@pytest.fixture(scope="module")
def broken() -> Iterator[Broken]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Broken(monkeypatch)


@pytest.fixture(scope="module", params=["recompute", "fail"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["sync", "async"])
def vllm(request: pytest.FixtureRequest, policy: str, tiny: Path, broken: Broken) -> Iterator[Vllm]:
    with Vllm(tiny, {"host": {"capacity": "16MiB"}, "load": request.param}, policy=policy) as vllm:
        yield vllm


@pytest.fixture
def in_host(vllm: Vllm, broken: Broken, reference) -> list[list[int]]:
    """What the prompts must give, which are in host and not on the device."""
    broken.good, broken.refused = None, 0
    expected = reference([PROMPT, COUSIN], 8)
    assert vllm.tokens([PROMPT, COUSIN]) == expected
    vllm.only("host")
    return expected


@pytest.mark.parametrize("good", [0, 2])
def test_a_copy_that_fails_is_computed_or_an_error(vllm, policy, broken, in_host, good):
    broken.good = good
    (answer,) = vllm.generate([PROMPT])
    assert broken.refused > 0
    if policy == "recompute":
        assert answer.tokens == in_host[0]
    else:
        assert answer.reason == "error"
    broken.good = None
    # What was not copied was handed on to nobody, on the device or in the store.
    for _ in range(2):
        assert vllm.tokens([PROMPT, COUSIN]) == in_host
        vllm.only("host")
    vllm.check_at_rest()


def test_who_shares_blocks_that_do_not_come_is_right_as_well(vllm, policy, broken, in_host):
    broken.good = 1
    answers = vllm.generate([PROMPT, COUSIN, PROMPT])
    assert broken.refused > 0
    expected = [in_host[0], in_host[1], in_host[0]]
    for answer, tokens in zip(answers, expected, strict=True):
        assert answer.tokens == tokens if policy == "recompute" else answer.reason == "error" or answer.tokens == tokens
    broken.good = None
    for _ in range(2):
        assert vllm.tokens([PROMPT, COUSIN]) == in_host
        vllm.only("host")
    vllm.check_at_rest()


def test_blocks_that_several_requests_want_are_loaded_once(vllm, in_host):
    wanted = [PROMPT, PROMPT, COUSIN, PROMPT]
    found, loaded = vllm.loading(wanted)
    assert found == [in_host[0], in_host[0], in_host[1], in_host[0]]
    assert loaded == {"host": whole_blocks([PROMPT]) + whole_blocks([COUSIN]) - 4}
    vllm.check_at_rest()
