"""What sparse attention does to a real model: KL and top-1 on natural text and on recall, by kind and share of blocks.

    python benchmarks/sparse.py [--quick] [--json PATH]

SmolLM2-135M-Instruct in float32. Each window's prefix of 1,024 tokens (64 blocks) is prefilled in full; its
continuation is decoded token by token, teacher-forced, attending to a share of the blocks: 50, 25 and 12.5 %. The same
steps without sparsity are the reference. Recall: the continuation repeats a passage that is planted in an unrelated
prefix. `--quick`: one window of each kind, 48 tokens, 25 % only. Last, CPU seconds of decodes at a context of 4,096.

Prediction, written before the first run (from published figures): quest at 25 % keeps recall top-1 above 93 %;
streaming and h2o keep 35 to 50 %.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from harness import Report, Result, arguments
from quality import RECALL_TOKENS, windows
from torch import Tensor

from kvtier.engine.models import LoadedModel, load_model
from kvtier.engine.models.catalog import cache_dir, fetch_default_model
from kvtier.engine.sparse import Sparse
from kvtier.gpu.attention import make_paged_attention
from kvtier.gpu.sparse import SparseAttention, SparseSpan
from kvtier.gpu.storage import DevicePool
from kvtier.testing.quality import Window

KINDS = ("streaming", "h2o", "quest")
SHARES = (0.5, 0.25, 0.125)
BLOCK = 16


class Span(NamedTuple):
    block_ids: Sequence[int]
    start: int
    stop: int


class Decoder:
    """One sequence at a time, straight on the model and its attention."""

    def __init__(self, loaded: LoadedModel, tokens: int) -> None:
        self.model = loaded.model
        self.pool = DevicePool(self.model.layout(BLOCK), -(-tokens // BLOCK), self.model.device)
        self.base = make_paged_attention(self.pool, loaded.config.heads)
        self.heads = loaded.config.heads

    def run(self, window: Window, tokens: int, rule: Sparse | None) -> tuple[Tensor, float]:
        """Log-probabilities [tokens - 1, vocab] of the continuation after its first token; CPU seconds of decodes."""
        attention = SparseAttention(self.base, self.pool, self.heads)
        table, prefix = range(self.pool.blocks.num_blocks), len(window.prefix)
        rows = []
        with torch.inference_mode():
            for start in range(0, prefix, 512):
                self._forward(
                    attention, window.prefix[start : start + 512], Span(table, start, min(start + 512, prefix)), rule
                )
            began = time.process_time()
            for at, token in enumerate(window.continuation[: tokens - 1]):
                logits = self._forward(attention, (token,), Span(table, prefix + at, prefix + at + 1), rule)
                rows.append(logits[0].log_softmax(-1))
        return torch.stack(rows), time.process_time() - began

    def _forward(self, attention: SparseAttention, tokens: Sequence[int], span: Span, rule: Sparse | None) -> Tensor:
        attention.plan([span], [SparseSpan("r", rule)])
        positions = torch.arange(span.start, span.stop)
        return self.model.forward(torch.tensor(tokens), positions, attention, torch.tensor([len(tokens) - 1]))


def measure(decoder: Decoder, chosen: Sequence[Window], tokens: int, shares: Sequence[float], report: Report) -> None:
    exact = [decoder.run(window, tokens, None)[0] for window in chosen]
    for kind in KINDS:
        for share in shares:
            scores: dict[str, list[Tensor]] = {}
            for window, reference in zip(chosen, exact, strict=True):
                found, _ = decoder.run(window, tokens, Sparse(kind, share))  # type: ignore[arg-type]
                kl = (reference.exp() * (reference - found)).sum(-1)
                same = (reference.argmax(-1) == found.argmax(-1)).float()
                scores.setdefault(window.kind, []).append(torch.stack((kl, same), 1))
            for text, parts in scores.items():
                divergence, same_top = torch.cat(parts).double().mean(0).tolist()
                params = {"share": share, "tokens": sum(map(len, parts)), "kl": round(divergence, 4)}
                report.add(Result(f"engine.sparse.{kind}.{text}", 100 * same_top, "% top-1", params))


def speed(loaded: LoadedModel, report: Report) -> None:
    decoder = Decoder(loaded, 4096 + 64)
    prefix = torch.randint(100, loaded.config.vocab, (4096,), generator=torch.Generator().manual_seed(0)).tolist()
    window = Window("natural", tuple(prefix), tuple(prefix[:33]))
    rules = {"dense": None, **{kind: Sparse(kind, 0.25) for kind in KINDS}}  # type: ignore[arg-type]
    seconds = {name: decoder.run(window, 33, rule)[1] / 32 for name, rule in rules.items()}
    for kind in KINDS:
        ratio = seconds["dense"] / seconds[kind]
        params, dense = {"context": 4096, "share": 0.25}, 1e3 * seconds["dense"]
        name = f"engine.sparse.{kind}.decode"
        report.add(Result(name, 1e3 * seconds[kind], "CPU ms/token", params, "dense", dense, ratio))


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    loaded = load_model(fetch_default_model(cache_dir(), lambda *_: None), torch.float32)
    report = Report(args.json)
    chosen = windows(loaded, 1 if args.quick else 2)
    tokens = 48 if args.quick else RECALL_TOKENS
    measure(Decoder(loaded, 1024 + tokens), chosen, tokens, SHARES[1:2] if args.quick else SHARES, report)
    speed(loaded, report)
    report.write()


if __name__ == "__main__":
    main()
