"""What `kvtier bench` found, for people."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtier.bench import Run, Slo
from kvtier.bench.figures import STATISTICS
from kvtier.bench.targets import printable

__all__ = ["print_runs"]

_TIMES = {
    "bench.ttft": "TTFT",
    "bench.ttft.first": "TTFT, first turns",
    "bench.ttft.later": "TTFT, later turns",
    "bench.tpot": "TPOT",
    "bench.itl": "ITL",
    "bench.latency": "latency",
    "bench.late": "sent too late by",
}
_RATES = {
    "bench.requests.rate": "requests/s",
    "bench.goodput.rate": "requests/s within the limits",
    "bench.goodput.share": "share within the limits",
    "bench.tokens.output.rate": "output tokens/s",
    "bench.tokens.prompt.rate": "prompt tokens/s",
    "bench.tokens.cached": "of the prompts' tokens, found",
    "bench.tokens.cached.first": "  first turns",
    "bench.tokens.cached.later": "  later turns",
    "bench.tokens.loaded": "  in a tier below device memory",
}
_COMPARED = ("p50", "p99")
_BESIDE = ("this", "beside", "ratio", "95 %")
_BOUNDS = (
    "95 %: between these a ratio lies with that confidence, as far as the rounds differ. Where 1 is between them, no "
    "difference is shown."
)
_UNSURE = "One round of both: how much of a ratio is chance is not known. --rounds 3, or more, tells."
_SILENT = (
    "How many tokens were found is not said by {place}: vLLM says it with --enable-prompt-tokens-details, SGLang with "
    "--enable-cache-report."
)
_UNCOUNTED = "{place} reports no usage: what counts as an output token here is an event of the stream."


def print_runs(
    console: Console, title: str, runs: Sequence[Run], rows: Sequence[Mapping[str, Any]], slo: Slo | None
) -> None:
    """Print runs of one load.

    Args:
        console: where to.
        title: what was asked.
        runs: one, or two to be compared.
        rows: their results, as in the JSON.
        slo: limits of the goodput, if there are any.
    """
    console.print(escape(title), highlight=False, soft_wrap=True)
    for run in runs:
        ended = ", interrupted" if run.interrupted else ""
        done = f"{len(run.answered)} of {run.planned} requests in {run.seconds:.1f} s{ended}"
        console.print(escape(f"{printable(run.model)} at {run.place}: {done}"), highlight=False, soft_wrap=True)
    found = {row["name"]: row for row in rows if not row["params"]}
    compares = len(runs) > 1
    console.print(_compared_times(found) if compares else _times(found))
    console.print(_rates(found, compares=compares))
    if compares:
        sure = any(row["interval"] is not None for row in rows)
        console.print(_BOUNDS if sure else _UNSURE, highlight=False, soft_wrap=True)
    if slo is not None:
        console.print(f"limits: {slo}", highlight=False)
    for run in runs:
        for line in (*_failures(run), *_notes(run)):
            console.print(escape(line), highlight=False, soft_wrap=True)


def _times(found: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _table("milliseconds", *STATISTICS)
    for label, rows in _measured(found, STATISTICS):
        table.add_row(label, *(_ms(row["value"]) for row in rows))
    return table


def _compared_times(found: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _table("milliseconds", "", *_BESIDE)
    for label, rows in _measured(found, _COMPARED):
        for name, statistic, row in zip((label, ""), _COMPARED, rows, strict=True):
            table.add_row(name, statistic, _ms(row["value"]), _ms(row["peer_value"]), *_sureness(row))
    return table


def _measured(
    found: Mapping[str, Mapping[str, Any]], statistics: Sequence[str]
) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    for name, label in _TIMES.items():
        if f"{name}.mean" in found:
            yield label, [found[f"{name}.{statistic}"] for statistic in statistics]


def _rates(found: Mapping[str, Mapping[str, Any]], *, compares: bool) -> Table:
    table = _table("", *(_BESIDE if compares else [""]))
    for name, label in _RATES.items():
        row = found.get(name)
        if row is not None:
            share = row["unit"] == "share"
            cells = [_amount(row["value"], share=share)]
            if compares:
                cells += [_amount(row["peer_value"], share=share), *_sureness(row)]
            table.add_row(label, *cells)
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(show_header=bool(first) or len(others) > 1)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.1f}"


def _sureness(row: Mapping[str, Any]) -> tuple[str, str]:
    """A ratio, and between what it lies."""
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f} x"
    return ratio, "-" if row["interval"] is None else "{:.2f} to {:.2f}".format(*row["interval"])


def _amount(value: float | None, *, share: bool) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if share else f"{value:,.2f}"


def _failures(run: Run) -> list[str]:
    """How many failed of each kind, with what the first of them said; and what was not asked at all."""
    kinds: dict[str, list[str]] = {}
    for sample in run.samples:
        if sample.error is not None:
            kinds.setdefault(sample.error, []).append(sample.message)
    lines = [f"failed, {kind}: {len(messages)}, the first: {messages[0]}" for kind, messages in kinds.items()]
    unasked = run.planned - len(run.samples)
    if unasked and not run.interrupted:
        lines.append(f"not asked: {unasked} turns of conversations that broke off")
    return lines


def _notes(run: Run) -> list[str]:
    usages = [sample.usage for sample in run.answered]
    if not usages:
        return []
    if all(usage is None for usage in usages):
        return [_UNCOUNTED.format(place=run.place)]
    if all(usage is None or usage.cached_tokens is None for usage in usages):
        return [_SILENT.format(place=run.place)]
    return []
