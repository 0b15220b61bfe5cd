"""Ten thousand random lives of requests on one connector: whatever ends them, in whatever order, nothing is kept."""

import contextlib
from random import Random

import numpy as np
import pytest
import torch
from connector_world import BLOCK_BYTES, NAMESPACE, SIZE, Request, SlowTier, holds_nothing
from patience import until

from kvtier.connector import ConnectorOptions, CopyRule, TierScheduler, TierWorker
from kvtier.cpu import AttachedRegion, HostTier, StagingRegion
from kvtier.hooks import Match, Step, StepSpan, TransferResults
from kvtier.store import TieredStore

POOL = 48
TEXTS = [[at * 100 + token for token in range(6 * SIZE + 1)] for at in range(6)]


class Life:
    """A request, and how far it got."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.blocks: list[int] = []
        self.state = "waiting"
        self.tokens = 0


class World:
    """Scheduler half, worker half and two tiers; a device pool whose blocks say which key they hold."""

    def __init__(self, seed: int, copies: CopyRule) -> None:
        self.random = Random(seed)
        self.store = TieredStore(HostTier(14 * BLOCK_BYTES), [SlowTier(20 * BLOCK_BYTES)])
        self.staging = StagingRegion(BLOCK_BYTES, 10)
        options = ConnectorOptions(load_seconds=0.5, least_seconds=0.0, copies=copies)
        self.half = TierScheduler(self.store, NAMESPACE, SIZE, self.staging, options)
        shares = [*self.store.host.regions(), *self.staging.regions()]
        self.worker = TierWorker({each.region: AttachedRegion(each.fd, each.nbytes, each.writable) for each in shares})
        self.pool = torch.zeros(POOL, BLOCK_BYTES, dtype=torch.uint8)
        self.worker.register_pool(self.pool)
        self.free = list(range(POOL))
        self.lives: dict[str, Life] = {}
        self.held: dict[str, list[list[int]]] = {}
        self.arrivals: dict[int, bytes] = {}
        self.count = 0
        self.loaded = self.evacuated = 0

    def begin(self) -> None:
        self.count += 1
        text = self.random.choice(TEXTS)
        request = Request(f"r{self.count}", text[: self.random.randrange(1, len(text) + 1)])
        self.lives[request.id] = Life(request)

    def ask(self, life: Life) -> None:
        # As if the device had the first blocks, more or fewer of them each time.
        first = self.random.choice((0, 0, 0, 1, 2))
        offer = self.half.match(life.request, first * SIZE)
        if not isinstance(offer, Match):
            return
        need = -(-life.request.num_tokens // SIZE)
        if need > len(self.free) or self.random.random() < 0.1:
            return
        life.blocks = [self.free.pop() for _ in range(need)]
        full = life.request.num_tokens // SIZE
        self.arrivals |= {life.blocks[at]: life.request.chain[at] for at in range(min(first, full))}
        assert offer.tokens + first * SIZE <= max(life.request.num_tokens - 1, first * SIZE)
        taken = offer.tokens if self.random.random() < 0.9 else 0
        self.half.allocated(life.request, life.blocks, taken)
        life.state = "loading" if taken else "running"

    def end(self, life: Life, reason: str) -> None:
        for block in life.blocks:
            self.arrivals.pop(block, None)
        held = self.half.finished(life.request.id, reason)
        if held:
            self.held.setdefault(life.request.id, []).append(life.blocks)
        else:
            self.free += life.blocks
        life.blocks = []
        if reason == "preempt":
            life.state = "waiting"
        else:
            del self.lives[life.request.id]

    def step(self) -> None:
        running = [life for life in self.lives.values() if life.state == "running"]
        chosen = self.random.sample(running, min(len(running), 2))
        spans = tuple(
            StepSpan(life.request, tuple(life.blocks), life.tokens, life.request.num_tokens, exact=True)
            for life in chosen
        )
        written = {block for span in spans for block in span.block_ids[span.start // SIZE :]}
        written |= {block for life in self.lives.values() if life.state == "loading" for block in life.blocks}
        arrivals, self.arrivals = self.arrivals, {}
        written |= arrivals.keys()
        plan = self.half.plan(Step(0, spans, frozenset(written)))
        self.worker.begin(plan)
        self.evacuated += sum(map(len, plan.evacuations.values()))
        # Not before: a save may have read these blocks until now.
        for block, key in arrivals.items():
            self.pool[block] = pattern(key)
        for span in spans:
            for at in range(span.start // SIZE, span.stop // SIZE):
                self.pool[span.block_ids[at]] = pattern(span.request.chain[at])
        self.absorb(self.worker.end())
        for life in chosen:
            life.tokens = life.request.num_tokens
            self.end(life, "stop")

    def absorb(self, results: TransferResults) -> None:
        done = self.half.completed(results)
        for request_id, (tokens, exact) in done.loaded.items():
            life = self.lives[request_id]
            assert life.state == "loading"
            assert exact
            life.state, life.tokens = "running", tokens
            for at in range(tokens // SIZE):
                assert torch.equal(self.pool[life.blocks[at]], pattern(life.request.chain[at]))
            self.loaded += tokens
        for request_id in done.released:
            self.free += self.held[request_id].pop(0)

    def act(self) -> None:
        choice = self.random.random()
        lives = list(self.lives.values())
        if choice < 0.3 and len(lives) < 8:
            self.begin()
        elif choice < 0.6 and lives:
            life = self.random.choice(lives)
            if life.state == "waiting":
                self.ask(life)
        elif choice < 0.7 and lives:
            self.end(self.random.choice(lives), "abort")
        elif choice < 0.73 and lives:
            life = self.random.choice(lives)
            if life.state != "waiting":
                life.tokens = 0
                self.end(life, "preempt")
        elif choice < 0.74:
            self.half.finished("nobody", "abort")
        else:
            self.step()

    def close(self) -> None:
        self.worker.close()
        self.store.close()
        self.staging.close()


def pattern(key: bytes) -> torch.Tensor:
    """A block's bytes: they say which chain key they belong to."""
    return torch.from_numpy(np.frombuffer(key[:16] * (BLOCK_BYTES // 16), np.uint8).copy())


@pytest.mark.parametrize(("seed", "copies"), [(0, "inclusive"), (1, "exclusive")])
def test_random_lives_leave_nothing_behind(seed: int, copies: CopyRule) -> None:
    with contextlib.closing(World(seed, copies)) as world:
        for _ in range(10_000):
            world.act()
        for life in list(world.lives.values()):
            world.end(life, "abort")
        until(lambda: (world.absorb(world.worker.end()), world.step(), not world.half.busy)[-1])
        world.store.flush()
        until(lambda: holds_nothing(world.store))
        assert world.staging.free_slots == 10
        assert sorted(world.free) == list(range(POOL))
        assert world.loaded > 100
        assert (world.evacuated > 0) == (copies == "exclusive")
        half = world.half
        for books in (half._loading, half._by_job, half._declined, half._late, half._reports._open):
            assert not books
        for books in (half._saves._copying, half._saves._open, half._saves._saved, half._saves._waiting):
            assert not books
