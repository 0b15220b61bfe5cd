"""A real decoder of a few thousand weights and a byte tokenizer, so that the engine can be tested without files."""

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from kvtier.engine.models import LoadedModel, ModelConfig
from kvtier.engine.models.base import Attention
from kvtier.engine.tokenizer import Tokenizer
from kvtier.layout import Layout

EOS = 0


def tiny_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": EOS} | {letter: at for at, letter in enumerate(alphabet, 1)}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, {"eos_token": "<eos>"}, frozenset({EOS}), None)


class TinyModel:
    """Embedding, two layers of attention with residuals, output. Implements `CausalLM`."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.dtype, self.device = torch.float32, torch.device("cpu")
        generator = torch.Generator().manual_seed(0)

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

        width = config.head_dim
        self.embedding = weights(config.vocab, config.hidden) * 3
        self.places = weights(config.max_positions, config.hidden) * 3
        sizes = (config.heads * width, config.kv_heads * width, config.kv_heads * width)
        self.layers = [
            (*(weights(size, config.hidden) for size in sizes), weights(config.hidden, sizes[0]))
            for _ in range(config.layers)
        ]
        self.head = weights(config.vocab, config.hidden) * 4
        self.fails = False

    @property
    def numerics(self) -> str:
        return "tiny"

    def layout(self, block_size: int) -> Layout:
        return Layout(block_size, self.config.layer_groups("float32"))

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention, logit_rows: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("out of memory")
        hidden = self.embedding[token_ids] + self.places[positions]
        for index, (query, key, value, out) in enumerate(self.layers):
            q, k, v = (
                (hidden @ matrix.T).view(len(hidden), -1, self.config.head_dim) for matrix in (query, key, value)
            )
            hidden = hidden + torch.tanh(attention(index, q, k, v).flatten(1) @ out.T)
        return hidden[logit_rows] @ self.head.T


def tiny_model(windows: tuple[int | None, ...] = ()) -> LoadedModel:
    """windows: of its two layers."""
    tokenizer = tiny_tokenizer()
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        hidden=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate=32,
        vocab=tokenizer.vocab_size,
        rms_eps=1e-5,
        rope_theta=10_000.0,
        rope_scaling=None,
        tied=False,
        max_positions=256,
        eos_ids=tokenizer.eos_ids,
        dtype="float32",
        windows=windows,
    )
    return LoadedModel(TinyModel(config), config, tokenizer, "tiny")
