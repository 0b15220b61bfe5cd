"""`cpu.*`: the compiled CPU kernels beside torch's operators, and beside how fast this machine reads memory.

    python benchmarks/cpu_kernels.py [--quick] [--threads 2] [--json PATH]

Shapes of the default model (30 layers, 9 query and 3 KV heads of 64, hidden 576, bf16), each layer with memory of its
own, so that caches hold what they would in a step. Both sides and a plain read of 256 MiB take turns.

    cpu.attention.decode    B sequences, one new token each: GB/s of KV; params: share of the read in the same rounds
    cpu.add_rms_norm, cpu.rotate, cpu.silu_times    microseconds a layer of T tokens

`--quick`: fewer shapes and rounds.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import Report, Result, Rounds, arguments, interleaved, timed
from torch import Tensor
from torch.nn import functional

from kvtier.gpu import DevicePool, cpu_kernels
from kvtier.gpu.attention import CpuAttention, PagedAttention
from kvtier.layout import GroupKind, LayerGroup, Layout

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, BLOCK = 30, 9, 3, 64, 576, 1536, 16
DTYPE = torch.bfloat16
READ = "plain read"


@dataclass(frozen=True)
class Span:
    block_ids: tuple[int, ...]
    start: int
    stop: int


def attention_shapes(quick: bool) -> list[tuple[int, int]]:  # noqa: FBT001
    return [
        (batch, context) for context in (512, 2048) for batch in (1, 8, 16, 32) if not quick or batch * context <= 16384
    ]


def attention_work(pool: DevicePool, batch: int, context: int) -> dict[str, Callable[[], object]]:
    """Both attentions over `batch` sequences in blocks that lie anywhere, all layers once."""
    ids = list(range(batch * context // BLOCK))
    random.Random(0).shuffle(ids)
    each = context // BLOCK
    spans = [Span(tuple(ids[at * each : (at + 1) * each]), context - 1, context) for at in range(batch)]
    q, k, v = torch.randn(batch, HEADS + 2 * KV_HEADS, HEAD_DIM).to(DTYPE).split([HEADS, KV_HEADS, KV_HEADS], 1)

    def work(attention: PagedAttention) -> Callable[[], object]:
        attention.plan(spans)
        return lambda: [attention(layer, q, k, v) for layer in range(LAYERS)]

    return {"kvtier": work(CpuAttention(pool, HEADS)), "torch": work(PagedAttention(pool, HEADS))}


def step_work(tokens: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Name -> (kernel, torch), each all layers once."""
    x, change, weight = (
        torch.randn(tokens, HIDDEN).to(DTYPE),
        torch.randn(tokens, HIDDEN).to(DTYPE),
        torch.ones(HIDDEN).to(DTYPE),
    )
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).to(DTYPE)
    turned = qkv[:, : HEADS + KV_HEADS]
    cos, sin = torch.randn(2, tokens, 1, HEAD_DIM).to(DTYPE)
    gate_up = torch.randn(tokens, 2 * INTERMEDIATE).to(DTYPE)

    def norm() -> Tensor:
        total = x + change
        return functional.rms_norm(total.float(), (HIDDEN,), None, 1e-5).to(DTYPE) * weight

    def silu() -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def layers(work: Callable[[], object]) -> Callable[[], object]:
        return lambda: [work() for _ in range(LAYERS)]

    return {
        "cpu.add_rms_norm": (layers(lambda: cpu_kernels.add_rms_norm(x, change, weight, 1e-5)), layers(norm)),
        "cpu.rotate": (
            layers(lambda: cpu_kernels.rotate(turned, cos, sin)),
            layers(lambda: turned * cos + turned.roll(HEAD_DIM // 2, -1) * sin),
        ),
        "cpu.silu_times": (layers(lambda: cpu_kernels.silu_times(gate_up)), layers(silu)),
    }


def run(args: argparse.Namespace, report: Report) -> None:
    rounds = 3 if args.quick else 7
    memory = torch.ones(64 << 20)
    shapes = attention_shapes(args.quick)
    group = LayerGroup(GroupKind.GQA, tuple(range(LAYERS)), 2, KV_HEADS, HEAD_DIM, dtype="bfloat16")
    pool = DevicePool(Layout(BLOCK, (group,)), max(batch * context for batch, context in shapes) // BLOCK, "cpu")
    pool.tensor.normal_()
    for batch, context in shapes:
        work = attention_work(pool, batch, context) | {READ: memory.sum}
        costs = interleaved({name: lambda each=each: timed(each) for name, each in work.items()}, rounds)
        nbytes = batch * context * LAYERS * 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize
        report_attention(
            report, costs, {"batch": batch, "context": context, "threads": args.threads}, nbytes, memory.nbytes
        )
    for tokens in (1, 16, 512):
        for name, (ours, theirs) in step_work(tokens).items():
            costs = interleaved({"kvtier": lambda: timed(ours), "torch": lambda: timed(theirs)}, rounds)  # noqa: B023
            mine, other = (1e6 * costs.median(side).seconds / LAYERS for side in ("kvtier", "torch"))
            params = {
                "tokens": tokens,
                "threads": args.threads,
                "cpu_ratio": round(costs.cpu_ratio("kvtier", "torch"), 3),
            }
            report.add(Result(name, mine, "us", params, "torch", other, costs.ratio("kvtier", "torch")))
    report.write()


def report_attention(report: Report, costs: Rounds, params: dict[str, object], nbytes: int, read_bytes: int) -> None:
    read = read_bytes / costs.median(READ).seconds / 1e9
    of_limit = costs.ratio("kvtier", READ) * nbytes / read_bytes
    values = {**params, "read_gb_per_s": round(read, 2), "of_read": round(of_limit, 3)}
    report.add_bandwidth("cpu.attention.decode", values, costs, "kvtier", "torch", nbytes)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        run(args, Report(args.json))


if __name__ == "__main__":
    main()
