"""KV in fewer bits: how much smaller each format makes a block, and what that does to the next token.

A prefix goes through a format and back, then the text goes on over it: KL and the share of equal most likely tokens are
against the same text over the exact KV. Lossy KV is reused only where `tiering.accept_lossy` says so.

python examples/quantized_tiers.py [MODEL]
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from kvtier import LLM, SamplingParams
from kvtier.engine.models.catalog import cache_dir, fetch_default_model
from kvtier.engine.models.registry import load_model
from kvtier.testing.quality import QualityProbe, Window

TEXT = (
    "Harbour rules. Boats longer than twelve metres moor at the outer pier. Visitors register at the office before "
    "noon. Fires are allowed on the east beach only. The crane is free on weekdays between eight and ten. Dogs are "
    "welcome, on a lead. Who leaves for more than a week tells the office, and pays the berth in advance. At low tide "
    "the inner basin falls dry; boats with a fin keel lie at the quay. Water and power are at every second post. "
)
FORMATS = ("raw", "bitsplit", "int8", "int4r")
PREFIX, REST = 192, 64


def measure(model: Path) -> dict[str, tuple[float, float, float]]:
    """Format -> how many times smaller, KL in nats, share of equal most likely tokens."""
    import torch  # noqa: PLC0415

    loaded = load_model(model, torch.float32)
    layout = loaded.model.layout(16)
    layout = replace(layout, groups=tuple(replace(group, dtype="bfloat16") for group in layout.groups))
    tokens = loaded.tokenizer.encode(TEXT * 3)
    window = Window("natural", tuple(tokens[:PREFIX]), tuple(tokens[PREFIX : PREFIX + REST]))
    probe = QualityProbe(loaded.model, [window], layout)
    found = {}
    for name in FORMATS:
        quality = probe.measure(name)["natural"]
        found[name] = (probe.raw_bytes / probe.stored_bytes(name), quality.kl, quality.top1)
    return found


def reuse(model: Path, *, accept_lossy: bool) -> int:
    """Tokens loaded from an NVMe tier in int4r, by a request that does or does not take lossy KV."""
    with tempfile.TemporaryDirectory() as directory:
        nvme = {"path": directory + "/kv", "capacity": "256MiB", "format": "int4r", "min_free": 0}
        tiering = {"host": {"capacity": "64MiB"}, "nvme": nvme, "accept_lossy": True, "recompute_gate": False}
        params = SamplingParams(max_tokens=4, temperature=0.0, accept_lossy=accept_lossy)
        with LLM(model, tiering=tiering, num_blocks=32) as llm:
            llm.generate(TEXT, params)
            llm.flush()
            llm.clear_device_cache()
            llm.clear_tier("host")
            return llm.generate(TEXT, params).metrics.loaded_tokens


def main() -> int:
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else fetch_default_model(cache_dir(), lambda *_: None)
    found = measure(model)
    for name, (smaller, kl, top1) in found.items():
        print(f"{name:9} {smaller:4.2f} x smaller   KL {kl:.5f}   same next token {top1:5.1%}")
    taken, refused = reuse(model, accept_lossy=True), reuse(model, accept_lossy=False)
    print(f"from NVMe in int4r: {taken} tokens for who accepts lossy KV, {refused} for who does not")
    exact = all(found[name][1:] == (0.0, 1.0) for name in ("raw", "bitsplit"))
    return 0 if exact and found["int4r"][0] > 3 and found["int8"][1] < 0.01 and taken > 0 == refused else 1


if __name__ == "__main__":
    sys.exit(main())
