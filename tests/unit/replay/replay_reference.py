"""An independent model of what a replay must find: plain Python, no kvtier code but the trace."""

import random
from collections import OrderedDict

from kvtier.replay import Trace, TraceRequest


def lru_hits(trace, capacity):
    """Leading hits per request of a tail-first LRU that pins the prompt it serves."""
    held, hits = OrderedDict(), []
    for request in trace.requests:
        hits.append(next((at for at, block in enumerate(request.blocks) if block not in held), len(request.blocks)))
        kept = request.blocks[:capacity]
        for block in reversed(kept):
            held[block] = None
            held.move_to_end(block)
        pinned = set(kept)
        for block in [block for block in held if block not in pinned][: max(0, len(held) - capacity)]:
            del held[block]
    return hits


def infinite_hits(trace):
    seen, hits = set(), []
    for request in trace.requests:
        hits.append(next((at for at, block in enumerate(request.blocks) if block not in seen), len(request.blocks)))
        seen.update(request.blocks)
    return hits


def token_ratio(trace, hits):
    found = (min(count * trace.block_tokens, r.tokens) for count, r in zip(hits, trace.requests, strict=True))
    return sum(found) / sum(request.tokens for request in trace.requests)


def random_trace(seed, requests=250, sessions=20, block_tokens=16):
    """Conversations that grow turn by turn behind a few shared system prompts; sessions come and go."""
    dice = random.Random(seed)
    numbers, chains, rows = {}, {}, []
    for at in range(requests):
        session = dice.randrange(sessions)
        chain = chains.get(session)
        if chain is None or len(chain) > 12 or dice.random() < 0.1:
            chain = [("system", dice.randrange(3), depth) for depth in range(2)]
        chain = chain + [(at, depth) for depth in range(dice.randint(0, 3))]
        chains[session] = chain
        blocks = tuple(numbers.setdefault(tuple(chain[: end + 1]), len(numbers)) for end in range(len(chain)))
        tokens = len(blocks) * block_tokens - dice.randrange(block_tokens)
        rows.append(TraceRequest(float(at), tokens, blocks, str(session)))
    return Trace("random", block_tokens, tuple(rows), len(numbers))
