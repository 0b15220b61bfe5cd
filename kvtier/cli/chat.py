"""`kvtier chat`: a conversation in the terminal, or one read from a pipe, line by line."""

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvtier.cli.chat_partners import LocalPartner, Partner, RemotePartner, Style, Turn
from kvtier.cli.loading import configured, open_llm
from kvtier.errors import ConfigError, KVTierError

__all__ = ["chat"]

_HELP = "/reset: forget the conversation   /stats: where each prompt's KV came from   /exit: leave (or Ctrl-D)"

# What a model writes must not steer the terminal.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def chat(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="Model directory or GGUF file; SmolLM2-135M by default.")] = None,
    *,
    url: Annotated[str | None, typer.Option(help="Talk to an OpenAI-compatible server instead.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="KVTIER_API_KEY", help="The server's key.")] = None,
    system: Annotated[str | None, typer.Option(help="System message of the conversation.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer, at most.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="Makes the answers reproducible.")] = None,
) -> None:
    """Talk with a model, and see where the KV of each turn's prompt was found."""
    style = Style(max_tokens, temperature, seed)
    if url is None:
        partner: Partner = LocalPartner(*open_llm(configured(context.obj, model)), style)
    elif model is None:
        partner = RemotePartner(url, api_key, style)
    else:
        raise ConfigError(f"MODEL {model!r} and --url {url!r} both given: a server brings its own model; drop one")
    console = Console(highlight=False, soft_wrap=True)
    try:
        _Conversation(partner, console, system).hold(_lines(console, partner.name))
    finally:
        partner.close()


def _lines(console: Console, name: str) -> Iterator[str]:
    """What the user says, until there is no more."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    console.print(f"[bold]{name}[/]   {_HELP}", markup=True)
    while True:
        try:
            yield console.input("[bold green]>[/] ").strip()
        except EOFError:
            console.print()
            return


class _Conversation:
    """One history, and what each turn cost."""

    def __init__(self, partner: Partner, console: Console, system: str | None) -> None:
        self._partner = partner
        self._console = console
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._history = list(self._opening)
        self._turns: list[Turn] = []
        self._commands = {"/reset": self._reset, "/stats": self._print_stats, "/help": self._print_help}

    def hold(self, lines: Iterator[str]) -> None:
        """Answer line by line."""
        for line in lines:
            if line == "/exit":
                return
            if line.startswith("/"):
                self._commands.get(line, self._print_help)()
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        asked = [*self._history, {"role": "user", "content": line}]
        said = ""
        try:
            with closing(self._partner.answer(asked)) as deltas:
                for delta in deltas:
                    said += delta
                    self._console.out(delta.translate(_CONTROLS), end="", highlight=False)
        except KeyboardInterrupt:
            # Ends this answer, which stays as far as it came.
            self._console.out(" (stopped)", end="", highlight=False)
        except KVTierError as error:
            Console(stderr=True).print(f"error: {error}", markup=False, highlight=False)
            return
        self._console.out("")
        self._history = [*asked, {"role": "assistant", "content": said}]
        if self._partner.turn is not None:
            self._turns.append(self._partner.turn)

    def _reset(self) -> None:
        self._history = list(self._opening)
        self._turns = []
        self._console.out("(the conversation is forgotten)")

    def _print_help(self) -> None:
        self._console.print(_HELP, markup=False)

    def _print_stats(self) -> None:
        sources = list(dict.fromkeys(source for turn in self._turns for source in turn.found))
        title = "tokens of each prompt, by where their KV came from"
        table = Table(title=title, title_justify="left", padding=(0, 0, 0, 1))  # all tiers fit into 80 columns
        for name in ("turn", "prompt", *sources, "computed", "first token", "output", "tokens/s"):
            table.add_column(name, justify="right")
        for number, turn in enumerate(self._turns, 1):
            table.add_row(*self._row(number, turn, sources))
        self._console.print(table)

    def _row(self, number: int, turn: Turn, sources: list[str]) -> list[str]:
        found: list[Any] = [turn.found.get(source, 0) for source in sources]
        numbers = [number, turn.prompt_tokens, *found, turn.prompt_tokens - sum(found)]
        speed = f"{1 / turn.tpot:.1f}" if turn.tpot else "-"
        return [*(f"{one:,}" for one in numbers), f"{1e3 * turn.ttft:,.0f} ms", f"{turn.output_tokens:,}", speed]
