"""What a coded device pool does to a real model's next-token distribution: every token reads coded KV, its own too."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kvtier import LLM, SamplingParams
from kvtier.engine.models import LoadedModel, load_model
from kvtier.errors import ConfigError
from kvtier.gpu import DevicePool
from kvtier.gpu.attention import make_attention

pytestmark = pytest.mark.model

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
BLOCK, TOKENS, CHUNK = 16, 576, 192


class Span(NamedTuple):
    block_ids: tuple[int, ...]
    start: int
    stop: int


@pytest.fixture(scope="module")
def loaded(default_model: Path) -> LoadedModel:
    return load_model(default_model, torch.float32)


def distribution(loaded: LoadedModel, kv_format: str) -> torch.Tensor:
    """Log-probabilities [TOKENS, vocab] after every token of the text, which is prefilled in chunks."""
    ids = torch.tensor(loaded.tokenizer.encode(TEXT)[:TOKENS])
    pool = DevicePool(loaded.model.layout(BLOCK), TOKENS // BLOCK, "cpu", kv_format)
    attention, rows = make_attention(pool, loaded.model.config), []
    for start in range(0, TOKENS, CHUNK):
        stop = start + CHUNK
        attention.plan([Span(tuple(range(TOKENS // BLOCK)), start, stop)])
        positions = torch.arange(start, stop)
        rows.append(loaded.model.forward(ids[start:stop], positions, attention, torch.arange(CHUNK)))
    return torch.cat(rows).log_softmax(-1)


@pytest.fixture(scope="module")
def exact(loaded: LoadedModel) -> torch.Tensor:
    return distribution(loaded, "raw")


@pytest.mark.parametrize(
    ("kv_format", "most_kl", "least_top1"),
    [("int8r", 0.001, 0.98), ("int8", 0.004, 0.965), ("fp8", 0.03, 0.93), ("int4r", 0.2, 0.80)],
)
def test_a_coded_pool_keeps_its_bounds(
    loaded: LoadedModel, exact: torch.Tensor, kv_format: str, most_kl: float, least_top1: float
) -> None:
    coded = distribution(loaded, kv_format)
    kl = (exact.exp() * (exact - coded)).sum(-1).mean().item()
    same = (exact.argmax(-1) == coded.argmax(-1)).float().mean().item()
    assert 0 < kl <= most_kl
    assert same >= least_top1


def build(model: Path, nvme: Path, kv_format: str, **host: Any) -> LLM:
    below = {"path": str(nvme), "capacity": "64MiB", "min_free": "0"}
    tiering = {"host": {"capacity": "64MiB"} | host, "nvme": below, "recompute_gate": False, "accept_lossy": True}
    config = {"model": {"dtype": "float32"}}
    return LLM(model, tiering=tiering, config=config, memory="24MiB", kv_format=kv_format)


def test_a_restart_finds_the_blocks_of_its_kv_format(default_model: Path, tmp_path: Path) -> None:
    """The same device memory holds more tokens, and raw KV is found by raw engines only."""
    said, sizes = [], []
    for kv_format, found in (("int8r", False), ("raw", False), ("int8r", True)):
        with build(default_model, tmp_path / "nvme", kv_format) as llm:
            output = llm.generate(TEXT[:1500], GREEDY)
            assert output.metrics.loaded_tokens == (output.prompt_tokens - 1) // BLOCK * BLOCK * found
            said.append(output.token_ids)
            sizes.append(llm.engine.stats().num_blocks)
    assert said[0] == said[2]
    # float32 takes 256 bytes per token and head, int8 64 and a scale.
    assert sizes == [132, 34, 132]


def test_a_format_of_a_tier_leaves_no_directory_behind(default_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiering\.host\.format = 'int8' cannot take this model's KV"):
        build(default_model, tmp_path / "nvme", "int8r", format="int8")
    assert not (tmp_path / "nvme").exists()
