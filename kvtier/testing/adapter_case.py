"""AdapterCase: how a suite gets an engine with the adapter under test, and real tiers below it that fail on demand."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Protocol, TypeAlias

from kvtier.cpu import HostTier
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.store import StoreOptions, TieredStore
from kvtier.testing.faulty import FaultyHostTier, FaultyTier

__all__ = ["AdapterCase", "AdapterEngine", "AdapterSetup", "FaultyStore", "Loaded", "Tokens"]

Tokens: TypeAlias = tuple[int, ...]

_PAGE = 4096
_fillers = count()  # never the same prompt again


@dataclass(frozen=True, slots=True)
class AdapterSetup:
    """What the suite wants an engine to be.

    Args:
        store: its tiers. They are the suite's: the engine closes none of them.
        device_blocks: size of its device pool.
        accept_lossy: whether all its requests take KV that is not exact; the store is set likewise.
        salt: separates namespaces: engines of unequal salts share nothing.
    """

    store: TieredStore
    device_blocks: int
    accept_lossy: bool = False
    salt: str = ""


class AdapterEngine(Protocol):
    """An engine with the adapter under test, as the suite drives it. Whatever is found is loaded: no gate."""

    def generate(self, prompts: Sequence[Tokens], max_tokens: int) -> list[Tokens]:
        """Exactly `max_tokens` greedy tokens for each prompt, which all run at once.

        Returns when no transfer is under way any more that the engine itself knows of.
        """
        ...

    def abort(self, prompts: Sequence[Tokens], max_tokens: int, steps: int) -> None:
        """Begin these prompts, let the engine make `steps` steps, abort them all, and let transfers end as above."""
        ...

    def forget(self) -> None:
        """Forget the KV that the device holds and no request uses."""
        ...

    def loaded_tokens(self) -> int:
        """Tokens whose KV came from the store so far, by the engine's own count."""
        ...

    def loaded_bytes(self) -> Mapping[str, int]:
        """Bytes loaded so far, by the tier in which they were found."""
        ...

    def preemptions(self) -> int:
        """How often a running request lost its device blocks so far."""
        ...

    def close(self) -> None:
        """The engine and the adapter end; the store stays open."""
        ...


@dataclass(slots=True)
class Loaded:
    """What came from the store between two moments."""

    tokens: int = 0
    nbytes: dict[str, int] = field(default_factory=dict)


class FaultyStore:
    """A real host tier over a real NVMe tier, both of which fail as they are told to.

    Args:
        path: of the NVMe directory; another store on it, later, stands for a restart.
        block_bytes: size of the largest block.
        options: of the store.
        blocks: that each tier holds.
    """

    def __init__(self, path: Path, block_bytes: int, options: StoreOptions, blocks: int = 1024) -> None:
        room = -(-block_bytes // _PAGE) * _PAGE
        metrics = Metrics()
        self._path = path
        segment = max(1 << 20, 8 * room)
        nvme = NvmeTier(
            path, blocks * room + 2 * segment, NvmeOptions(segment_bytes=segment, min_free_bytes=0), metrics=metrics
        )
        self.nvme = FaultyTier(nvme)
        self.host = FaultyHostTier(HostTier(blocks * room, metrics=metrics))
        self.store = TieredStore(self.host, [self.nvme], metrics=metrics, options=options)

    def leave_on_nvme(self) -> None:
        """Everything is on NVMe, and nothing in host."""
        self.store.flush()
        self.store.clear("host")

    def rot(self) -> None:
        """A bit of every block on NVMe flips, in the files."""
        for path in self._path.glob("seg-*.kv"):
            data = bytearray(path.read_bytes())
            for at in range(0, len(data), _PAGE):
                data[at] ^= any(data[at : at + _PAGE])
            with path.open("r+b") as file:
                file.write(data)

    def heal(self) -> None:
        """No fault is in force any more."""
        self.host.heal()
        self.nvme.heal()

    def held(self) -> dict[str, int]:
        """Leases and reservations of all tiers that have any."""
        stats = self.store.stats()
        holds = {
            f"{tier} {what}": stats[tier][what] for tier in ("host", "nvme") for what in ("leases", "reservations")
        }
        return {name: number for name, number in holds.items() if number}

    def close(self) -> None:
        """End the tiers."""
        self.heal()
        self.store.close()


class AdapterCase:
    """Subclass it in a module that pytest collects, and say how to make the engine and what is right.

    Attributes:
        block_tokens, block_bytes: of one block, all layers, raw.
        token_ids: from which prompts are made; without those that end an output.
        device_blocks: of an ordinary engine: at least 32.
        lossy_format: one that the adapter's layout can take, or None: it takes none, and refuses to start with one.
        device_prefix: the engine finds prefixes in its own device memory, too.
        preempts: the engine takes blocks away from running requests where they run out.
        stall_seconds: after which an engine that waits for a hanging tier waits for ever.
        settle_seconds: after which whatever is still leased is held for ever.
        seed: of the prompts. Where the reference's two likeliest tokens are closer than rounding, choose another one.
    """

    block_tokens = 16
    block_bytes = 0
    token_ids = range(1, 256)
    device_blocks = 32
    lossy_format: str | None = "int8"
    device_prefix = True
    preempts = True
    stall_seconds = 20.0
    settle_seconds = 10.0
    seed = 0

    def make_engine(self, setup: AdapterSetup) -> AdapterEngine:
        """A new engine with the adapter over `setup.store`; equal weights each time."""
        raise NotImplementedError

    def reference(self, prompt: Tokens, max_tokens: int) -> Tokens:
        """What the model answers, greedily, by another way than the engine's KV cache."""
        raise NotImplementedError

    def loadable(self, tokens: int) -> int:
        """Of a prompt of so many tokens, those that come from the store once it was computed: never all of them.

        Whole blocks; override it for an engine that takes the first tokens of a block, too.
        """
        return (tokens - 1) // self.block_tokens * self.block_tokens

    # ---- what the suites are made of

    def _prompt(self, name: str, tokens: int) -> Tokens:
        dice = Random(f"{self.seed} {name}")  # noqa: S311 - a test's prompts
        return tuple(dice.choice(self.token_ids) for _ in range(tokens))

    def _blocks(self, blocks: float, name: str) -> Tokens:
        return self._prompt(name, int(blocks * self.block_tokens))

    @contextmanager
    def _open(self, path: Path, **options: object) -> Iterator[FaultyStore]:
        """Tiers whose faults cost little time; nobody holds anything in them in the end."""
        chosen = {"breaker_timeouts": 1000, "breaker_pause": 0.01} | options
        tiers = FaultyStore(path / "kv", self.block_bytes, StoreOptions(**chosen))  # type: ignore[arg-type]
        try:
            yield tiers
            self._assert_nothing_is_held(tiers)
        finally:
            tiers.close()

    @contextmanager
    def _engine(
        self, tiers: FaultyStore, *, device_blocks: int | None = None, accept_lossy: bool = False, salt: str = ""
    ) -> Iterator[AdapterEngine]:
        setup = AdapterSetup(tiers.store, device_blocks or self.device_blocks, accept_lossy, salt)
        engine = self.make_engine(setup)
        try:
            yield engine
        finally:
            tiers.heal()
            engine.close()

    @contextmanager
    def _loaded(self, engine: AdapterEngine) -> Iterator[Loaded]:
        """What is loaded in this block of code; both counts agree, raw."""
        tokens, nbytes, loaded = engine.loaded_tokens(), dict(engine.loaded_bytes()), Loaded()
        yield loaded
        loaded.tokens = engine.loaded_tokens() - tokens
        grown = {tier: now - nbytes.get(tier, 0) for tier, now in engine.loaded_bytes().items()}
        loaded.nbytes = {tier: size for tier, size in grown.items() if size}

    def _assert_answers(self, engine: AdapterEngine, prompts: Sequence[Tokens], max_tokens: int = 4) -> None:
        expected = [self.reference(prompt, max_tokens) for prompt in prompts]
        assert engine.generate(prompts, max_tokens) == expected

    def _assert_loads(self, engine: AdapterEngine, prompt: Tokens, tier: str, tokens: int | None = None) -> None:
        """The answer is right, and every token that can be loaded (or `tokens` of them) came from `tier`."""
        wanted = self.loadable(len(prompt)) if tokens is None else tokens
        with self._loaded(engine) as loaded:
            self._assert_answers(engine, [prompt])
        assert loaded.tokens == wanted
        nbytes = -(-wanted // self.block_tokens) * self.block_bytes
        assert loaded.nbytes == ({tier: nbytes} if nbytes else {})

    def _forget(self, engine: AdapterEngine) -> None:
        """The device holds nothing of what it held, not even where nobody may look: other KV lies there."""
        engine.forget()
        length = self.device_blocks // 2 * self.block_tokens - self.block_tokens
        for _ in range(3):
            engine.generate([self._prompt(f"filler {next(_fillers)}", length)], 1)
        engine.forget()

    def _assert_nothing_is_held(self, tiers: FaultyStore) -> None:
        tiers.heal()
        deadline = time.monotonic() + self.settle_seconds
        while tiers.held() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert tiers.held() == {}

    @contextmanager
    def _never_stalls(self, tiers: FaultyStore) -> Iterator[None]:
        """The tiers are healed after `stall_seconds`, so that the test ends, and it has failed if that was needed."""
        rescued = threading.Event()

        def rescue() -> None:
            rescued.set()
            tiers.heal()

        timer = threading.Timer(self.stall_seconds, rescue)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        assert not rescued.is_set(), f"requests waited {self.stall_seconds} s for a tier that hangs"
