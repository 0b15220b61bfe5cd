"""A load that is given up while its request holds device blocks, and the request with it, in the same step."""

from pathlib import Path

import pytest
from vllm_world import BLOCK, Vllm, tiers, tokens_of

from kvtier.store import build
from kvtier.testing import Fault, FaultyTier, Kind

PROMPTS = [tokens_of(2100 + each, 6 * BLOCK + 9) for each in range(3)]


def test_its_end_is_told_once(tiny: Path, tmp_path: Path, reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps the blocks until it is told that the load is over, and knows the request no more from then on."""
    opened, made = build._open_nvme, list[FaultyTier]()

    def faulty(*arguments: object) -> FaultyTier:
        made.append(FaultyTier(opened(*arguments)))
        return made[0]

    monkeypatch.setattr(build, "_open_nvme", faulty)
    with Vllm(tiny, tiers(tmp_path / "nvme", load="async", load_deadline=1)) as vllm:
        expected = reference(PROMPTS, 8)
        assert vllm.tokens(PROMPTS) == expected
        vllm.only("nvme")
        made[0].inject(Fault("read", Kind.HANG))
        names = [vllm.submit(prompt) for prompt in PROMPTS]
        side, told = vllm.connector._scheduler, list[str]()
        plan = side.plan

        def watched(output):  # type: ignore[no-untyped-def]
            work = plan(output)
            if work.ended and not told:
                told.extend(work.ended)
                vllm.within_next_step(lambda: vllm.abort(names))
            return work

        side.plan = watched
        vllm.run()
        assert told
        side.plan = plan
        made[0].heal()
        assert vllm.tokens(PROMPTS) == expected
        vllm.check_at_rest()
