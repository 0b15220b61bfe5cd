"""`kvtier config`: the settings in force."""

import json
from typing import Annotated, Any

import typer

from kvtier.cli.session import Session
from kvtier.config import to_toml

__all__ = ["config"]


def config(
    context: typer.Context,
    *,
    explain: Annotated[bool, typer.Option("--explain", help="Say where each value comes from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; sizes are bytes.")] = False,
) -> None:
    """Print the settings in force, as a TOML file that can be used as it is.

    First wins: Python arguments, command line (a command's own flags, then --set), KVTIER_<SECTION>__<FIELD>,
    TOML file, defaults.
    """
    session: Session = context.obj
    loaded = session.loaded
    if as_json:
        row: dict[str, Any] = {"config": loaded.config.model_dump(mode="json")}
        if explain:
            row |= {"origins": dict(loaded.origins), "file": loaded.file and str(loaded.file)}
        typer.echo(json.dumps(row))
    else:
        typer.echo(to_toml(loaded, explain=explain), nl=False)
