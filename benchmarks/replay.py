"""`replay.<trace>.<policy>`: published traces through the real store, beside the best that any policy could do.

    python benchmarks/replay.py --traces DIR [--quick] [--json results.json]

DIR holds `mooncake_conversation.jsonl` (`FAST25-release/traces/conversation_trace.jsonl` of kvcache-ai/Mooncake) and
may hold `coding_agents/` (session files of callanjfox/kv-cache-tester). Values are shares of all prompt tokens that
were found; the peer is the offline optimum of the same capacity (Belady with bypass), so `ratio` is how much of what
is possible was reached. Capacities of the chat trace are 5 % and 10 % of its 182,790 blocks.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from harness import Report, Result, arguments

from kvtier.replay import ReadOptions, ReplayPlan, Trace, optimum_ratio, read_trace, replay

POLICIES = ("lru", "arc", "clock2", "s3fifo")
CAPACITIES = (9139, 18279)
QUICK_REQUESTS = 1200
TIERED_SHARES = {"device_blocks": 0.005, "capacity_blocks": 0.05, "nvme_blocks": 0.4}


def single_tier(name: str, trace: Trace, capacities: tuple[int, ...]) -> Iterator[Result]:
    for capacity in capacities:
        best = optimum_ratio(trace, capacity)
        plans = [ReplayPlan(capacity, policy=policy) for policy in POLICIES]
        plans += [ReplayPlan(capacity, hints=hints) for hints in ("true", "half-wrong")]
        for plan in plans:
            outcome = replay(trace, plan)
            variant = plan.policy if plan.hints == "none" else f"{plan.policy}.{plan.hints}"
            params = {
                "capacity_blocks": capacity,
                "saved_compute": round(outcome.saved_compute, 4),
                "cpu_seconds": round(outcome.cpu_seconds, 2),
            }
            yield Result(
                f"replay.{name}.{variant.replace('-', '_')}",
                outcome.hit_tokens,
                "of tokens",
                params,
                "optimum",
                best,
                outcome.hit_tokens / best if best else None,
            )


def write_rules(name: str, trace: Trace) -> Iterator[Result]:
    """Device 0.5 %, host 5 %, NVMe 40 % of the trace's blocks; what each rule finds and what it writes."""
    plan = ReplayPlan(**{field: max(1, round(share * trace.blocks)) for field, share in TIERED_SHARES.items()})
    footprint = trace.blocks * plan.block_bytes
    for rule in ("through", "leave", "second_touch"):
        outcome = replay(trace, replace(plan, write_rule=rule))
        params = {tier: round(found.hit_tokens, 4) for tier, found in outcome.tiers.items()}
        params["written_of_footprint"] = round(outcome.nvme_bytes_written / footprint, 3)
        yield Result(f"replay.{name}.{rule}", outcome.hit_tokens, "of tokens", params)


def main() -> int:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    options = parser.parse_args()
    limit = QUICK_REQUESTS if options.quick else None
    report = Report(options.json)
    chat = read_trace(options.traces / "mooncake_conversation.jsonl", ReadOptions(limit=limit))
    capacities = tuple(round(capacity * chat.blocks / 182790) for capacity in CAPACITIES)
    for result in (*single_tier("conversation", chat, capacities), *write_rules("conversation", chat)):
        report.add(result)
    agents = options.traces / "coding_agents"
    if agents.is_dir():
        trace = read_trace(agents, ReadOptions(limit=limit))
        for result in single_tier("agents", trace, (trace.blocks // 20, trace.blocks // 10)):
            report.add(result)
    report.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
