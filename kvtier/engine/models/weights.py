"""Weights: a checkpoint's tensors by their HF names, read on demand from mapped files, and their fingerprint."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvtier.engine.models.config import ModelConfig, read_json
from kvtier.engine.models.families import config_from_hf
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import ModelError

__all__ = ["SafetensorsWeights", "Weights", "load_weights"]


class Weights(Mapping[str, Tensor], ABC):
    """An open checkpoint: HF tensor name -> CPU tensor, read when asked for; it may alias the mapped file."""

    config: ModelConfig
    origin: Path

    @property
    def fingerprint(self) -> str:
        """32 hex digits that change whenever any weight, name, shape or stored dtype does.

        Reads every stored byte once (xxh3_128 per tensor, sha256 over the list), which costs less than loading
        the weights does. A revision that leaves all weights as they are keeps its fingerprint, in whatever
        shards they come; another precision or quantisation of the same model is another model.
        """
        digest = hashlib.sha256(b"kvtier.weights.1\0")
        for name in sorted(self):
            digest.update(f"{name}\0{self._stored(name)}\0".encode())
        return digest.hexdigest()[:32]

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor's own copy in `dtype` on `device`. Raises ModelError where it is missing or of another shape."""
        if name not in self:
            raise ModelError(f"{self.origin}: no tensor {name}: the checkpoint is incomplete, download it again")
        tensor = self[name]
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.origin}: {name} has shape {tuple(tensor.shape)}, its config asks for {shape}: "
                "config and weights are of different models"
            )
        return tensor.to(device=device, dtype=dtype, copy=True)

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the checkpoint carries."""

    @abstractmethod
    def _stored(self, name: str) -> str:
        """Dtype, shape and checksum of a tensor as it lies in the file."""


class SafetensorsWeights(Weights):
    """A HF directory: config.json with model.safetensors, or with shards named by model.safetensors.index.json."""

    def __init__(self, directory: Path) -> None:
        self.origin = directory
        self.config = config_from_hf(directory)
        self._files: dict[str, Any] = {name: file for path in _shards(directory) for file, name in _opened(path)}

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of tokenizer.json and its companions."""
        return Tokenizer.from_directory(self.origin)

    def _stored(self, name: str) -> str:
        tensor = self[name]
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{tensor.dtype}{list(tensor.shape)}{xxhash.xxh3_128_hexdigest(data.data)}"


def load_weights(source: Path) -> Weights:
    """Open a HF model directory or a GGUF file.

    Raises:
        ModelError: nothing there, a damaged or foreign file, or a model that is not supported.
    """
    if source.is_dir():
        return SafetensorsWeights(source)
    if not source.is_file():
        raise ModelError(
            f"model {source}: no such file or directory: expected a HF model directory or a .gguf file; a model of the "
            "hub is not fetched here: `hf download NAME --local-dir DIRECTORY` does it"
        )
    from kvtier.engine.models.gguf_file import GGUFWeights  # noqa: PLC0415  # gguf is slow to import, and rarely needed

    return GGUFWeights(source)


def _shards(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(f"{directory}: neither model.safetensors nor {index.name}: the checkpoint is incomplete")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index}: no weight_map: the file is damaged, download it again")
    names = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in names if not (directory / name).is_file()]
    if missing or not names:
        raise ModelError(f"{index} names {len(names)} files, missing: {', '.join(missing) or 'all'}: download them")
    return [directory / name for name in names]


def _opened(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        file: Any = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: {error}: the file is truncated or damaged, download it again") from error
    for name in file.keys():  # noqa: SIM118  # a safe_open cannot be iterated
        yield file, name
