"""Tiers that fail, lie, hang or fill up under a running vLLM: the same tokens, and a counter that says so."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_world import BLOCK, Vllm, tiers, tokens_of, whole_blocks

from kvtier.store import build
from kvtier.testing import Fault, FaultyTier, Kind

PROMPTS = [tokens_of(800 + each, 6 * BLOCK + 9) for each in range(3)]
DEADLINE = 1.5
"""Seconds after which a load is a miss."""


class World:
    """An engine whose NVMe tier fails as it is told to."""

    def __init__(self, vllm: Vllm, nvme: FaultyTier, directory: Path) -> None:
        self.vllm, self.nvme, self.directory = vllm, nvme, directory


@pytest.fixture(scope="module", params=["recompute", "fail"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["sync", "async"])
def world(
    request: pytest.FixtureRequest, policy: str, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    made: list[FaultyTier] = []
    directory = tmp_path_factory.mktemp("faulty") / "nvme"
    opened = build._open_nvme

    def faulty(*arguments: object) -> FaultyTier:
        made.append(FaultyTier(opened(*arguments)))
        return made[0]

    settings = tiers(directory, load=request.param, load_deadline=DEADLINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_open_nvme", faulty)
        with Vllm(tiny, settings, policy=policy) as vllm:
            yield World(vllm, made[0], directory)


@pytest.fixture
def on_nvme(world: World, reference) -> list[list[int]]:
    """`PROMPTS` are on NVMe and nowhere above; what they must give."""
    world.nvme.heal()
    expected = reference(PROMPTS, 8)
    assert world.vllm.tokens(PROMPTS) == expected
    world.vllm.only("nvme")
    return expected


@pytest.mark.parametrize(
    "fault",
    [
        Fault("read", Kind.EIO, first_item=3),
        Fault("read", Kind.SHORT, first_item=1),
        Fault("read", Kind.CORRUPT, first_item=2),
        Fault("read", Kind.VANISH, first_item=2),
        Fault("acquire", Kind.VANISH, first_item=4),
        Fault("contains", Kind.EIO),
        Fault("read", Kind.UNAVAILABLE),
        Fault("acquire", Kind.UNAVAILABLE),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.verb}",
)
def test_what_fails_is_computed(world, on_nvme, fault):
    vllm = world.vllm
    world.nvme.inject(fault)
    answers = vllm.generate(PROMPTS)
    assert [answer.tokens for answer in answers] == on_nvme
    assert {answer.reason for answer in answers} == {"length"}
    assert sum(world.nvme.injected.values()) > 0
    vllm.check_at_rest()


def test_requests_that_share_what_fails_wait_for_who_computes_it(world, on_nvme, reference):
    vllm = world.vllm
    cousin = [*PROMPTS[0][: 4 * BLOCK], *tokens_of(860, 30)]
    asked = [PROMPTS[0], PROMPTS[0], cousin, PROMPTS[1]]
    world.nvme.inject(Fault("read", Kind.EIO, first_item=2))
    assert vllm.tokens(asked) == reference(asked, 8)
    world.nvme.heal()
    vllm.check_at_rest()


def test_flipped_bytes_on_disk_are_a_miss(world, on_nvme):
    vllm = world.vllm
    before = vllm.value("corrupt_blocks_total", tier="nvme"), vllm.loaded().get("nvme", 0)
    for segment in world.directory.glob("seg-*.kv"):
        data = bytearray(segment.read_bytes())
        data[1000::4096] = bytes(byte ^ 1 for byte in data[1000::4096])
        segment.write_bytes(data)
    assert vllm.tokens(PROMPTS) == on_nvme
    assert vllm.value("corrupt_blocks_total", tier="nvme") > before[0]
    assert vllm.loaded().get("nvme", 0) == before[1]
    # What was computed again takes the place of what was damaged.
    vllm.only("host")
    assert vllm.loading(PROMPTS) == (on_nvme, {"host": whole_blocks(PROMPTS)})
    vllm.check_at_rest()


def test_a_tier_that_hangs_holds_up_nobody_else(world, on_nvme, reference):
    vllm = world.vllm
    decoding = tokens_of(850, BLOCK)
    (expected,) = reference([decoding], 60)
    world.nvme.inject(Fault("read", Kind.HANG))
    running = vllm.submit(decoding, 60)
    vllm.step()
    waiting = [vllm.submit(prompt) for prompt in PROMPTS]
    slowest = 0.0
    while running not in vllm.answers or vllm.answers[running].reason is None:
        began = time.monotonic()
        vllm.step()
        slowest = max(slowest, time.monotonic() - began)
    assert vllm.answers[running].tokens == expected
    assert slowest < DEADLINE / 2
    vllm.run()
    assert [vllm.answers[name].tokens for name in waiting] == on_nvme
    assert {vllm.answers[name].reason for name in waiting} == {"length"}
    world.nvme.heal()
    vllm.check_at_rest()
