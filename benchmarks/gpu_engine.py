"""A small decoder over paged memory on the device and on the CPU: equal tokens; launched and replayed steps."""

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from harness import Report, Result
from torch import Tensor

from kvtier.gpu.attention import make_attention
from kvtier.gpu.graphs import DecodeGraphs, make_decode_graphs
from kvtier.gpu.storage import DevicePool
from kvtier.layout import GroupKind, LayerGroup, Layout

__all__ = ["check_identical", "generate", "measure_graphs"]

_SIZE, _VOCAB = 16, 512


class Config(NamedTuple):
    """What attention and the decoder have to know."""

    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    layers: int = 8
    windows: tuple[int | None, ...] = ()
    softmax_scale: float = 64**-0.5


class SmallDecoder:
    """Embedding, layers of attention and a gated sum, output: the weights are random, the same on every device."""

    def __init__(self, config: Config, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        generator = torch.Generator().manual_seed(0)

        def weights(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(device, dtype)

        hidden, width = config.heads * config.head_dim, (config.heads + 2 * config.kv_heads) * config.head_dim
        self._embedding, self._places = weights(_VOCAB, hidden) * 20, weights(4096, hidden) * 20
        self._layers = [(weights(width, hidden), weights(hidden, hidden)) for _ in range(config.layers)]
        self._head = weights(_VOCAB, hidden) * 4

    def pool(self, blocks: int) -> DevicePool:
        config, dtype = self.config, str(self.dtype).removeprefix("torch.")
        group = LayerGroup(GroupKind.GQA, tuple(range(config.layers)), 2, config.kv_heads, config.head_dim, dtype=dtype)
        return DevicePool(Layout(_SIZE, (group,)), blocks, self.device)

    def forward(self, tokens: Tensor, positions: Tensor, attention: object, rows: Tensor) -> Tensor:
        config = self.config
        hidden = self._embedding[tokens] + self._places[positions]
        for index, (qkv, out) in enumerate(self._layers):
            normed = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:])
            heads = (normed @ qkv.T).view(len(hidden), -1, config.head_dim)
            q, k, v = heads.split([config.heads, config.kv_heads, config.kv_heads], dim=1)
            hidden = hidden + torch.tanh(attention(index, q, k, v).flatten(1) @ out.T)  # type: ignore[operator]
        return (torch.nn.functional.rms_norm(hidden[rows], hidden.shape[-1:]) @ self._head.T).float()


class Span(NamedTuple):
    block_ids: tuple[int, ...]
    start: int
    stop: int


class Generated(NamedTuple):
    """tokens: of each prompt. logits: of each step. seconds: likewise. graphs: if any."""

    tokens: list[list[int]]
    logits: list[Tensor]
    seconds: list[float]
    graphs: DecodeGraphs | None


@torch.inference_mode()
def generate(model: SmallDecoder, prompts: Sequence[Sequence[int]], steps: int, *, graphs: bool = False) -> Generated:
    """Greedy decoding of all prompts in one batch, in scattered blocks."""
    free = torch.randperm(1024, generator=torch.Generator().manual_seed(1)).tolist()
    spans = [
        Span(tuple(free.pop() for _ in range(-(-(len(prompt) + steps) // _SIZE))), 0, len(prompt)) for prompt in prompts
    ]
    pool = model.pool(1024)
    attention = make_attention(pool, model.config)
    replay = make_decode_graphs(model.forward, attention, pool) if graphs else None
    tokens, outputs = [list(prompt) for prompt in prompts], [[] for _ in prompts]
    seen, seconds = [], []
    for _ in range(steps):
        began, logits = time.perf_counter(), None
        if replay is not None:
            logits = replay.run(spans, [row[-1] for row in tokens])
        if logits is None:
            attention.plan(spans)
            flat = [token for span, row in zip(spans, tokens, strict=True) for token in row[span.start : span.stop]]
            places = [at for span in spans for at in range(span.start, span.stop)]
            ends = torch.tensor([span.stop - span.start for span in spans]).cumsum(0) - 1
            flat_tokens, positions = (torch.tensor(values, device=model.device) for values in (flat, places))
            logits = model.forward(flat_tokens, positions, attention, ends.to(model.device))
        seen.append(logits.float().cpu().clone())
        seconds.append(time.perf_counter() - began)
        for output, row, token in zip(outputs, tokens, seen[-1].argmax(-1).tolist(), strict=True):
            output.append(token)
            row.append(token)
        spans = [Span(span.block_ids, span.stop, span.stop + 1) for span in spans]
    return Generated(outputs, seen, seconds, replay)


def check_identical(report: Report, device: torch.device, name: str = "gpu.engine.identical") -> bool:
    """Share of tokens that are those of the CPU, up to a sequence's first tie of logits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = [[(7 * row + 3 * at) % _VOCAB for at in range(length)] for row, length in enumerate((1, 15, 16, 33, 200))]
    expected = generate(SmallDecoder(Config(), torch.device("cpu")), prompts, 40)
    good = True
    for graphs in (False, True):
        found = generate(SmallDecoder(Config(), device), prompts, 40, graphs=graphs)
        same, ties = _compare(expected.tokens, found.tokens, expected.logits)
        replay = found.graphs
        if graphs and replay is None:
            print(f"{name}: the attention of this machine cannot be captured: launched steps only")
            break
        params = {
            "through": "replayed graphs" if graphs else "launched steps",
            "ties": ties,
            "replays": 0 if replay is None else replay.replays,
            "failed_captures": 0 if replay is None else replay.failures,
        }
        report.add(Result(name, 100 * same, "%", params, "the CPU", 100.0, same))
        good = good and same == 1.0 and not params["failed_captures"]
    return good


def _compare(expected: list[list[int]], found: list[list[int]], logits: list[Tensor]) -> tuple[float, int]:
    """Share of equal tokens; sequences that differ from where the two best logits are closer than 1e-3 on."""
    equal = counted = ties = 0
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            top = logits[step][row].topk(2).values
            if a != b and top[0] - top[1] < 1e-3:
                ties += 1
                break
            counted += 1
            equal += a == b
            if a != b:
                break
    return equal / max(counted, 1), ties


def measure_graphs(report: Report, device: torch.device, *, quick: bool) -> None:
    """`gpu.graph.decode`: steps of 16 sequences a second, replayed and launched."""
    config = Config(layers=32)
    model = SmallDecoder(config, device, torch.bfloat16)
    prompts, steps = [[row, *range(100)] for row in range(16)], 40 if quick else 120
    # The first step is the prefill, the second captures.
    runs = {graphs: generate(model, prompts, steps, graphs=graphs) for graphs in (False, True)}
    rates = {graphs: 1 / statistics.median(run.seconds[2:]) for graphs, run in runs.items()}
    replay = runs[True].graphs
    if replay is None or not replay.replays:
        print("gpu.graph.decode: the attention of this machine cannot be captured (is Triton installed?)")
        return
    params = {"layers": config.layers, "sequences": 16}
    report.add(
        Result(
            "gpu.graph.decode", rates[True], "steps/s", params, "launched kernel by kernel", rates[False],
            rates[True] / rates[False],
        )
    )  # fmt: skip
