"""A picture of replays: the capacity curve and how full the tiers were."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.replay.report import Outcome

__all__ = ["plot_outcomes", "require_plot"]


def require_plot(path: Path) -> None:
    """Check that a picture can be drawn there, before a long replay.

    Raises:
        ConfigError: matplotlib is missing, the name does not end in ".png", or its directory is not there.
    """
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise ConfigError("plot: matplotlib is missing: pip install 'kvtier[plot]'") from error
    if path.suffix != ".png":
        raise ConfigError(f"plot {path}: expected a file name that ends in .png")
    if not path.parent.is_dir():
        raise ConfigError(f"plot {path}: there is no directory {path.parent}; make it, or name another one")


def plot_outcomes(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Draw the hit ratio over capacity, and of the last outcome occupancy and hit ratio over time.

    Raises:
        ConfigError: see `require_plot`, or the file cannot be written.
    """
    require_plot(path)
    figure = import_module("matplotlib.figure").Figure(figsize=(11, 4.2), layout="constrained")
    curve, time = figure.subplots(1, 2)
    _draw_curve(curve, outcomes)
    _draw_time(time, outcomes[-1])
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"plot {path}: {error}; expected a file that can be written") from error


def _draw_curve(axes: Any, outcomes: Sequence[Outcome]) -> None:
    ordered = sorted(outcomes, key=lambda outcome: outcome.capacity_blocks)
    sizes = [outcome.capacity_blocks for outcome in ordered]
    axes.plot(sizes, [100 * outcome.hit_tokens for outcome in ordered], "o-", label=ordered[0].policy)
    optimum = [
        (size, 100 * o.optimum_hit_tokens) for size, o in zip(sizes, ordered, strict=True) if o.optimum_hit_tokens
    ]
    if optimum:
        axes.plot(*zip(*optimum, strict=True), "o--", color="grey", label="optimum")
    axes.set(xlabel="host capacity (blocks)", ylabel="prompt tokens found (%)", xscale="log", ylim=(0, None))
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def _draw_time(axes: Any, outcome: Outcome) -> None:
    minutes = [sample.at / 60 for sample in outcome.samples]
    for name in outcome.tiers:
        axes.plot(
            minutes, [100 * sample.occupied.get(name, 0.0) for sample in outcome.samples], label=f"{name} occupied"
        )
    axes.plot(minutes, [100 * sample.hit_tokens for sample in outcome.samples], "k--", label="tokens found so far")
    axes.set(xlabel="time in the trace (min)", ylabel="%", ylim=(0, 105))
    axes.set_title(f"{outcome.policy}, {outcome.capacity_blocks} blocks in host", fontsize=10)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
