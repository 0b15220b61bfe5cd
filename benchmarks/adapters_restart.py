"""`adapters.vllm.restart`: what a vLLM that was killed while it stored finds again, and what it makes of damaged files.

Everything runs in fp32, prompts one at a time, so that an answer has one right value: that of vLLM alone. Where an
answer differs, wrong bytes were served.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from adapters_process import LABELS, Peer, missing
from harness import Report, Result

__all__ = ["measure_restart"]

BLOCK = 32
PROMPTS, TOKENS, OUTPUT = 8, 600, 8
# Every block has 1.4 MB in fp32.
STRIDE, SPOT = 512 << 10, 4096
FILES = {"kvtier": "*.kv", "secondary": "*.kv", "native_fs": "*.bin", "lmcache_fine": "*.pt"}


@dataclass(frozen=True)
class Found:
    """After a start on what is there: share of the prompts' full blocks that was served, and wrong answers."""

    share: float
    wrong: int


def measure_restart(report: Report, threads: int, *, quick: bool) -> None:
    random = np.random.default_rng(3)
    prompts = [random.integers(100, 49_000, TOKENS).tolist() for _ in range(PROMPTS)]
    with Peer("none", report.directory, threads, dtype="float32") as peer:
        truth = [peer.generate([prompt], OUTPUT).tokens[0] for prompt in prompts]
    damages: Mapping[str, Callable[[Path], None]] = {"overwritten": overwrite}
    if not quick:
        damages = {**damages, "halved": halve}
    sides = ["kvtier", "native_fs", "lmcache_fine"] if quick else ["kvtier", "native_fs", "secondary", "lmcache_fine"]
    found = {side: run(side, report.directory, threads, prompts, truth, damages) for side in sides if not missing(side)}
    ours = found.pop("kvtier")
    params: dict[str, Any] = {"threads": threads, "prompts": PROMPTS, "tokens": TOKENS, **told("", ours)}
    for side in sides[1:]:
        if side not in found:
            report.add(Result("adapters.vllm.restart", ours["killed"].share, "share", params, missing(side)))
            continue
        theirs = found[side]["killed"].share
        ratio = ours["killed"].share / theirs if theirs else None
        figures = {**params, **told("peer_", found[side])}
        report.add(Result("adapters.vllm.restart", ours["killed"].share, "share", figures, LABELS[side], theirs, ratio))


def told(prefix: str, found: Mapping[str, Found]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for what, each in found.items():
        figures[f"{prefix}{what}_wrong_answers"] = each.wrong
        if what != "killed":
            figures[f"{prefix}{what}_served"] = round(each.share, 3)
    return figures


def run(
    side: str,
    directory: Path,
    threads: int,
    prompts: Sequence[Sequence[int]],
    truth: Sequence[Sequence[int]],
    damages: Mapping[str, Callable[[Path], None]],
) -> dict[str, Found]:
    """Store, die, come back; then, of each kind of damage, what is served after it."""
    with Peer(side, directory, threads, dtype="float32") as peer:
        for prompt in prompts[:-1]:
            peer.generate([prompt], OUTPUT)
        # Nobody waited for what the last ones store.
        peer.send_and_kill("generate", [prompts[-1]], 1)
    found = {"killed": served(side, directory, threads, prompts, truth)}
    for what, damage in damages.items():
        for path in (directory / side).rglob(FILES[side]):
            damage(path)
        found[what] = served(side, directory, threads, prompts, truth)
    return found


def served(
    side: str, directory: Path, threads: int, prompts: Sequence[Sequence[int]], truth: Sequence[Sequence[int]]
) -> Found:
    """Start on what is there, ask everything again, and end properly, with everything stored again."""
    full = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)
    with Peer(side, directory, threads, keep=True, dtype="float32") as peer:
        answers = [peer.generate([prompt], OUTPUT) for prompt in prompts]
        peer.call("settle")
        peer.close()
    cached = sum(answer.cached[0] for answer in answers)
    wrong = sum(list(answer.tokens[0]) != list(right) for answer, right in zip(answers, truth, strict=True))
    return Found(cached / full, wrong)


def overwrite(path: Path) -> None:
    """Other bytes in every block, of whatever size its file is."""
    noise = np.random.default_rng(4)
    with path.open("r+b") as file:
        for at in range(0, path.stat().st_size - SPOT, STRIDE):
            file.seek(at + STRIDE // 2 if at + STRIDE // 2 + SPOT <= path.stat().st_size else at)
            file.write(noise.bytes(SPOT))


def halve(path: Path) -> None:
    """As a copy that was broken off leaves it."""
    os.truncate(path, path.stat().st_size // 2)
