"""`kvtier model`: the default model in the user's cache directory."""

from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvtier.engine.models.catalog import DEFAULT_MODEL, cache_dir, default_model_path, fetch_default_model
from kvtier.errors import ModelError

__all__ = ["app", "ensure_default_model"]

app = typer.Typer(add_completion=False, no_args_is_help=False, help="Fetch and find the default model.")


@app.command()
def get() -> None:
    """Fetch the default model unless it is there, and print its directory."""
    typer.echo(ensure_default_model(Console(stderr=True)))


@app.command()
def path() -> None:
    """Print the default model's directory."""
    found = default_model_path(cache_dir())
    if found is None:
        raise ModelError(f"{DEFAULT_MODEL} is not in {cache_dir()}: fetch it with `kvtier model get`")
    typer.echo(found)


@app.command("list")
def list_models() -> None:
    """Print the models that kvtier knows, and where they are."""
    found = default_model_path(cache_dir())
    typer.echo(f"{DEFAULT_MODEL}\t{found or 'not fetched; `kvtier model get` does it'}")


def ensure_default_model(console: Console) -> Path:
    """The default model's directory; fetches it first if need be.

    Args:
        console: shows the progress: a bar on a terminal, one line per stage elsewhere.

    Raises:
        ModelError: it cannot be fetched.
    """
    found = default_model_path(cache_dir())
    if found is not None:
        return found
    if not console.is_terminal:
        return fetch_default_model(cache_dir(), _Lines(console))
    columns = (TextColumn(f"{DEFAULT_MODEL}: {{task.description}}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        return fetch_default_model(
            cache_dir(), lambda stage, fraction: bar.update(task, description=stage, completed=fraction)
        )


class _Lines:
    """Progress where a bar would fill a log file: one line when a stage begins."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""

    def __call__(self, stage: str, fraction: float) -> None:
        if stage != self._stage:
            self._stage = stage
            self._console.print(f"{DEFAULT_MODEL}: {stage}", highlight=False)
