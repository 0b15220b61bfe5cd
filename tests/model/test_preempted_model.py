"""The default model on a device that is too small for its requests: the same greedy tokens, swapped or recomputed."""

from pathlib import Path
from typing import Any

import pytest

from kvtier import LLM, SamplingParams

pytestmark = pytest.mark.model

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
PROMPTS = [TEXT[at : at + 300] for at in (0, 700, 1500, 2300)]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def run(model: Path, **engine: Any) -> tuple[list[tuple[int, ...]], Any]:
    config = {"model": {"dtype": "float32"}}
    with LLM(model, tiering={"host": {"capacity": "256MiB"}, "recompute_gate": False}, config=config, **engine) as llm:
        outputs = [output.token_ids for output in llm.generate(list(PROMPTS), GREEDY)]
        assert llm.store is not None
        assert llm.store.stats()["host"]["reservations"] == 0
        return outputs, llm.engine.stats()


@pytest.fixture(scope="module")
def undisturbed(default_model: Path) -> list[tuple[int, ...]]:
    outputs, stats = run(default_model, num_blocks=64)
    assert stats.preemptions == 0
    return outputs


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_the_same_tokens(
    default_model: Path, undisturbed: list[tuple[int, ...]], preemption: str, *, pipelined: bool
) -> None:
    outputs, stats = run(default_model, num_blocks=20, preemption=preemption, pipelined=pipelined)
    assert outputs == undisturbed
    assert stats.preemptions > 0
    assert (stats.swaps > 0) == (preemption == "swap")
