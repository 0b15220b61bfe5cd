"""Later turns of conversations that the device forgot: their KV comes from host, from NVMe, or is computed again.

    python benchmarks/turns.py [--quick] [--json PATH] [--dtype float32] [--directory DIR]

The default model, 2 threads. 8 chats of 6 turns take turns, one request at a time; each later one is the whole
history, at least 1,000 tokens of prose and code, and a question. The device has room for 2 chats, so that each finds
nothing left of its own when its next turn comes. Every turn is served by all engines, one after the other, in
alternating order:

    recompute     without tiers
    host          a host tier with room for all chats
    nvme          a host tier with room for little more than one turn, NVMe below it (O_DIRECT: not the page cache)
    nvme.gated    the same with the gate, which loads only what it expects to be cheaper than computing

Value: median TTFT of the later turns; ratio: the median over the turns of recompute's TTFT by theirs. Between turns all
that is to be saved gets there. All give the same tokens: in float32 that is demanded; in bfloat16 a difference is a tie
of the two likeliest tokens, reported with the widest gap between them (nats), and the chat goes on as recompute has it.
`--quick`: 3 turns, answers of 8 tokens.
"""

import contextlib
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from harness import DIRECTORY, Report, Result, arguments, require
from kvtier_engine import Connection, connect

from kvtier.cpu import HostTier
from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.models import LoadedModel, load_model
from kvtier.engine.models.catalog import cache_dir, fetch_default_model
from kvtier.nvme import NvmeTier
from kvtier.store import TieredStore

BLOCK = 16
TEXTS = Path(__file__).parents[1] / "tests/data/quality"
# Wider than what two orders of summation make of one logit in bfloat16.
WIDEST_TIE = 1.0


@dataclass(frozen=True)
class Shape:
    """How many chats and turns; tokens of a chat's first question, of the further ones, and of its answers."""

    chats: int = 8
    turns: int = 6
    first: int = 1000
    question: int = 48
    answer: int = 24

    @property
    def blocks(self) -> int:
        """Of one chat at its end."""
        return -(-(self.first + (self.turns - 1) * self.question + self.turns * self.answer) // BLOCK)


@dataclass
class Way:
    """One engine, its tiers if it has any, and what its later turns were like."""

    engine: Engine
    store: TieredStore | None = None
    ttfts: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    ties: list[float] = field(default_factory=list)

    def ask(self, name: str, prompt: list[int], answer: int) -> RequestOutput:
        """One turn; afterwards all that is to be saved is."""
        self.engine.add(name, prompt, SamplingParams(max_tokens=answer, ignore_eos=True, logprobs=20))
        last: list[RequestOutput] = []
        while self.engine.has_work:
            last = self.engine.step() or last
        while self.engine.busy:
            self.engine.step()
        if self.store is not None:
            self.store.flush()
        return last[0]

    def note(self, output: RequestOutput) -> None:
        """Take a later turn's figures."""
        metrics = output.metrics
        require(not metrics.cached_tokens, f"{output.id} found {metrics.cached_tokens} tokens on the device")
        self.ttfts.append(metrics.ttft)
        self.found.append(metrics.loaded_tokens / (output.prompt_tokens - 1))


@contextlib.contextmanager
def ways(model: LoadedModel, shape: Shape, directory: Path) -> Iterator[dict[str, Way]]:
    """All engines, each with a device pool for two chats."""
    layout = model.model.layout(BLOCK)
    options = EngineOptions(block_size=BLOCK, num_blocks=2 * shape.blocks, max_running=2)
    chat = shape.blocks * layout.block_bytes()
    with contextlib.ExitStack() as stack:
        found = {"recompute": Way(Engine(model, options))}
        for name, gated in (("host", False), ("nvme", False), ("nvme.gated", True)):
            tiers = []
            if name != "host":
                tier = stack.enter_context(contextlib.closing(NvmeTier(directory / name, 2 * shape.chats * chat)))
                tiers.append(tier)
            host = HostTier(2 * shape.chats * chat if name == "host" else chat + chat // 4)
            store = stack.enter_context(contextlib.closing(TieredStore(host, tiers)))
            connection: Connection = connect(store, model, layout, options.token_budget, recompute_gate=gated)
            stack.enter_context(contextlib.closing(connection))
            found[name] = Way(Engine(model, options, (connection.scheduler, connection.worker)), store)
        yield found


def questions(model: LoadedModel, shape: Shape) -> Iterator[list[int]]:
    """Natural text: the first question of each chat, then the second of each, and so on."""
    text = [token for path in sorted(TEXTS.glob("*.txt")) for token in model.tokenizer.encode(path.read_text("utf-8"))]
    at = 0
    for turn in range(shape.turns):
        length, step = (shape.question, shape.question) if turn else (shape.first, len(text) // shape.chats)
        for _ in range(shape.chats):
            yield [text[(at + offset) % len(text)] for offset in range(length)]
            at += step


def tie(ours: RequestOutput, reference: RequestOutput) -> float | None:
    """None for the same tokens; else the gap of log-probability between the first two that differ."""
    pairs = zip(ours.token_ids, reference.token_ids, reference.logprobs or (), strict=True)
    for token, expected, scores in pairs:
        if token != expected:
            return scores.logprob - dict(scores.top).get(token, float("-inf"))
    return None


def serve(model: LoadedModel, shape: Shape, found: dict[str, Way]) -> None:
    """All turns of all chats on all engines."""
    asked = questions(model, shape)
    histories: list[list[int]] = [[] for _ in range(shape.chats)]
    for turn in range(shape.turns):
        for chat, history in enumerate(histories):
            history.extend(next(asked))
            names = list(found)
            if (turn + chat) % 2:
                names.reverse()
            outputs = {name: found[name].ask(f"chat{chat}.{turn}", list(history), shape.answer) for name in names}
            reference = outputs["recompute"]
            for name, output in outputs.items():
                gap = tie(output, reference)
                if gap is not None:
                    found[name].ties.append(gap)
                if turn:
                    found[name].note(output)
            history.extend(reference.token_ids)


def report_ways(report: Report, shape: Shape, found: dict[str, Way], dtype: str) -> None:
    """A row for each engine with tiers."""
    peer = found.pop("recompute")
    for name, way in found.items():
        ratio = statistics.median(theirs / ours for ours, theirs in zip(way.ttfts, peer.ttfts, strict=True))
        params = {
            "chats": shape.chats, "turns": shape.turns, "history": shape.first, "question": shape.question,
            "answer": shape.answer, "dtype": dtype, "threads": 2, "device_chats": 2, "measured": len(way.ttfts),
            "share_of_recompute": round(1 / ratio, 4), "loaded_share": round(statistics.fmean(way.found), 4),
            "slowest_ms": round(1e3 * max(way.ttfts), 1), "ties": len(way.ties),
            "widest_tie": round(max(way.ties, default=0.0), 4),
        }  # fmt: skip
        ours, theirs = (1e3 * statistics.median(seconds) for seconds in (way.ttfts, peer.ttfts))
        report.add(Result(f"engine.turns.{name}", ours, "ms", params, "recompute", theirs, ratio))


def check(found: dict[str, Way], dtype: str) -> None:
    """The same tokens from everywhere, but for ties in bfloat16."""
    gaps: Sequence[float] = [gap for way in found.values() for gap in way.ties]
    require(dtype != "float32" or not gaps, f"{len(gaps)} outputs differ in float32")
    require(max(gaps, default=0.0) < WIDEST_TIE, f"outputs differ where there is no tie: {gaps}")


def main() -> None:
    """Measure."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--directory", type=Path, default=DIRECTORY / "turns", help="of the NVMe tiers, emptied")
    args = parser.parse_args()
    torch.set_num_threads(2)
    model = load_model(fetch_default_model(cache_dir(), lambda *_: None), getattr(torch, args.dtype))
    shape = Shape(turns=3, answer=8) if args.quick else Shape()
    shutil.rmtree(args.directory, ignore_errors=True)
    args.directory.mkdir(parents=True)
    report = Report(args.json)
    with ways(model, shape, args.directory) as found:
        serve(model, shape, found)
        check(found, args.dtype)
        report_ways(report, shape, found, args.dtype)
    shutil.rmtree(args.directory, ignore_errors=True)
    report.write()


if __name__ == "__main__":
    main()
