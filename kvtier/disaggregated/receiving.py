"""Receiver: the decode side's half: which prompts are handed over, and what is done as their KV comes."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from prometheus_client import Counter

from kvtier.disaggregated.client import PrefillClient
from kvtier.disaggregated.handover import Ending, Handover, Outcome
from kvtier.disaggregated.identity import Side
from kvtier.engine import SamplingParams
from kvtier.errors import ConfigError
from kvtier.tiers import Owner

__all__ = ["HandoverOptions", "Receiver", "Reception"]

# What comes early may take so much of host: what other requests load next must stay there.
_AHEAD_SHARE = 2


@dataclass(frozen=True, slots=True)
class HandoverOptions:
    """What is handed to a prefill engine, and how long it is waited for.

    Args:
        least_tokens: a prompt of which fewer tokens are to be computed is computed where it is decoded: its chunk costs
            the other requests less than the way there and back.
        patience: seconds without any progress of the prefill engine, on whatever prompt, after which this side
            computes what it waits for.
        deadline: seconds that one prompt is waited for.
        connect: seconds in which a prefill engine that is just being started may begin to listen.

    Raises:
        ConfigError: a value is out of range.
    """

    least_tokens: int = 128
    patience: float = 10.0
    deadline: float = 120.0
    connect: float = 60.0

    def __post_init__(self) -> None:
        if self.least_tokens < 1 or not (self.patience > 0 and self.deadline > 0 and self.connect >= 0):
            raise ConfigError(
                f"{self}: expected at least 1 token, patience and deadline more than 0, connect at least 0"
            )


class Reception:
    """One prompt that is being handed over, and its blocks that came early. Thread-safe.

    Args:
        receiver: whose.
        keys: store keys of the blocks, block-major.
        owner: of the prefetches.
        found: leading blocks that were there before.
    """

    def __init__(self, receiver: "Receiver", keys: Sequence[bytes], owner: Owner, found: int) -> None:
        self.handover: Handover
        self._receiver = receiver
        self._keys = keys
        self._owner = owner
        self._found = found
        self._taken = 0
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, tokens: Sequence[int], total: int, params: SamplingParams) -> None:
        """Ask the peer for it. Once."""
        client = self._receiver.client
        self.handover = client.submit(
            tokens, total, priority=params.priority, cache_salt=params.cache_salt, arrived=self._arrived
        )
        self.handover.future.add_done_callback(self._ended)

    async def ended(self) -> Outcome:
        """Wait until nothing more will come."""
        return await asyncio.wrap_future(self.handover.future)

    def close(self) -> None:
        """The request has its KV, or wants none any more. Idempotent."""
        with self._lock:
            closed, self._closed = self._closed, True
            taken, self._taken = self._taken, 0
        if not closed:
            self.handover.cancel()
            self._receiver.give_back(self._owner, taken)

    def _arrived(self, start: int, stop: int) -> None:
        with self._lock:
            if not self._closed:
                self._taken += self._receiver.prefetch(self._keys, self._owner, max(start, self._found), stop)

    def _ended(self, future: "Future[Outcome]") -> None:
        outcome = future.result()
        self._receiver.count(outcome.ending, max(0, outcome.blocks - self._found))


class Receiver:
    """Hands prompts over, and brings their blocks into host as they appear in the shared directory. Thread-safe.

    Args:
        side: the decode engine's.
        path: of the prefill engine's socket.
        options: see there.

    Attributes:
        registry: of its metrics.

    Raises:
        ConfigError, TierUnavailable: see `PrefillClient`.
    """

    def __init__(self, side: Side, path: Path, options: HandoverOptions) -> None:
        self.client = PrefillClient(
            path, side.identity, patience=options.patience, deadline=options.deadline, connect=options.connect
        )
        self._side = side
        self._least = options.least_tokens
        self._room = side.store.host.stats()["capacity_bytes"] // _AHEAD_SHARE // side.block_bytes
        self._lock = threading.Lock()
        self._numbers = count(1)
        registry = self.registry = side.store.metrics.registry
        self._endings = Counter("kvtier_handovers", "Prompts handed over, by their end", ["ending"], registry=registry)
        self._blocks = Counter("kvtier_handed_blocks", "Blocks that came from a prefill engine", registry=registry)

    def begin(self, tokens: Sequence[int], params: SamplingParams) -> Reception | None:
        """Hand a prompt over; None where it is better computed here, or is here already.

        Args:
            tokens: of the prompt, valid ids.
            params: of the request.
        """
        side, total = self._side, self._side.usable(len(tokens))
        # Before it is hashed: most prompts that are not worth it are simply short.
        if not (total and len(tokens) >= self._least) or params.prompt_logprobs is not None:
            return None
        if not self.client.available:
            self._endings.labels("away").inc()
            return None
        keys = side.keys(tokens, params.cache_salt)
        # Nor does the caller's event loop wait for a remote tier: the peer asks it, too, before it computes.
        there = side.store.match(keys, parts=len(side.parts), lossy=params.accept_lossy, remote=False)
        found = len(there.tiers)
        if len(tokens) - found * side.block_size < self._least:
            return None
        reception = Reception(self, keys, f"handover-{next(self._numbers)}", found)
        # One token more than the blocks hold: it is all that the peer computes if it finds them.
        reception.submit(tokens[: total * side.block_size + 1], total, params)
        return reception

    def prefetch(self, keys: Sequence[bytes], owner: Owner, start: int, stop: int) -> int:
        """Bring blocks [start, stop) into host as far as there is room for what comes early; the rest is loaded later.

        Returns:
            How many; to be given back.
        """
        parts = len(self._side.parts)
        with self._lock:
            taken = max(0, min(self._room, stop - start))
            self._room -= taken
        if taken:
            wanted = keys[start * parts : (start + taken) * parts]
            self._side.store.prefetch(wanted, owner, parts=parts, depth=start)
        return taken

    def give_back(self, owner: Owner, taken: int) -> None:
        """So many blocks of an owner were used, or will not be."""
        self._side.store.release_owner(owner)
        with self._lock:
            self._room += taken

    def count(self, ending: Ending, blocks: int) -> None:
        """A handover ended, and brought so many blocks."""
        self._endings.labels(ending).inc()
        self._blocks.inc(blocks)

    def close(self) -> None:
        """End the connection; what is waited for is lost. Idempotent."""
        self.client.close()
