"""`kvtier bench`: a server, or an engine here, under a load, and what came of it."""

import asyncio
import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.bench import (
    WORKLOADS,
    Load,
    Pace,
    Rounds,
    Slo,
    Target,
    Workload,
    compared,
    measure_rounds,
    parse_slo,
    seeds_of,
)
from kvtier.bench.rounds import Opener
from kvtier.bench.scripts import Arrivals
from kvtier.cli.bench_tables import print_runs
from kvtier.cli.session import Session
from kvtier.errors import ConfigError

__all__ = ["bench"]

_UNTIERED = "untiered"
_AT_ONCE = 4
_ROUNDS_COMPARED = 3
_TRACED = ("output_tokens", "time_scale", "length_scale", "limit")


def bench(  # noqa: PLR0913  options of a command
    context: typer.Context,
    url: Annotated[
        str | None, typer.Argument(help="An OpenAI-compatible server; without one, an engine in this process.")
    ] = None,
    *,
    workload: Annotated[str | None, typer.Option(help="conversations (the default), shared-prefix or random.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="A trace instead; kinds as in `replay`.")] = None,
    chats: Annotated[int | None, typer.Option(help="Of conversations: how many; 8 by default.")] = None,
    turns: Annotated[int | None, typer.Option(help="Of conversations: requests of each; 4 by default.")] = None,
    think: Annotated[float | None, typer.Option(help="Of conversations: mean seconds between turns; 0.")] = None,
    documents: Annotated[int | None, typer.Option(help="Of shared-prefix: how many; 4 by default.")] = None,
    questions: Annotated[int | None, typer.Option(help="Of shared-prefix: about each document; 8 by default.")] = None,
    requests: Annotated[int | None, typer.Option(help="Of random: how many; 32 by default.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Of a first question or a document; 512.")] = None,
    turn_tokens: Annotated[int | None, typer.Option(help="Of a further question; 64, about a document 32.")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Of an answer, at most; 32, or what a trace says.")] = None,
    spread: Annotated[float | None, typer.Option(help="Lengths vary by this share of themselves, 0 to 1; 0.")] = None,
    time_scale: Annotated[float | None, typer.Option(help="Of a trace: ask so many times faster; 1.")] = None,
    length_scale: Annotated[float | None, typer.Option(help="Of a trace: lengths times this; 1.")] = None,
    limit: Annotated[int | None, typer.Option(help="Of a trace: the first requests only.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Conversations or requests that begin per second; each as soon as it may.")
    ] = None,
    arrivals: Annotated[str, typer.Option(help="poisson or fixed: how they and pauses are spaced.")] = "poisson",
    concurrency: Annotated[
        int | None, typer.Option(help=f"Requests at once, at most; {_AT_ONCE}, all with --rate or --trace.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help=f"Ask all of it so often, each time with other texts; 1, with --compare {_ROUNDS_COMPARED}."),
    ] = None,
    warm_up: Annotated[int, typer.Option(help="Requests of each round before those that count.")] = 1,
    seed: Annotated[
        int | None, typer.Option(help="Of texts, lengths, times; by default one that no cache has seen.")
    ] = None,
    slo: Annotated[
        str | None, typer.Option(metavar="LIMITS", help="Goodput: ttft=200ms,tpot=50ms,latency=5s, or fewer.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help=f"Ask another server the same; without URL: {_UNTIERED}, an engine without tiers."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="One of the server's; without URL, a directory or file.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Of a server: chat (the default) or completions.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="KVTIER_API_KEY", help="The server's key.")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="Certificates that sign the server's, as PEM.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds that a server may be silent; 600.")] = None,
    extra_body: Annotated[
        str | None, typer.Option(metavar="JSON", help="Further fields of each request to a server.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of full length (vLLM, SGLang, kvtier).")
    ] = False,
    hints: Annotated[bool, typer.Option("--hints", help="Tell which session a request is of (kvtier).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask a server, or an engine here, what your workload would, and measure how fast it answers.

    TTFT, TPOT, ITL and latency with percentiles, first turns and later ones apart; throughput and goodput; how much of
    the prompts was found. Ctrl-C ends it with what was measured so far.
    """
    limits = None if slo is None else parse_slo(slo)
    drawn = secrets.randbelow(1 << 32) if seed is None else seed
    sizes: dict[str, Any] = {
        "chats": chats, "turns": turns, "think": think, "documents": documents, "questions": questions,
        "requests": requests, "prompt_tokens": prompt_tokens, "turn_tokens": turn_tokens,
        "output_tokens": output_tokens, "spread": spread, "time_scale": time_scale, "length_scale": length_scale,
        "limit": limit,
    }  # fmt: skip
    chosen = _workload(workload, trace, {name: value for name, value in sizes.items() if value is not None}, drawn)
    pace = Pace(rate, cast("Arrivals", arrivals))
    at_once = _AT_ONCE if concurrency is None and rate is None and trace is None else concurrency
    often = (1 if compare is None else _ROUNDS_COMPARED) if rounds is None else rounds
    loads = [Load(chosen.scripts(pace, one), one, at_once, warm_up) for one in seeds_of(drawn, often)]
    asked = {"endpoint": endpoint, "ca_file": ca_file, "timeout": timeout, "body": _extra(extra_body)}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if url is None:
        targets = _local(context.obj, model, compare, given, hints=hints, ignore_eos=ignore_eos)
    else:
        body = ({"ignore_eos": True} if ignore_eos else {}) | given.get("body", {})
        targets = _remote(url, compare, given | {"body": body, "model": model, "api_key": api_key, "hints": hints})
    told = _run(targets, loads, in_process=url is None)
    title = f"{chosen.describe()}; seed {drawn}{f'; {len(loads)} rounds' if len(loads) > 1 else ''}"
    _tell(told, loads, title, limits, as_json=as_json)


def _workload(name: str | None, trace: Path | None, sizes: Mapping[str, Any], seed: int) -> Workload:
    """What was asked for; a size that it does not have is an error."""
    if trace is not None and name is not None:
        raise ConfigError(f"--workload {name!r} and --trace {str(trace)!r} both given: a trace is a workload; drop one")
    if name is not None and name not in WORKLOADS:
        raise ConfigError(f"--workload {name!r}: expected one of {', '.join(WORKLOADS)}, or --trace FILE")
    kind = None if trace is not None else WORKLOADS[name or "conversations"]
    known = _TRACED if kind is None else tuple(field.name for field in fields(kind))
    strange = next((size for size in sizes if size not in known), None)
    if strange is not None:
        options = ", ".join(f"--{one.replace('_', '-')}" for one in known)
        of = "a trace" if kind is None else name or "conversations"
        raise ConfigError(f"--{strange.replace('_', '-')} {sizes[strange]}: not of {of}, which has {options}")
    if kind is not None:
        return kind(**sizes)
    from kvtier.bench.traced import Traced  # noqa: PLC0415  # the store comes with it
    from kvtier.replay import ReadOptions, read_trace  # noqa: PLC0415  # likewise

    read = read_trace(cast("Path", trace), ReadOptions(limit=sizes.get("limit"), seed=seed))
    return Traced(read, **{size: value for size, value in sizes.items() if size != "limit"})


def _extra(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        body = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"--extra-body {text!r}: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"--extra-body {text!r}: expected a JSON object")
    return body


def _remote(url: str, compare: str | None, given: Mapping[str, Any]) -> Sequence[Opener]:
    if compare == _UNTIERED:
        raise ConfigError(f"--compare {_UNTIERED}: expected the URL of another server beside {url}")
    try:
        from kvtier.bench.remote import RemoteOptions, RemoteTarget  # noqa: PLC0415  # httpx is optional
    except ModuleNotFoundError as error:
        raise ConfigError(f"bench: {error.name} is missing: pip install 'kvtier[client]'") from error
    options = RemoteOptions(**given)
    return [partial(RemoteTarget.open, one, options) for one in (url, compare) if one is not None]


def _local(
    session: Session, model: str | None, compare: str | None, given: Mapping[str, Any], **ways: bool
) -> Sequence[Opener]:
    if given:
        name, value = next(iter(given.items()))
        option = "extra-body" if name == "body" else name.replace("_", "-")
        raise ConfigError(f"--{option} {value}: of a server, and no URL is given; name one, or drop it")
    if compare not in (None, _UNTIERED):
        raise ConfigError(f"--compare {compare!r}: without URL expected {_UNTIERED}, an engine without tiers")
    places = {"engine": {}, "engine without tiers": {"tiering": dict.fromkeys(("host", "nvme", "remote"), "none")}}

    async def opened(place: str) -> Target:
        from kvtier.bench.local import LocalTarget  # noqa: PLC0415  # torch: a wrong option is told before it loads
        from kvtier.cli.loading import configured, open_llm  # noqa: PLC0415  # likewise

        llm, name = open_llm(configured(session, model, places[place]))
        return LocalTarget(llm, name, place, **ways)

    return [partial(opened, place) for place in places][: 1 if compare is None else 2]


def _run(targets: Sequence[Opener], loads: Sequence[Load], *, in_process: bool) -> Rounds:
    console = Console(stderr=True)
    columns = (TextColumn("bench"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("bench", total=len(targets) * sum(load.requests for load in loads))
        asked = measure_rounds(targets, loads, lambda: progress.advance(task), in_process=in_process)
        return asyncio.run(asked)


def _tell(rounds: Rounds, loads: Sequence[Load], title: str, slo: Slo | None, *, as_json: bool) -> None:
    runs, rows = rounds.totals, compared(rounds, slo)
    if as_json:
        targets = [run.summary() for run in runs]
        told = {"workload": title, "seed": loads[0].seed, "rounds": len(loads), "targets": targets, "results": rows}
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        print_runs(Console(), title, runs, rows, slo)
    if rounds.error is not None:
        raise rounds.error
    if rounds.interrupted:
        raise typer.Exit(130)
    if not all(run.answered for run in runs):
        raise typer.Exit(1)
