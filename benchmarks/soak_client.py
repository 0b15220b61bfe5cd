"""One client of `service_soak.py`, in a process of its own that may be killed at any instant."""

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from kvtier.client import Block, Client, ClientOptions
from kvtier.client.data import DataClient
from kvtier.client.errors import Busy, NotFound, QuotaExceeded, Refused, ServerTimeout

__all__ = ["BLOCK", "CHAIN", "Soaker", "soak"]

BLOCK = 64 << 10
CHAIN = 16
_TIMEOUT = 30.0
# What a busy service may say; all else is a fault. Nothing that is asked for here makes no sense.
_DECLARED = (Busy, NotFound, QuotaExceeded, ServerTimeout)
_CHAINS: dict[int, list[bytes]] = {}


def soak(way: str, address: str, namespace: str, chains: int, seed: int, pipe: Connection) -> None:
    """Say so after the first call, go on until something comes through the pipe, then answer with the tally."""
    client: Client | DataClient
    if way == "rest":
        client = Client(address, options=ClientOptions(data="never", timeout=_TIMEOUT, attempts=1))
    else:
        client = DataClient(address, shared=way == "shm", timeout=_TIMEOUT)
    with client:
        soaker = Soaker(client, namespace, chains, seed)
        soaker.turn()
        pipe.send(None)
        while not pipe.poll(0):
            soaker.turn()
        soaker.end()
    pipe.send(dict(soaker.tally))


class Soaker:
    """Calls one verb after the other.

    Args:
        client: of the way that it takes.
        namespace: in which.
        chains: that there are.
        seed: of its choices.
    """

    def __init__(self, client: Client | DataClient, namespace: str, chains: int, seed: int) -> None:
        self.tally: Counter[str] = Counter()
        self._client = client
        self._ns = namespace
        self._chains = chains
        self._dice = random.Random(seed)
        self._pins: list[str] = []
        self._verbs: tuple[Callable[[], object], ...] = (
            *[self._put] * 6,
            *[self._get] * 8,
            *[self._match] * 3,
            self._each,
            self._delete,
            self._pin,
            self._prefetch,
            self._hint,
        )

    def turn(self) -> None:
        """One call."""
        verb = self._dice.choice(self._verbs)
        try:
            verb()
        except _DECLARED as error:
            self.tally[f"refused.{error.code}"] += 1
            if isinstance(error, Busy):
                self.tally["busy without retry_after"] += error.retry_after is None
                time.sleep(min(error.retry_after or 0.0, 0.5))
        except Refused as error:
            self.tally[f"wrong: {verb.__name__}: {error.status} {error.code}: {error}"] += 1
        except Exception as error:  # noqa: BLE001  whatever it is, it is counted as a fault
            self.tally[f"wrong: {verb.__name__}: {type(error).__name__}: {error}"] += 1

    def end(self) -> None:
        """Let go of what it holds."""
        for pin in self._pins:
            try:
                self._client.unpin(pin)
            except NotFound:
                self.tally["pins that ended by themselves"] += 1

    def _keys(self) -> list[bytes]:
        """The head of a chain, of popular ones more often."""
        number = min(int(self._dice.paretovariate(0.3)) - 1, 1 << 30) % self._chains
        if number not in _CHAINS:
            _CHAINS[number] = [hashlib.sha256(f"{number}/{depth}".encode()).digest() for depth in range(CHAIN)]
        return _CHAINS[number][: self._dice.randint(1, CHAIN)]

    def _put(self) -> None:
        keys = self._keys()
        blocks = [
            Block(key, key * (BLOCK // len(key)), parent=keys[depth - 1] if depth else None, depth=depth)
            for depth, key in enumerate(keys)
        ]
        outcomes = self._client.put_many(self._ns, blocks)
        self.tally["put"] += len(keys)
        self.tally.update(outcome.value for outcome in outcomes)

    def _get(self, *, each: bool = False) -> None:
        keys = self._keys()
        found = self._client.get_many(self._ns, keys, each=each)
        self.tally["asked"] += len(keys)
        self.tally["hits"] += len(found)
        for one in found:
            if one.data != one.key * (BLOCK // len(one.key)):
                self.tally[f"wrong: other bytes under {one.key.hex()}"] += 1
        self._check_order(keys, [one.key for one in found], each=each)

    def _check_order(self, keys: Sequence[bytes], found: Sequence[bytes], *, each: bool) -> None:
        wanted = [key for key in keys if key in set(found)] if each else list(keys[: len(found)])
        if list(found) != wanted:
            self.tally["wrong: other blocks than were asked for"] += 1

    def _each(self) -> None:
        self._get(each=True)

    def _match(self) -> None:
        keys = self._keys()
        tiers = self._client.match(self._ns, keys).tiers
        self.tally["match"] += len(keys)
        self.tally["matched"] += len(tiers)

    def _delete(self) -> None:
        self._client.delete(self._ns, self._keys()[-1:])

    def _pin(self) -> None:
        if len(self._pins) == 3:
            pin = self._pins.pop()
            self._client.unpin(pin)
        self._pins.append(self._client.pin(self._ns, self._keys()[:2], 5.0).id)

    def _prefetch(self) -> None:
        prefetch = self._client.prefetch(self._ns, self._keys())
        if self._dice.random() < 0.3:
            self._client.cancel(prefetch.id)

    def _hint(self) -> None:
        self._client.hint(self._ns, self._keys(), dead_from_depth=self._dice.randint(1, CHAIN))
