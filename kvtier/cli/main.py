"""The root of the command: global options, sub-commands, and how errors end a run.

Exit codes: 0 done, 1 a check or a tier failed, 2 the command or a setting was wrong, 130 interrupted.
"""

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from kvtier import __version__
from kvtier.cli.lazy import LazyGroup, asks_for_help
from kvtier.cli.session import Session
from kvtier.errors import ConfigError, KVTierError, TierError

__all__ = ["main"]

# typer carries its own copy of click in newer versions; this is the class that both raise for a wrong command line.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)

_app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@_app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    *,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Configuration file (TOML).")] = None,
    assigned: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting, as engine.order=priority; may be repeated."),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """KV-cache memory tiering for LLM inference: device memory, host memory, NVMe."""
    if version or context.invoked_subcommand is None:
        typer.echo(f"kvtier {__version__}" if version else context.get_help())
        raise typer.Exit
    try:
        context.obj = Session.start(config, log_level, tuple(assigned or ()))
    except ConfigError:
        # Whoever asks how a command is used must be told, whatever is wrong with the settings.
        if not asks_for_help(context):
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: without the program's name; those of this process by default.

    Returns:
        The exit code.
    """
    if sys.stdout is None:
        # The next file that is opened would take its place, and be written to.
        return _fail("standard output is closed: expected one; > /dev/null where nobody is to read it", 2)
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # `kvtier config | head`: nobody reads on.
        _write_no_more()
        return 1
    except OSError as error:
        if _can_write():
            raise
        _write_no_more()
        return _fail(f"standard output: {error.strerror}: expected a place that takes what is written to it", 1)
    return code


def _can_write() -> bool:
    """Whether standard output takes anything: an error of the system does not say which file it is about."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _write_no_more() -> None:
    """Python would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str] | None) -> int:
    try:
        # Without standalone mode typer returns the exit code of Exit, and None from a command that ran to its end.
        code: Any = _app(args=arguments, prog_name="kvtier", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except _UsageError as error:
        return _fail(_usage(error), 2)
    except KVTierError as error:
        if logging.getLogger("kvtier").isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        return _fail(str(error), 1 if isinstance(error, TierError) else 2)
    if code == 130:
        typer.echo("interrupted", err=True)
    return code if isinstance(code, int) else 0


def _usage(error: Any) -> str:
    command = error.ctx.command_path if error.ctx else "kvtier"
    return f"{error.format_message()} See `{command} --help`."


def _fail(message: str, code: int) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return code
