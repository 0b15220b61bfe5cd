"""A model in which every byte is a number, so that a wrong block shows as a wrong output, and a device that runs it.

The KV of a token is a digest of the KV of all tokens before it, as read through the block table, and of the token.
The next token is a digest of all KV. With a window, both see its KV alone. `continuation` is the same model without any
memory to manage.
"""

from collections.abc import Iterator, Sequence
from zlib import crc32

from kvtier.engine.outputs import Sampled
from kvtier.engine.plan import StepPlan
from kvtier.engine.request import Request
from kvtier.hooks import NO_BLOCK, StepSpan

VOCAB = 50
GARBAGE = -1


def digest(numbers: Sequence[int]) -> int:
    return crc32(repr(tuple(numbers)).encode())


def next_token(kv: Sequence[int]) -> int:
    return digest(kv) % VOCAB


def seen(kv: Sequence[int], window: int | None) -> Sequence[int]:
    """Of all KV before a token, and its own, that which it attends to."""
    return kv if window is None else kv[-window:]


def written(kv: Sequence[int], token: int, window: int | None) -> int:
    """The KV of a token that comes after all `kv`."""
    return digest([*(kv if window is None else kv[len(kv) + 1 - window :] if len(kv) >= window else kv), token])


def continuation(prompt: Sequence[int], count: int, window: int | None = None) -> list[int]:
    """The undisturbed output: no blocks, no batch, no cache."""
    kv: list[int] = []
    output: list[int] = []
    for token in prompt:
        kv.append(written(kv, token, window))
    while True:
        output.append(next_token(seen(kv, window)))
        if len(output) == count:
            return output
        kv.append(written(kv, output[-1], window))


class Device:
    """Block contents; what was never written, or is being overwritten, is garbage."""

    def __init__(self, num_blocks: int, block_size: int, window: int | None = None) -> None:
        self.size = block_size
        self.window = window
        self.blocks = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.nothing = [GARBAGE] * block_size

    def read(self, block_ids: Sequence[int], count: int) -> list[int]:
        held = (self.nothing if block == NO_BLOCK else self.blocks[block] for block in block_ids)
        values = [value for block in held for value in block][:count]
        assert len(values) == count
        return values

    def run(self, plan: StepPlan) -> list[Sampled]:
        """Compute the plan's spans; sampled tokens."""
        for copy in plan.copies:
            self.blocks[copy.dst] = list(self.blocks[copy.src])
        sampled = []
        for at, (request, span) in enumerate(zip(plan.requests, plan.step.spans, strict=True)):
            assert span.start < span.stop
            kv = self.read(span.block_ids, span.start)
            for position, token in enumerate(request.inputs(span.start, span.stop), span.start):
                kv.append(written(kv, token, self.window))
                block = span.block_ids[position // self.size]
                assert block in plan.step.written
                self.blocks[block][position % self.size] = kv[-1]
            if at in plan.samples:
                sampled.append(Sampled(tuple(self._chosen(request, span, kv))))
        return sampled

    def _chosen(self, request: Request, span: StepSpan, kv: list[int]) -> Iterator[int]:
        """One token, and one more for each draft that is what was chosen before it."""
        assert span.stop >= request.num_tokens
        for count in range(request.num_tokens, span.stop + 1):
            token = next_token(seen(kv[:count], self.window))
            yield token
            if count == span.stop or request.drafts[count - request.num_tokens] != token:
                return
