"""Which models' steps wait for the device: those of `routed` ones, and no others.

Tensors without memory (device "meta") have no values that a host could wait for: a step that reads one fails there, as
it would while a CUDA graph is captured.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepseek_reference import saved_deepseek
from family_reference import CASES, saved

from kvtier.engine.models.base import CausalLM
from kvtier.engine.models.decoder import Decoder
from kvtier.engine.models.deepseek import DeepseekModel
from kvtier.engine.models.weights import load_weights
from kvtier.engine.runner import Runner
from kvtier.gpu.storage import DevicePool

META = torch.device("meta")


def waits(model: CausalLM, attention: Callable[..., torch.Tensor]) -> bool:
    tokens = torch.empty(4, dtype=torch.int64, device=META)
    try:
        model.forward(tokens, tokens, attention, tokens)
    except NotImplementedError:
        return True
    return False


@pytest.mark.parametrize("name", ["llama-biased", "qwen3", "mixtral", "qwen2_moe-some-layers", "qwen3_moe"])
def test_steps_wait_where_tokens_are_routed(tmp_path: Path, name: str) -> None:
    saved(tmp_path, CASES[name])
    model = Decoder(load_weights(tmp_path), torch.float32, META)
    assert waits(model, lambda _, q, k, v: q) == model.config.routed == ("moe" in name or "mix" in name)


@pytest.mark.parametrize(("dense", "routed"), [(1, True), (3, False)])
def test_of_deepseeks_those_with_layers_of_experts(tmp_path: Path, dense: int, routed: bool) -> None:
    saved_deepseek(tmp_path, "v3", first_k_dense_replace=dense)
    model = DeepseekModel(load_weights(tmp_path), torch.float32, META)
    latent = model.config.latent.kv_rank
    assert waits(model, lambda _, q, row: q[..., :latent]) == model.config.routed == routed


def test_no_graph_is_tried_for_them_and_the_log_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, CASES["qwen3_moe"])
    model = Decoder(load_weights(tmp_path), torch.float32, torch.device("cpu"))
    with caplog.at_level(logging.INFO, "kvtier"):
        runner = Runner(model, DevicePool(model.layout(16), 8, "cpu"), frozenset(), graphs=True)
    assert runner._graphs is None
    assert [record.message for record in caplog.records if "CUDA graph" in record.message] == [
        "no decode step is replayed as a CUDA graph: the host waits for which experts the tokens chose"
    ]
