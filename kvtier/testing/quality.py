"""Quality gate: what a KV format does to a real model's next-token distribution.

    prefix [0 ............. P) prefilled exactly -> its KV through encode and decode, block by block
    continuation       [P ... P + C) teacher-forced on top of it; its own KV stays exact

That is tiering's case: a cold prefix comes back lossy. Everything is compared with the same continuation over the
prefix's exact KV. Perplexity hides what retrieval shows, so there are two kinds of windows: natural text, and
`recall`, whose continuation repeats a passage that is planted in an unrelated prefix.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.engine.models import CausalLM
from kvtier.errors import RequestError
from kvtier.formats import choose
from kvtier.layout import Layout

__all__ = ["BOUNDS", "Bounds", "Quality", "QualityProbe", "Window", "WindowKind", "recall_window", "violations"]

WindowKind: TypeAlias = Literal["natural", "recall"]


class Window(NamedTuple):
    """Token ids of one test: `prefix` of whole blocks, `continuation` of at least 2 tokens."""

    kind: WindowKind
    prefix: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quality:
    """Over all scored tokens of one kind of window.

    tokens: how many. kl: mean KL(exact || lossy), nats. delta_nll: mean increase of the negative log-likelihood of
    the text, nats. top1: share of tokens whose most likely next token is the same.
    """

    tokens: int
    kl: float
    delta_nll: float
    top1: float

    @property
    def delta_ppl(self) -> float:
        """Relative increase of perplexity."""
        return math.expm1(self.delta_nll)


class Bounds(NamedTuple):
    """What a format must keep on natural text: at most `kl` and `delta_ppl` (a share), at least `top1`."""

    kl: float
    delta_ppl: float
    top1: float


RECALL_KL_FACTOR = 3.0
RECALL_TOP1 = 0.93

BOUNDS: Mapping[str, Bounds] = {
    "raw": Bounds(0.0, 0.0, 1.0),
    "bitsplit": Bounds(0.0, 0.0, 1.0),
    "int8": Bounds(0.0003, 0.003, 0.98),
    "int8r": Bounds(0.0003, 0.003, 0.98),
    "fp8": Bounds(0.003, 0.005, 0.975),
    "k8v4": Bounds(0.002, 0.006, 0.97),
    "int4r": Bounds(0.012, 0.02, 0.955),
}
"""Measured limits of SmolLM2-135M-Instruct over prefixes of 1,024 tokens; a format outside them is broken."""


def violations(format_id: str, measured: Mapping[WindowKind, Quality]) -> list[str]:
    """Which bounds of `BOUNDS` a measurement breaks, each as one line; a recall window has its own.

    Recall: KL at most 3 times the natural bound, top-1 at least 93 %.
    """
    bounds = BOUNDS[format_id]
    limits = {"natural": bounds, "recall": bounds._replace(kl=RECALL_KL_FACTOR * bounds.kl, top1=RECALL_TOP1)}
    broken = []
    for kind, quality in measured.items():
        limit = limits[kind]
        checks = [("KL", quality.kl, limit.kl), ("top-1 loss", 1 - quality.top1, 1 - limit.top1)]
        if kind == "natural":
            checks.append(("perplexity increase", quality.delta_ppl, limit.delta_ppl))
        broken += [
            f"{format_id}: {name} {value:.5f} on {kind} text, at most {bound:.5f}"
            for name, value, bound in checks
            if value > bound + 1e-9
        ]
    return broken


def recall_window(text: Sequence[int], passage: Sequence[int], prefix: int, continuation: int) -> Window:
    """Plant `passage` in the middle of `text` and let the continuation be its beginning again.

    Args:
        text: unrelated token ids, at least `prefix - len(passage)`.
        passage: token ids, at least `continuation`.
        prefix: tokens of the prefix.
        continuation: tokens of the continuation.

    Raises:
        RequestError: not enough tokens.
    """
    filler = prefix - len(passage)
    if not 0 <= filler <= len(text) or len(passage) < continuation:
        raise RequestError(
            f"text of {len(text)} and passage of {len(passage)} tokens: a prefix of {prefix} and a continuation of "
            f"{continuation} need at least {filler} and {continuation}"
        )
    before = filler // 2
    planted = (*text[:before], *passage, *text[before:filler])
    return Window("recall", planted, tuple(passage[:continuation]))


class _Capture:
    """Attention over one whole sequence that keeps K and V of every layer: [layers, 2, kv_heads, T, head_dim]."""

    def __init__(self) -> None:
        self._layers: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._layers.append(torch.stack((k, v)).transpose(1, 2).clone())
        query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    @property
    def kv(self) -> Tensor:
        return torch.stack(self._layers)


class _Resume:
    """Attention of new tokens over a cached prefix of `kv` [layers, 2, kv_heads, P, head_dim]."""

    def __init__(self, kv: Tensor, tokens: int) -> None:
        self._kv = kv
        prefix = kv.shape[3]
        self._mask = torch.ones(tokens, prefix + tokens, dtype=torch.bool).tril(prefix)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        key, value = torch.cat((self._kv[layer], torch.stack((k, v)).transpose(1, 2)), dim=2).unsqueeze(1)
        query = q.transpose(0, 1).unsqueeze(0)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=self._mask, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)


class QualityProbe:
    """Prefills every window once; then measures any number of formats.

    Args:
        model: a GQA model in float32.
        windows: what to read.
        layout: how the KV is stored: its dtype is what the exact KV is rounded to.
    """

    def __init__(self, model: CausalLM, windows: Sequence[Window], layout: Layout) -> None:
        self._model = model
        self._layout = layout
        self._windows = tuple(windows)
        for window in self._windows:
            if len(window.prefix) % layout.block_size or len(window.continuation) < 2:
                raise RequestError(
                    f"window of {len(window.prefix)} + {len(window.continuation)} tokens: expected a prefix of whole "
                    f"blocks of {layout.block_size} tokens and at least 2 more"
                )
        self._blocks = [self._prefill(window) for window in self._windows]
        self._exact = [
            self._continue(window, blocks) for window, blocks in zip(self._windows, self._blocks, strict=True)
        ]

    def measure(self, format_id: str) -> dict[WindowKind, Quality]:
        """Quality by kind of window. Block 0 of each prefix is stored as `formats.choose` says."""
        scores: dict[WindowKind, list[Tensor]] = {}
        for window, blocks, exact in zip(self._windows, self._blocks, self._exact, strict=True):
            lossy = self._continue(window, self._round_trip(blocks, format_id))
            scores.setdefault(window.kind, []).append(_scores(window, exact, lossy))
        return {kind: _quality(torch.cat(parts)) for kind, parts in scores.items()}

    def stored_bytes(self, format_id: str) -> int:
        """Encoded bytes of all windows' prefixes, headers included."""
        return sum(
            len(self._encode(block, depth, format_id))
            for blocks in self._blocks
            for depth, block in enumerate(blocks.unbind())
        )

    @property
    def raw_bytes(self) -> int:
        """Bytes of all windows' prefixes as they are."""
        return sum(len(blocks) for blocks in self._blocks) * self._layout.block_bytes()

    def _prefill(self, window: Window) -> Tensor:
        """Blocks [B, layers, 2, kv_heads, block_size, head_dim] in the layout's dtype."""
        capture = _Capture()
        tokens = torch.tensor(window.prefix)
        self._model.forward(tokens, torch.arange(len(tokens)), capture, torch.empty(0, dtype=torch.int64))
        kv = capture.kv.to(getattr(torch, self._layout.groups[0].dtype))
        layers, planes, heads, _, width = kv.shape
        blocks = kv.reshape(layers, planes, heads, -1, self._layout.block_size, width)
        return blocks.movedim(3, 0).contiguous()

    def _continue(self, window: Window, blocks: Tensor) -> Tensor:
        """Log-probabilities [C - 1, vocab] of the continuation's tokens from the second on."""
        tokens = torch.tensor(window.continuation)
        positions = torch.arange(len(tokens)) + len(window.prefix)
        attention = _Resume(torch.cat(blocks.unbind(), dim=3).to(self._model.dtype), len(tokens))
        return self._model.forward(tokens, positions, attention, torch.arange(len(tokens) - 1)).log_softmax(-1)

    def _round_trip(self, blocks: Tensor, format_id: str) -> Tensor:
        out = torch.empty_like(blocks)
        for depth, (block, target) in enumerate(zip(blocks.unbind(), out.unbind(), strict=True)):
            encoded = self._encode(block, depth, format_id)
            choose(format_id, depth).decode(encoded, self._layout, _bytes_of(target))
        return out

    def _encode(self, block: Tensor, depth: int, format_id: str) -> memoryview:
        # Extent tiers give a variable format this much room: one that does not compress falls back to raw.
        out = memoryview(bytearray(self._layout.block_bytes() + 4096))
        used = choose(format_id, depth).encode(_bytes_of(block), self._layout, out)
        return out[:used]


def _bytes_of(block: Tensor) -> memoryview:
    return block.view(torch.uint8).view(-1).numpy().data


def _scores(window: Window, exact: Tensor, lossy: Tensor) -> Tensor:
    """Per scored token: KL, increase of the negative log-likelihood, same most likely token. [C - 1, 3]"""
    target = torch.tensor(window.continuation[1:])[:, None]
    kl = (exact.exp() * (exact - lossy)).sum(-1)
    increase = (exact - lossy).gather(1, target)[:, 0]
    same = (exact.argmax(-1) == lossy.argmax(-1)).float()
    return torch.stack((kl, increase, same), dim=1).double()


def _quality(scores: Tensor) -> Quality:
    kl, increase, same = scores.mean(0).tolist()
    return Quality(len(scores), kl, increase, same)
