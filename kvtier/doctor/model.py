"""The configured model: what its KV looks like, from its files alone, and how fast it computes KV."""

from pathlib import Path

import torch

from kvtier.config import Config
from kvtier.doctor.findings import ModelFacts
from kvtier.engine import Engine, EngineOptions, SamplingParams
from kvtier.engine.models.catalog import cache_dir, default_model_path
from kvtier.engine.models.registry import load_model, preferred_dtype
from kvtier.engine.models.weights import load_weights
from kvtier.errors import ModelError
from kvtier.gpu.storage import stored_layout
from kvtier.layout import Layout

__all__ = ["measure_prefill", "model_facts"]

_PROMPT_TOKENS = 256
_ROUNDS = 2  # the first warms up


def _source(config: Config) -> Path:
    source = config.model.path or default_model_path(cache_dir())
    if source is None:
        raise ModelError("the default model is not here: fetch it with `kvtier model get`")
    return Path(source)


def _device(config: Config) -> torch.device:
    usable = torch.cuda.is_available()
    wanted = config.model.device
    return torch.device("cuda" if usable and wanted != "cpu" else "cpu")


def _dtype(config: Config) -> torch.dtype | None:
    name = config.model.dtype
    return None if name == "auto" else getattr(torch, name)


def model_facts(config: Config) -> ModelFacts:
    """Layout and limits; reads the model's description, not its weights.

    Raises:
        ModelError: the files are missing, damaged or of an unsupported model.
    """
    source = _source(config)
    described = load_weights(source).config
    dtype = _dtype(config) or preferred_dtype(described, _device(config))
    raw = Layout(config.engine.block_size, described.layer_groups(str(dtype).removeprefix("torch.")))
    layout = stored_layout(raw, config.engine.kv_format)
    longest = config.engine.max_model_len or described.max_positions
    return ModelFacts(source.name, layout, described.dtype, longest)


def measure_prefill(config: Config) -> float:
    """Tokens per second of one prompt's prefill, on the model itself.

    Raises:
        ModelError: the model cannot be loaded.
    """
    model = load_model(_source(config), _dtype(config), _device(config), config.model.weights)
    count = min(_PROMPT_TOKENS, model.config.max_positions - 1)
    size = config.engine.block_size
    options = EngineOptions(
        block_size=size,
        num_blocks=2 * _ROUNDS * (count // size + 1),
        kv_format=config.engine.kv_format,
        token_budget=config.engine.token_budget,
    )
    engine = Engine(model, options)
    rate = 0.0
    for number in range(_ROUNDS):
        # Another first token, another prefix: nothing of the round before is reused.
        prompt = [(number + 1 + at) % model.config.vocab for at in range(count)]
        engine.add(f"doctor-{number}", prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        while engine.has_work:
            for output in engine.step():
                rate = count / output.metrics.ttft
    return rate
