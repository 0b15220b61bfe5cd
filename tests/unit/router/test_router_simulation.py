"""Three engines under a trace of conversations: the router finds more prefixes than turns do, and shares the load."""

import random
from collections.abc import Callable, Iterator
from itertools import cycle

from kvtier.config import RouterSettings
from kvtier.events.mirror import Mirror
from kvtier.gpu.pool import BlockPool
from kvtier.keys import Chain
from kvtier.router.fleet import Address, Engine, Fleet
from kvtier.router.prompts import Prompt

BLOCK, BLOCKS, OVERLAP = 16, 700, 4


class Simulated:
    """An engine's device pool, whose events go to the router's index; it computes what it does not find."""

    def __init__(self, engine: Engine) -> None:
        engine.up = True
        self.engine = engine
        self.pool = BlockPool(BLOCKS, BLOCK)
        self.mirror = Mirror(BLOCK)
        self.pool.listener = self.mirror
        self.requests = 0

    def serve(self, tokens: list[int]) -> int:
        """Tokens that were found."""
        chain = Chain(BLOCK)
        chain.extend(tokens)
        found = self.pool.match(chain.keys)
        ids = found + self.pool.allocate(len(chain.keys) - len(found))
        fresh = [at for at in range(len(ids)) if self.pool.publish(ids[at], chain.keys[at], exact=True)]
        for at in fresh:
            parent = chain.keys[at - 1] if at else None
            self.mirror.named([chain.keys[at]], parent, tokens[at * BLOCK : (at + 1) * BLOCK])
        self.pool.release(ids)
        self.requests += 1
        while events := self.mirror.take():
            self.engine.index.apply(events)
        return len(found) * BLOCK


def trace() -> Iterator[list[int]]:
    """60 conversations over 4 system prompts, whose turns come in any order."""
    chance = random.Random(7)
    systems = [[chance.randrange(50_000) for _ in range(320)] for _ in range(4)]
    talks = [list(chance.choice(systems)) for _ in range(60)]
    turns = [talk for talk in talks for _ in range(6)]
    chance.shuffle(turns)
    for talk in turns:
        talk += [chance.randrange(50_000) for _ in range(chance.randrange(40, 120))]
        yield list(talk)


def run(choose: Callable[[Fleet, Prompt], Engine]) -> tuple[float, list[int]]:
    """Share of tokens that were found, and requests by engine. Some requests are under way at any time."""
    fleet = Fleet([Address(f"http://engine{at}") for at in range(3)], RouterSettings(decode_tokens=64))
    for engine in fleet.engines:
        engine.index.block_size = BLOCK
        engine._expected._bound = 0  # events tell
    engines = {engine.name: Simulated(engine) for engine in fleet.engines}
    under_way = []
    found = asked = 0
    for tokens in trace():
        prompt = Prompt(None, tokens, "")
        engine = choose(fleet, prompt)
        attempt = fleet.begin(prompt, [one for one in fleet.engines if one is not engine])
        found += engines[engine.name].serve(tokens)
        asked += len(tokens)
        attempt.answered()
        under_way.append(attempt)
        if len(under_way) > OVERLAP:
            under_way.pop(0).end()
    return found / asked, [engine.requests for engine in engines.values()]


def test_the_router_finds_far_more_than_taking_turns() -> None:
    turns = cycle(range(3))

    def by_prefix(fleet: Fleet, prompt: Prompt) -> Engine:
        attempt = fleet.begin(prompt)
        attempt.end()
        return attempt.engine

    routed, routed_requests = run(by_prefix)
    in_turn, in_turn_requests = run(lambda fleet, prompt: fleet.engines[next(turns)])
    print(f"hit tokens: router {routed:.3f} {routed_requests}, round robin {in_turn:.3f} {in_turn_requests}")
    assert 1 - routed < 0.5 * (1 - in_turn), "less than half as many tokens are computed"
    assert max(routed_requests) < 1.5 * sum(routed_requests) / 3, "nobody got it all"
