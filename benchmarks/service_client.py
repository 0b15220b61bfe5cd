"""What every client process of `service.py` does: reads commands as JSON lines, answers each with what it took.

["open", {way: [target, address]}, block bytes, call bytes, seed]    ["put", way, calls]    ["get", way, calls]
["match", way, calls]
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from harness import require, timed

__all__ = ["SEED_SHIFT", "Target", "answer"]

MATCHED = 512
SMALL = 4096
SEED_SHIFT = 40
"""A key is a number: the client's seed, and below it how many keys that client had made before."""


class Target(Protocol):
    """Somebody who keeps blocks."""

    def put(self, keys: Sequence[bytes], data: Sequence[memoryview]) -> None:
        """Store a chain of blocks."""

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> memoryview | bytes | None:
        """Read them, into these buffers if it can; returns the last block, None where it is not kept by its name."""

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of them are there."""


class Worker:
    """Targets by name of their way, bytes to put, and memory to read into."""

    def __init__(self, targets: Mapping[str, Target], block: int, call: int, seed: int) -> None:
        self._targets = targets
        self._numbers = itertools.count(seed << SEED_SHIFT)
        source = np.random.default_rng(seed).integers(0, 2**64, call // 8, dtype=np.uint64).view(np.uint8)
        place = np.ones(call, np.uint8)
        self._source = [source[at : at + block].data for at in range(0, call, block)]
        self._place = [place[at : at + block].data for at in range(0, call, block)]
        self._chains: dict[str, list[list[bytes]]] = {}
        self._small: dict[str, list[bytes]] = {}

    def _keys(self, count: int) -> list[bytes]:
        return [next(self._numbers).to_bytes(16, "big") for _ in range(count)]

    def put(self, way: str, calls: int) -> object:
        """Fresh blocks, so many calls."""
        chains = self._chains[way] = [self._keys(len(self._source)) for _ in range(calls)]
        return timed(lambda: [self._targets[way].put(keys, self._source) for keys in chains])

    def get(self, way: str, calls: int) -> object:
        """The blocks of the last put."""
        last: list[memoryview | bytes | None] = []
        chains = self._chains[way][:calls]
        cost = timed(lambda: last.extend(self._targets[way].get(keys, self._place) for keys in chains))
        require(last[-1] is None or last[-1] == self._source[-1], "a get returned other bytes")
        return cost

    def match(self, way: str, calls: int) -> object:
        """Seconds of each of so many matches of 512 blocks that are there."""
        target = self._targets[way]
        if way not in self._small:
            self._small[way] = self._keys(MATCHED)
            target.put(self._small[way], [self._source[0][:SMALL]] * MATCHED)
        keys = self._small[way]
        require(target.match(keys) == MATCHED, "a match was too short")
        seconds = []
        for _ in range(calls):
            start = time.perf_counter()
            target.match(keys)
            seconds.append(time.perf_counter() - start)
        return seconds


def answer(kinds: Mapping[str, Callable[[str], Target]]) -> None:
    """Do what standard input says until it ends; `kinds` makes targets of addresses."""
    # Libraries that log to standard output would log into the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker: Worker | None = None
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        told: object = None
        if verb == "open":
            ways, *rest = arguments
            worker = Worker({name: kinds[kind](address) for name, (kind, address) in ways.items()}, *rest)
        elif worker is not None:
            told = {"put": worker.put, "get": worker.get, "match": worker.match}[verb](*arguments)
        print(json.dumps(told), file=answers, flush=True)
