"""What a model's files say about its shapes and numerics. Knows no torch.

fields     typed access to entries of JSON and GGUF files
shapes     ModelConfig and its parts, as data

Who fills it in for which architecture: `kvtier.engine.models.families`.
"""

from kvtier.engine.models.config.fields import Fields, eos_ids_from_hf, read_json
from kvtier.engine.models.config.shapes import (
    ExpertNames,
    ExpertsConfig,
    Llama3Scaling,
    ModelConfig,
    RopeFactors,
    RopeScaling,
)

__all__ = [
    "ExpertNames",
    "ExpertsConfig",
    "Fields",
    "Llama3Scaling",
    "ModelConfig",
    "RopeFactors",
    "RopeScaling",
    "eos_ids_from_hf",
    "read_json",
]
