"""`kvtier doctor`: what stands between this machine and a useful cache."""

import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.session import Session
from kvtier.config import Config
from kvtier.doctor import Finding, Level, ModelFacts, Subject, examine
from kvtier.errors import ConfigError, ModelError

__all__ = ["doctor"]


def doctor(
    context: typer.Context,
    *,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Examine this configuration instead.")] = None,
    prefill_rate: Annotated[
        float | None, typer.Option(metavar="TOKENS/S", help="Prefill speed; measured on the model if absent.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine and the settings in force: one line per finding, and what to do about it.

    Writes a small sample through tiers of its own on the configured disk and leaves nothing behind. Exit code 1 if
    there is a problem; warnings are none.
    """
    if prefill_rate is not None and not 0 < prefill_rate < math.inf:
        raise ConfigError(f"--prefill-rate {prefill_rate}: expected tokens per second, above 0")
    session: Session = context.obj
    settings = session.load(file=config).config if config else session.loaded.config
    findings = []
    for finding in examine(_subject(settings, prefill_rate)):
        findings.append(finding)
        if not as_json:
            _show(finding)
    count = Counter(finding.level for finding in findings)
    if as_json:
        rows = [asdict(finding) for finding in findings]
        totals = {"problems": count[Level.PROBLEM], "warnings": count[Level.WARNING]}
        typer.echo(json.dumps({"findings": rows} | totals))
    else:
        typer.echo(f"{count[Level.PROBLEM]} problems, {count[Level.WARNING]} warnings")
    raise typer.Exit(1 if count[Level.PROBLEM] else 0)


def _show(finding: Finding) -> None:
    typer.echo(f"{finding.level:<8} {finding.check:<11} {finding.what}")
    if finding.remedy:
        typer.echo(f"{'':<20} -> {finding.remedy}")


def _subject(config: Config, prefill_rate: float | None) -> Subject:
    # Imported here: importing torch takes seconds, and a wrong option must not.
    from kvtier.doctor.model import measure_prefill, model_facts  # noqa: PLC0415

    model: ModelFacts | None = None
    rate = prefill_rate
    try:
        model = model_facts(config)
        rate = rate or measure_prefill(config)
    except ModelError as error:
        typer.echo(f"model: {error}", err=True)
    return Subject(config, model, rate)
