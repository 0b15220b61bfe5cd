r"""`adapters.vllm.*`: kvtier inside vLLM 0.32.0, beside vLLM alone, vLLM's native tiering and LMCache, turn by turn.

    python benchmarks/adapters.py [--quick] [--only ttft hook_cpu throughput restart] [--threads 2]
                                  [--dtype float32] [--json PATH]

Each vLLM is a process of its own in its own environment (benchmarks/requirements-vllm.txt); all of them live at once,
and all but the one whose turn it is are stopped. LMCache's is a copy of vLLM's; without it its rows are empty:

    cp -al build/vllm-venv build/lmcache-vllm-venv
    build/lmcache-vllm-venv/bin/python -m pip install --no-deps lmcache==0.5.6 nvtx aiofile aiofiles caio \
        sortedcontainers redis

Twelve GiB of memory. SmolLM2-135M, bf16, eager, blocks of 32 tokens, greedy,
random tokens. vLLM's native tiers run on a CPU with copies of ours (`vllm_native.py`), LMCache's connector too
(`vllm_lmcache.py`): as shipped, neither does. Every row checks the tokens against those of a cold run, and the bytes
that were copied into device blocks; hit counters prove nothing.

    adapters.vllm.ttft.cold       ms to the first of 1 token, 2,000 new tokens
    adapters.vllm.ttft.device     …after 1,984 of them were computed: how many times faster than cold, in one process
    adapters.vllm.ttft.host       …the device's prefix cache emptied
    adapters.vllm.ttft.nvme       …and host memory, with files left as they are, and dropped from the page cache
    adapters.vllm.secondary.nvme  the same of kvtier's NVMe tier as a secondary tier below vLLM's own host tier
    adapters.vllm.disk            bytes on the disk for a byte of KV, and in how many files
    adapters.vllm.hook_cpu        µs of the engine's thread in the connector per step, n requests decoding, no hits
    adapters.vllm.throughput      output tokens/s: 24 requests over 8 prefixes of 1,000 tokens, round robin, +32 own, 16
                                  out, with room for two on the device
    adapters.vllm.restart         share of blocks found again after SIGKILL in mid-write; fp32, whole answers compared;
                                  and what is served when bytes of every block are overwritten, or every file halved

Predictions, written before the first run on a quiet machine, after each mode had run by itself on a busy one: host
0.04 x recompute and 1.3 times as fast as native, whose pages are copied by 30 index operations and which needs one
step more; NVMe 0.05 x as left and 0.07 x dropped, 1.5 times as fast as native `fs`, which asks for every block again
in every step; the secondary tier as fast as `fs` within a tenth, its bytes copied twice, its files read in one call;
disk 1.1 bytes for a byte in a handful of files, against one file a block; hooks 300 us at 8 requests, under the bound
and like native's; throughput 2.0 x none, like native's, since computing dominates; restart nine tenths of all blocks,
native as many, LMCache none; overwritten bytes are served by native `fs`, by nobody else.

`--dtype float32`: for `ttft` and `hook_cpu`. Where the processor multiplies bf16 in hardware, 2,000 tokens of so small
a model take little more than ten times a step of vLLM's, and no tier can be a twentieth of that.

`--quick`: fewer rounds, no truncated files, no secondary tier in `throughput` and `restart`; under six minutes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from adapters_process import LABELS, Answer, Peer, missing
from adapters_restart import measure_restart
from harness import Cost, Report, Result, Rounds, arguments, require

PREFIX = 2000
BLOCK = 32
CACHED = (PREFIX - 1) // BLOCK * BLOCK
STAGES = ("cold", "device", "host", "nvme_left", "nvme")
PREPARED: Mapping[str, Sequence[str]] = {
    "cold": ("settle",),
    "device": ("settle",),
    "host": ("forget", "device"),
    "nvme_left": ("forget", "host"),
    "nvme": ("forget", "pages"),
}
BOUNDS = {"host": 0.06, "nvme_left": 0.10, "nvme": 0.10}
PREFIXES, SHARED, OWN, OUTPUT, TIMES, SMALL_POOL = 8, 1000, 32, 16, 3, 72
HOOK_STEPS = 100


def prompt(random: np.random.Generator, tokens: int) -> list[int]:
    return random.integers(100, 49_000, tokens).tolist()


def turns(peers: Sequence[Peer], rounds: int) -> Iterator[tuple[int, Sequence[Peer]]]:
    """Numbers of rounds, of which round 0 is thrown away, and the order of that round."""
    for number in range(rounds + 1):
        yield number, peers if number % 2 else peers[::-1]


def started(stack: ExitStack, sides: Sequence[str], directory: Path, threads: int, **options: Any) -> list[Peer]:
    """Those of the sides that can be had here."""
    return [stack.enter_context(Peer(side, directory, threads, **options)) for side in sides if not missing(side)]


# ---- first tokens, disk, hooks


def measure_ttft(report: Report, threads: int, dtype: str, *, quick: bool, hooks: bool, ttft: bool) -> None:
    sides = ["none", "native_fs", "secondary", "lmcache_fine", "kvtier"]
    with ExitStack() as stack:
        peers = started(stack, sides, report.directory, threads, dtype=dtype)
        if ttft:
            rounds = 3 if quick else 7
            costs, wrong = first_tokens(peers, rounds)
            params = {"threads": threads, "rounds": rounds, "tokens": PREFIX, "dtype": dtype}
            report_ttft(report, sides, costs, params, wrong)
            report_disk(report, peers, rounds + 1)
        if hooks:
            measure_hooks(report, [peer for peer in peers if peer.side != "none"], 1 if quick else 3)


def first_tokens(peers: Sequence[Peer], rounds: int) -> tuple[Rounds, dict[str, int]]:
    """Costs by `side.stage`, and how many first tokens differed from the cold one, likewise."""
    random = np.random.default_rng(0)
    costs: dict[str, list[Cost]] = {f"{peer.side}.{stage}": [] for peer in peers for stage in STAGES}
    wrong = dict.fromkeys(costs, 0)
    kv = {peer.side: CACHED // BLOCK * block_bytes(peer) for peer in peers}
    for number, order in turns(peers, rounds):
        tokens = prompt(random, PREFIX)
        cold: dict[str, Answer] = {}
        for stage in STAGES:
            for peer in order:
                if peer.side == "none" and stage not in ("cold", "device"):
                    continue
                peer.call(*PREPARED[stage])
                answer = peer.generate([tokens])
                first = cold.setdefault(peer.side, answer)
                check_stage(peer, stage, answer, kv[peer.side])
                wrong[f"{peer.side}.{stage}"] += answer.tokens != first.tokens
                if number:
                    costs[f"{peer.side}.{stage}"].append(answer.cost)
    return Rounds(costs), wrong


def check_stage(peer: Peer, stage: str, answer: Answer, kv: int) -> None:
    """The cold run computes all, device hits load nothing, and what lies below loads the whole prefix: `kv` bytes."""
    expected = 0 if stage == "cold" else CACHED
    what = f"{LABELS[peer.side]}, {stage}: {answer.cached} of {PREFIX} tokens from a cache, {answer.loaded_bytes} bytes"
    require(list(answer.cached) == [expected], f"{what}: expected {expected} tokens")
    loaded = 0 if stage in ("cold", "device") else kv
    require(answer.loaded_bytes == loaded, f"{what}: expected {loaded} bytes")


def report_ttft(
    report: Report, sides: Sequence[str], rounds: Rounds, params: Mapping[str, Any], wrong: Mapping[str, int]
) -> None:
    for stage in STAGES:
        report_stage(
            report, "ttft", "kvtier", stage, [side for side in sides if side != "kvtier"], rounds, params, wrong
        )
    for stage in ("nvme_left", "nvme"):
        report_stage(report, "secondary", "secondary", stage, ["native_fs"], rounds, params, wrong)


def report_stage(
    report: Report,
    row: str,
    ours: str,
    stage: str,
    peers: Sequence[str],
    rounds: Rounds,
    params: Mapping[str, Any],
    wrong: Mapping[str, int],
) -> None:
    name = f"adapters.vllm.{row}.{stage.removesuffix('_left')}"
    mine = f"{ours}.{stage}"

    def speed(side: str) -> float:
        return rounds.ratio(f"{side}.{stage}", f"{side}.cold")

    value = (lambda side: 1e3 * rounds.median(f"{side}.cold").seconds) if stage == "cold" else speed
    cost = rounds.median(mine)
    figures = {
        **params,
        "ms": round(1e3 * cost.seconds, 1),
        "cpu_ms": round(1e3 * cost.cpu_seconds, 1),
        "of_recompute": round(1 / speed(ours), 4),
        "bound": BOUNDS.get(stage),
        "wrong_first_tokens": wrong[mine],
    }
    if stage.startswith("nvme"):
        figures["pages"] = "as left" if stage == "nvme_left" else "dropped"
    for side in peers:
        theirs = f"{side}.{stage}"
        if missing(side):
            report.add(Result(name, value(ours), "ms" if stage == "cold" else "x", figures, missing(side)))
        elif rounds.costs[theirs]:
            peer_ms = round(1e3 * rounds.median(theirs).seconds, 1)
            told = {**figures, "peer_ms": peer_ms, "peer_wrong_first_tokens": wrong[theirs]}
            ratio = rounds.ratio(mine, theirs)
            unit = "ms" if stage == "cold" else "x"
            report.add(Result(name, value(ours), unit, told, LABELS[side], value(side), ratio))


def report_disk(report: Report, peers: Sequence[Peer], prompts: int) -> None:
    """Bytes that the files occupy, for a byte of the prompts' full blocks."""
    found = {peer.side: occupied(peer) for peer in peers if peer.side != "none"}
    kv = prompts * (PREFIX // BLOCK) * block_bytes(peers[0])
    ours = found.pop("kvtier", None)
    for side, (nbytes, files) in found.items() if ours else ():
        params = {"kv_bytes": kv, "files": ours[1], "peer_files": files}
        report.add(
            Result("adapters.vllm.disk", ours[0] / kv, "B/B", params, LABELS[side], nbytes / kv, nbytes / ours[0])
        )


def occupied(peer: Peer) -> tuple[int, int]:
    """Bytes and files under a peer's directory, once all is written."""
    peer.call("settle")
    stats = [path.stat() for path in peer.directory.rglob("*") if path.is_file()]
    return sum(512 * each.st_blocks for each in stats), len(stats)


def block_bytes(peer: Peer) -> int:
    """Of one block of this model's KV."""
    return int(peer.call("block_bytes"))


def measure_hooks(report: Report, peers: Sequence[Peer], repeats: int) -> None:
    random = np.random.default_rng(2)
    for count in (1, 8):
        spent: dict[str, list[float]] = {peer.side: [] for peer in peers}
        for _, order in turns(peers, repeats):
            prompts = [prompt(random, BLOCK + 8) for _ in range(count)]
            for peer in order:
                spent[peer.side].append(peer.call("hook", prompts, HOOK_STEPS))
        medians = {side: float(np.median(found[1:])) for side, found in spent.items()}
        ours = medians.pop("kvtier", None)
        params = {"running": count, "steps": HOOK_STEPS, "repeats": repeats, "bound": 200 + 20 * count}
        for side, theirs in medians.items() if ours else ():
            report.add(Result("adapters.vllm.hook_cpu", ours, "us/step", params, LABELS[side], theirs, theirs / ours))


# ---- throughput


def measure_throughput(report: Report, threads: int, *, quick: bool) -> None:
    sides = (
        ["none", "native", "native_fs", "kvtier"] if quick else ["none", "native", "native_fs", "secondary", "kvtier"]
    )
    rounds = 1 if quick else 3
    random = np.random.default_rng(1)
    with ExitStack() as stack:
        peers = started(stack, sides, report.directory, threads, blocks=SMALL_POOL, max_len=1280)
        for peer in peers:
            peer.generate([prompt(random, SHARED)], OUTPUT)
        answers: dict[str, list[Answer]] = {peer.side: [] for peer in peers}
        for number in range(rounds):
            prefixes = [prompt(random, SHARED) for _ in range(PREFIXES)]
            batch = [prefixes[at % PREFIXES] + prompt(random, OWN) for at in range(PREFIXES * TIMES)]
            for peer in peers if number % 2 else peers[::-1]:
                peer.call("forget", "device")
                answers[peer.side].append(peer.generate(batch, OUTPUT))
        report_throughput(report, answers, {"threads": threads, "rounds": rounds, "requests": len(batch)})


def report_throughput(report: Report, answers: Mapping[str, Sequence[Answer]], params: Mapping[str, Any]) -> None:
    rounds = Rounds({side: [answer.cost for answer in found] for side, found in answers.items()})

    def speed(side: str) -> float:
        return PREFIXES * TIMES * OUTPUT / rounds.median(side).seconds

    require(all(answer.loaded_bytes for answer in answers["kvtier"]), "kvtier loaded nothing under pressure")
    for side in [side for side in answers if side != "kvtier"]:
        pairs = zip(answers["kvtier"], answers[side], strict=True)
        same = [a[0] == b[0] for ours, theirs in pairs for a, b in zip(ours.tokens, theirs.tokens, strict=True)]
        told = {
            **params,
            "cpu_ratio": round(rounds.cpu_ratio("kvtier", side), 3),
            # Other batches round otherwise in bf16: a tie may fall the other way.
            "first_tokens_equal": f"{sum(same)}/{len(same)}",
            "loaded_blocks_of_tokens": sum(answers["kvtier"][-1].cached) // BLOCK,
            "peer_loaded_blocks_of_tokens": sum(answers[side][-1].cached) // BLOCK,
        }
        ratio = rounds.ratio("kvtier", side)
        report.add(Result("adapters.vllm.throughput", speed("kvtier"), "tok/s", told, LABELS[side], speed(side), ratio))


def main() -> None:
    parser = arguments(__doc__ or "")
    names = ("ttft", "hook_cpu", "throughput", "restart")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of ttft and hook_cpu")
    parser.add_argument("--threads", type=int, default=2, help="of every vLLM")
    args = parser.parse_args()
    report = Report(args.json)
    absent = missing("kvtier")
    if absent:
        parser.error(absent)
    if {"ttft", "hook_cpu"} & set(args.only):
        hooks, ttft = "hook_cpu" in args.only, "ttft" in args.only
        measure_ttft(report, args.threads, args.dtype, quick=args.quick, hooks=hooks, ttft=ttft)
    if "throughput" in args.only:
        measure_throughput(report, args.threads, quick=args.quick)
    if "restart" in args.only:
        measure_restart(report, args.threads, quick=args.quick)
    report.write()


if __name__ == "__main__":
    main()
