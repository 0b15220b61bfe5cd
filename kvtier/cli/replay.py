"""`kvtier replay`: a published trace through the real store."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvtier.config import format_size, parse_size
from kvtier.errors import ConfigError
from kvtier.replay import Outcome, ReadOptions, ReplayPlan, Trace, read_trace, replay_all
from kvtier.replay.plan import LLAMA3_8B_TOKEN_BYTES, CopyRule
from kvtier.replay.plot import plot_outcomes, require_plot
from kvtier.store.options import WriteRule

__all__ = ["replay"]

_ROOM = "BLOCKS, SIZE or a share of the trace's blocks such as 5%"


def replay(  # noqa: PLR0913  options of a command
    trace: Annotated[Path, typer.Argument(help="Trace file, or a directory of coding-agent sessions.")],
    *,
    policy: Annotated[str, typer.Option(help="lru, arc, clock2, s3fifo or module:Class.")] = "lru",
    capacity: Annotated[
        list[str] | None, typer.Option(help=f"Host tier: {_ROOM}. Repeat it, or give a list, for a curve.")
    ] = None,
    nvme: Annotated[str, typer.Option(metavar="ROOM", help=f"NVMe tier: {_ROOM}.")] = "0",
    device: Annotated[str, typer.Option(metavar="ROOM", help="The device's own prefix cache, likewise.")] = "0",
    block_tokens: Annotated[int | None, typer.Option(help="Tokens per block; 512, or what the trace says.")] = None,
    per_token: Annotated[
        str, typer.Option("--token-bytes", metavar="SIZE", help="KV bytes of one token; Llama-3-8B's by default.")
    ] = format_size(LLAMA3_8B_TOKEN_BYTES),
    full_bytes: Annotated[
        bool, typer.Option("--bytes", help="Store and verify blocks of full length; NVMe is then a real directory.")
    ] = False,
    time_scale: Annotated[
        float | None, typer.Option(help="Run so many times faster than the trace, by sleeping.")
    ] = None,
    hints: Annotated[str, typer.Option(help="none, true, half-wrong or trace.")] = "none",
    write: Annotated[str, typer.Option(help="When to write to NVMe: through, leave or second_touch.")] = "leave",
    copies: Annotated[
        str, typer.Option(help="Host's copies of device blocks: inclusive, or exclusive (leave first).")
    ] = "inclusive",
    sessions: Annotated[
        int | None, typer.Option(help="Make up turns of so many conversations at a time (Azure traces only).")
    ] = None,
    optimum: Annotated[bool, typer.Option(help="Compute the best possible hit ratio too.")] = True,
    limit: Annotated[int | None, typer.Option(help="Replay the first requests only.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn at random.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Draw capacity curve and occupancy.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a trace of LLM requests through the store and report what was found where."""
    if plot is not None:
        require_plot(plot)
    loaded = read_trace(trace, ReadOptions(block_tokens, limit, sessions, seed))
    rooms = _Rooms(loaded, per_token)
    plans = [
        ReplayPlan(
            rooms.blocks("capacity", room),
            policy=policy,
            nvme_blocks=rooms.blocks("nvme", nvme),
            device_blocks=rooms.blocks("device", device),
            block_bytes=rooms.block_bytes,
            full_bytes=full_bytes,
            write_rule=cast("WriteRule", write),
            copies=cast("CopyRule", copies),
            hints=hints,
            time_scale=time_scale,
            seed=seed,
        )
        for room in _listed(capacity or ["10%"])
    ]
    outcomes = _run(loaded, plans, optimum=optimum)
    if as_json:
        rows = [outcome.to_json() for outcome in outcomes]
        sys.stdout.write(json.dumps(rows[0] if len(rows) == 1 else {"runs": rows}) + "\n")
    else:
        _print(loaded, outcomes)
    if plot is not None:
        plot_outcomes(outcomes, plot, f"{trace.name}: {len(loaded.requests)} requests, {loaded.blocks} blocks")


class _Rooms:
    """Understands how large a tier is to be."""

    def __init__(self, trace: Trace, per_token: str) -> None:
        token_bytes = _size("token-bytes", per_token)
        if not token_bytes:
            raise ConfigError(f"token-bytes {per_token!r}: expected at least one byte")
        self._trace = trace
        self.block_bytes = trace.block_tokens * token_bytes

    def blocks(self, option: str, room: str) -> int:
        """Blocks of a room written by a person.

        Raises:
            ConfigError: it is none.
        """
        text = room.strip()
        try:
            if text.isdigit():
                return int(text)
            if text.endswith("%"):
                return self._share(float(text[:-1]) / 100)
            blocks = parse_size(text) // self.block_bytes
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"{option} {room!r}: expected {_ROOM} ({error})") from error
        if not blocks:
            raise ConfigError(f"{option} {room!r}: less than one block of {format_size(self.block_bytes)}")
        return blocks

    def _share(self, share: float) -> int:
        if not share >= 0:
            raise ValueError(share)
        return max(1, round(self._trace.blocks * share)) if share else 0


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from error


def _listed(values: Sequence[str]) -> list[str]:
    return [part for value in values for part in value.split(",")]


def _run(trace: Trace, plans: Sequence[ReplayPlan], *, optimum: bool) -> list[Outcome]:
    console = Console(stderr=True)
    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("replay", total=len(plans) * len(trace.requests))
        return replay_all(trace, plans, optimum=optimum, progress=lambda: progress.advance(task))


def _print(trace: Trace, outcomes: Sequence[Outcome]) -> None:
    console = Console()
    console.print(
        f"{trace.kind}: {len(trace.requests)} requests, {trace.touches} block touches, {trace.blocks} blocks of "
        f"{trace.block_tokens} tokens ({format_size(outcomes[0].block_bytes)}); found, in % of prompt tokens:",
        highlight=False,
    )
    table = Table()
    names = list(outcomes[0].tiers)
    for head in ("policy", "capacity", *names, "total", "optimum", "saved compute", "NVMe writes", "blocks/s"):
        table.add_column(head, justify="left" if head == "policy" else "right")
    for outcome in outcomes:
        best = outcome.optimum_hit_tokens
        table.add_row(
            outcome.policy,
            str(outcome.capacity_blocks),
            *(f"{100 * outcome.tiers[name].hit_tokens:.1f}" for name in names),
            f"{100 * outcome.hit_tokens:.1f}",
            "-" if best is None else f"{100 * best:.1f}",
            f"{100 * outcome.saved_compute:.1f} %",
            f"{outcome.nvme_bytes_written / 1e9:.1f} GB",
            f"{outcome.blocks_per_second:,.0f}",
        )
    console.print(table)
    console.print(_movements(outcomes))
    for note in trace.notes:
        console.print(note, highlight=False)


def _movements(outcomes: Sequence[Outcome]) -> Table:
    """What entered and left each tier, and why blocks went."""
    table = Table()
    for head in ("capacity", "tier", "blocks held", "read", "written", "went, by reason"):
        table.add_column(head, justify="left" if head in ("tier", "went, by reason") else "right")
    for outcome in outcomes:
        for name, tier in outcome.tiers.items():
            gone = {**tier.evicted, **tier.dropped}
            table.add_row(
                str(outcome.capacity_blocks),
                name,
                f"{tier.blocks} of {tier.capacity_blocks}",
                f"{tier.read_bytes / 1e9:.1f} GB",
                f"{tier.written_bytes / 1e9:.1f} GB",
                ", ".join(f"{reason} {blocks}" for reason, blocks in gone.items() if blocks) or "-",
            )
    return table
