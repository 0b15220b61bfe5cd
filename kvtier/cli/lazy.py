"""Sub-commands whose modules are imported when they run: `kvtier --help` must not import torch."""

from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["COMMANDS", "Entry", "LazyGroup", "asks_for_help"]

_HELP = "kvtier.help"


class Entry(NamedTuple):
    """Where a command lives (`module:attribute`, a function or a Typer app) and its line in `kvtier --help`."""

    target: str
    summary: str


COMMANDS = {
    "demo": Entry("kvtier.cli.demo:demo", "One prompt prefix, computed once and found again in every tier."),
    "serve": Entry("kvtier.cli.serve:serve", "The OpenAI-compatible server."),
    "cache": Entry("kvtier.cli.cache:app", "The cache service: one store for all engines of a machine."),
    "router": Entry("kvtier.cli.router:router", "A prefix-aware router in front of several engines."),
    "prefill": Entry("kvtier.cli.prefill:prefill", "An engine that computes prompts for `kvtier serve --prefill`."),
    "chat": Entry("kvtier.cli.chat:chat", "A conversation in the terminal, with a model here or a server."),
    "bench": Entry("kvtier.cli.bench:bench", "A load on a server, or an engine here: speed, and what was found."),
    "replay": Entry("kvtier.cli.replay:replay", "A published trace of LLM requests through the real store."),
    "model": Entry("kvtier.cli.models:app", "Fetch and find the default model."),
    "doctor": Entry("kvtier.cli.doctor:doctor", "Find what keeps tiers from being of use on this machine."),
    "inspect": Entry("kvtier.cli.inspect:inspect", "Look into a directory of the NVMe tier, check or repair it."),
    "config": Entry("kvtier.cli.settings:config", "Print the settings in force and where they come from."),
}


class LazyGroup(TyperGroup):
    """A group over `COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What help needs to know of a command: its name and its line."""
        entry = COMMANDS.get(cmd_name)
        return entry and TyperCommand(cmd_name, short_help=entry.summary, help=entry.summary, callback=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command itself."""
        name, _, rest = super().resolve_command(ctx, args)
        ctx.meta[_HELP] = not {"-h", "--help"}.isdisjoint(rest)
        return name, _load(str(name)), rest


def asks_for_help(context: typer.Context) -> bool:
    """Whether the command that was chosen will only print its help."""
    return bool(context.meta.get(_HELP))


def _load(name: str) -> Any:
    module, _, attribute = COMMANDS[name].target.partition(":")
    target = getattr(import_module(module), attribute)
    if isinstance(target, typer.Typer):
        return typer.main.get_command(target)
    app = typer.Typer(add_completion=False)
    app.command(name)(target)
    return typer.main.get_command(app)
