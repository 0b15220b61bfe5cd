"""`kvtier demo`: one shared document, four places to find its KV again, one of them after a SIGKILL."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import distribution
from pathlib import Path
from typing import IO, Annotated, Any, TypedDict
from uuid import uuid4

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvtier.cli.demo_session import Answer, Orders
from kvtier.cli.models import ensure_default_model
from kvtier.cli.session import Session
from kvtier.engine.models.catalog import cache_dir
from kvtier.errors import ConfigError, KVTierError

__all__ = ["demo"]

QUESTIONS = [
    "What does this license let me do with the work? Answer in one sentence.",
    "Does the license grant patent rights? Answer in one sentence.",
    "What must I include when I redistribute the work? Answer in one sentence.",
]
MAX_TOKENS = 24
TIERS = ("device", "host", "nvme")


class Row(TypedDict):
    """One line of the table; the shape of `--json` (tokens and bytes summed over the questions, times are means)."""

    source: str
    tokens_reused: int
    tokens_computed: int
    ttft_ms: float
    speedup: float
    bytes_moved: int
    gb_per_s: float


def demo(
    context: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    model: Annotated[str | None, typer.Option(help="Model directory or GGUF file; SmolLM2-135M by default.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="fp32 (checks that outputs are identical), bf16 or fp16.")] = "fp32",
    tiers: Annotated[str, typer.Option(help="Which places to show.")] = ",".join(TIERS),
) -> None:
    """Compute a long document's KV once, then find it in device memory, host memory, NVMe, and NVMe after SIGKILL."""
    console = Console(stderr=as_json)
    session: Session = context.obj
    chosen = _tiers(tiers)
    source = model or str(ensure_default_model(console))
    # On the disk of the cache directory: /tmp is often memory. The tier itself makes it, once the model is loaded.
    directory = cache_dir() / f"demo-{uuid4().hex[:12]}"
    try:
        config = _config(source, device, dtype, chosen, directory)
        answers = _run(config, chosen, console, session.environ())
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    rows = [_row(phase, answers) for phase in dict.fromkeys(answer.phase for answer in answers)]
    differing = _differences(answers)
    if as_json:
        prompt_tokens = max(answer.prompt_tokens for answer in answers)
        sys.stdout.write(
            json.dumps({"rows": rows, "identical": not differing, "model": source, "prompt_tokens": prompt_tokens})
            + "\n"
        )
    else:
        _print(console, rows, answers, differing)
    if differing and config["model"]["dtype"] == "float32":
        raise typer.Exit(1)


def _tiers(text: str) -> list[str]:
    chosen = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in chosen if part not in TIERS]
    if unknown or not chosen:
        raise ConfigError(f"--tiers {text!r}: expected a comma-separated list of {', '.join(TIERS)}")
    if "nvme" in chosen and "host" not in chosen:
        raise ConfigError(f"--tiers {text!r}: nvme needs host, the gateway between device memory and NVMe; add host")
    return chosen


def _config(source: str, device: str, dtype: str, tiers: list[str], nvme: Path) -> dict[str, Any]:
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    return {
        "model": {"path": source, "device": device, "dtype": names.get(dtype, dtype)},
        "engine": {"memory": "512MiB", "num_blocks": None, "max_running": 4, "token_budget": 512},
        "tiering": {
            "host": {"capacity": "1GiB"} if "host" in tiers else None,
            "nvme": {"path": str(nvme), "capacity": "1GiB"} if "nvme" in tiers else None,
        },
    }


def _run(config: dict[str, Any], tiers: list[str], console: Console, environ: dict[str, str]) -> list[Answer]:
    phases = ["cold", *tiers]
    later = ["nvme-after-kill"] if "nvme" in tiers else []
    document = _document()
    total = len(phases + later) * len(QUESTIONS)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading the model", total=total)
        answers: list[Answer] = []
        for part in filter(None, (phases, later)):
            orders = Orders(config, document, QUESTIONS, part, MAX_TOKENS)
            for kind, payload in _session(orders, environ):
                if kind == "phase":
                    progress.update(task, description=f"asking {len(QUESTIONS)} questions, {payload}")
                elif kind == "answer":
                    answers.append(Answer(**payload))
                    progress.advance(task)
    return answers


def _document() -> str:
    """The license of this software: in a checkout the file itself, else the one installed with the package."""
    checkout = Path(__file__).parents[2] / "LICENSE"
    if checkout.is_file():
        return checkout.read_text()
    text = distribution("kvtier").read_text("licenses/LICENSE")
    if text is None:
        raise KVTierError("the installed package carries no LICENSE file; reinstall kvtier")
    return text


def _session(orders: Orders, environ: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Run one child process, under this one's settings, through its phases; then SIGKILL it, tiers open."""
    command = [sys.executable, "-m", "kvtier.cli.demo_session"]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=os.environ | environ) as child,
    ):
        try:
            yield from _conversation(child, orders, errors)
        finally:
            child.kill()


def _conversation(child: "subprocess.Popen[str]", orders: Orders, errors: IO[str]) -> Iterator[tuple[str, Any]]:
    if child.stdin is None or child.stdout is None:
        raise KVTierError("the demo's process has no pipes")
    child.stdin.write(json.dumps(asdict(orders)) + "\n")
    child.stdin.flush()
    for line in child.stdout:
        message = json.loads(line)
        if message["kind"] == "done":
            return
        if message["kind"] == "error":
            raise KVTierError(message["payload"])
        yield message["kind"], message["payload"]
    errors.seek(0)
    last = (errors.read().strip().splitlines() or ["no message"])[-1]
    raise KVTierError(f"the demo's process ended early: {last}")


def _row(phase: str, answers: list[Answer]) -> Row:
    mine = [answer for answer in answers if answer.phase == phase]
    ttft = statistics.fmean(answer.ttft_s for answer in mine)
    cold = statistics.fmean(answer.ttft_s for answer in answers if answer.phase == "cold")
    moved = sum(sum(answer.bytes_moved.values()) for answer in mine)
    loading = sum(answer.load_s for answer in mine)
    return Row(
        source=phase,
        tokens_reused=sum(answer.tokens_reused for answer in mine),
        tokens_computed=sum(answer.tokens_computed for answer in mine),
        ttft_ms=round(1e3 * ttft, 1),
        speedup=round(cold / ttft, 2),
        bytes_moved=moved,
        gb_per_s=round(moved / loading / 1e9, 2) if loading else 0.0,
    )


def _differences(answers: list[Answer]) -> list[str]:
    reference = {answer.question: answer.token_ids for answer in answers if answer.phase == "cold"}
    return [
        f"question {answer.question + 1}, {answer.phase}"
        for answer in answers
        if answer.token_ids != reference[answer.question]
    ]


def _print(console: Console, rows: list[Row], answers: list[Answer], differing: list[str]) -> None:
    tokens = max(answer.prompt_tokens for answer in answers)
    table = Table(
        title=f"{len(QUESTIONS)} questions about one document, prompts of up to {tokens:,} tokens", title_justify="left"
    )
    for name in ("found in", "reused", "computed", "first token", "speed-up", "moved", "GB/s"):
        table.add_column(name, justify="left" if name == "found in" else "right", no_wrap=True)
    for row in rows:
        moved = f"{row['bytes_moved'] / 1e6:,.0f} MB" if row["bytes_moved"] else "-"
        table.add_row(
            row["source"],
            f"{row['tokens_reused']:,}",
            f"{row['tokens_computed']:,}",
            f"{row['ttft_ms']:,.0f} ms",
            f"{row['speedup']:.1f} x",
            moved,
            f"{row['gb_per_s']:.2f}" if row["gb_per_s"] else "-",
        )
    console.print(table)
    first = answers[0]
    console.print(f"Q: {QUESTIONS[first.question]}\nA: {first.text.strip()}")
    if differing:
        console.print(f"[yellow]outputs differ from the cold run:[/] {'; '.join(differing)}")
    else:
        console.print(f"[green]all {len(answers)} outputs identical, token for token[/]")
