"""What each KV format does to a real model: KL, perplexity, top-1, on natural text and on recall.

    python benchmarks/quality.py [--quick] [--json PATH] [--markdown PATH]

SmolLM2-135M-Instruct in float32 over KV stored from bfloat16; 3 natural windows of 1,024 + 256 tokens and 2 recall
windows of 1,024 + 128 (`--quick`: one of each). Exits 1 if a format breaks its bounds,
`kvtier.testing.quality.BOUNDS`.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from harness import Report, Result, arguments

from kvtier.engine.models import LoadedModel, load_model
from kvtier.engine.models.catalog import cache_dir, fetch_default_model
from kvtier.layout import Layout
from kvtier.testing.quality import BOUNDS, Quality, QualityProbe, Window, WindowKind, recall_window, violations

TEXTS = Path(__file__).parents[1] / "tests/data/quality"
NATURAL = ("persuasion", "sockets", "functional")
RECALL = (("northanger", "sorting"), ("mansfield", "logging"))
PREFIX, NATURAL_TOKENS, RECALL_TOKENS, PASSAGE = 1024, 256, 128, 160


def windows(loaded: LoadedModel, each: int | None = None) -> list[Window]:
    """The gate's windows; `each`: at most so many of a kind."""

    def tokens(name: str) -> list[int]:
        return loaded.tokenizer.encode((TEXTS / f"{name}.txt").read_text())

    natural = [
        Window("natural", tuple(ids[:PREFIX]), tuple(ids[PREFIX : PREFIX + NATURAL_TOKENS]))
        for ids in map(tokens, NATURAL[:each])
    ]
    recall = [
        recall_window(tokens(text), tokens(passage)[:PASSAGE], PREFIX, RECALL_TOKENS) for text, passage in RECALL[:each]
    ]
    return natural + recall


def make_probe(loaded: LoadedModel, each: int | None = None) -> QualityProbe:
    """A probe over KV in bfloat16."""
    layout = loaded.model.layout(16)
    stored = Layout(layout.block_size, tuple(replace(group, dtype="bfloat16") for group in layout.groups))
    return QualityProbe(loaded.model, windows(loaded, each), stored)


def row(format_id: str, ratio: float, measured: Mapping[WindowKind, Quality]) -> str:
    natural, recall, bounds = measured["natural"], measured["recall"], BOUNDS[format_id]
    return (
        f"| `{format_id}` | {ratio:.2f} | {natural.kl:.5f} (≤ {bounds.kl:g}) | {natural.delta_ppl:+.2%} "
        f"(≤ {bounds.delta_ppl:.1%}) | {natural.top1:.1%} (≥ {bounds.top1:.1%}) | {recall.kl:.5f} | {recall.top1:.1%} |"
    )


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    args = parser.parse_args()
    loaded = load_model(fetch_default_model(cache_dir(), lambda *_: None), torch.float32)
    probe = make_probe(loaded, 1 if args.quick else None)
    report = Report(args.json)
    table = [
        "| format | ratio | natural: KL | perplexity | top-1 | recall: KL | top-1 |",
        "|---|---|---|---|---|---|---|",
    ]
    broken: list[str] = []
    for format_id in BOUNDS:
        measured = probe.measure(format_id)
        ratio = probe.raw_bytes / probe.stored_bytes(format_id)
        for kind, quality in measured.items():
            params = {"tokens": quality.tokens, "delta_ppl": quality.delta_ppl, "top1": quality.top1, "ratio": ratio}
            report.add(Result(f"quality.{format_id}.{kind}", quality.kl, "KL nats", params))
        table.append(row(format_id, ratio, measured))
        broken += violations(format_id, measured)
    report.write()
    if args.markdown is not None:
        args.markdown.write_text("\n".join(table) + "\n")
    print("\n".join(broken) or "every format is inside its bounds")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
