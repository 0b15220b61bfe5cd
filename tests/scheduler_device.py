"""A model in which every byte is a number, so that a wrong block shows as a wrong output, and a device that runs it.

The KV of a token is a digest of the KV of all tokens before it, as read through the block table, and of the token.
The next token is a digest of all KV. With a window, both see its KV alone. A mixed model has layers of both kinds: a
token's KV is two numbers, in two memories, and what it sees is all of the first ones and the window's second ones.
`continuation` is the same model without any memory to manage.
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


class Kv:
    """KV of one sequence so far: of all layers, or of those without a window and, beside it, of those with one."""

    def __init__(self, window: int | None, mixed: bool, kv: Sequence[int] = (), beside: Sequence[int] = ()) -> None:
        self.window = window
        self.mixed = mixed
        self.kv = list(kv)
        self.beside = list(beside)

    def append(self, token: int) -> None:
        if not self.mixed:
            self.kv.append(written(self.kv, token, self.window))
            return
        value = digest([*self.kv, written(self.beside, token, self.window)])
        self.kv.append(value)
        self.beside.append(digest([value, 1]))

    def next_token(self, count: int | None = None) -> int:
        """What follows the first so many tokens, or all."""
        kv, beside = self.kv[:count], self.beside[:count]
        return next_token([*kv, *seen(beside, self.window)] if self.mixed else seen(kv, self.window))


def continuation(prompt: Sequence[int], count: int, window: int | None = None, mixed: bool = False) -> list[int]:
    """The undisturbed output: no blocks, no batch, no cache."""
    kv = Kv(window, mixed)
    output: list[int] = []
    for token in prompt:
        kv.append(token)
    while True:
        output.append(kv.next_token())
        if len(output) == count:
            return output
        kv.append(output[-1])


class Device:
    """Block contents; what was never written, or is being overwritten, is garbage. With slots it is a mixed model's."""

    def __init__(self, num_blocks: int, block_size: int, window: int | None = None, num_slots: int = 0) -> None:
        self.size = block_size
        self.window = window
        self.mixed = num_slots > 0
        self.blocks = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.slots = [[GARBAGE] * block_size for _ in range(num_slots)]
        self.nothing = [GARBAGE] * block_size

    def content(self, block: int, slot: int = NO_BLOCK) -> list[int]:
        """All parts of a block; slot: where the windowed one is."""
        return [*self.blocks[block], *(self.slots[slot] if self.mixed else ())]

    def fill(self, block: int, slot: int, content: Sequence[int] | None) -> None:
        """Overwrite those parts of a block that have a place, None: with garbage."""
        content = [GARBAGE] * 2 * self.size if content is None else content
        self.blocks[block] = list(content[: self.size])
        if self.mixed and slot != NO_BLOCK:
            self.slots[slot] = list(content[self.size :])

    def read(self, block_ids: Sequence[int], count: int, memory: Sequence[Sequence[int]]) -> list[int]:
        held = (self.nothing if block == NO_BLOCK else memory[block] for block in block_ids)
        values = [value for block in held for value in block][:count]
        assert len(values) == count
        return values

    def run(self, plan: StepPlan) -> list[Sampled]:
        """Compute the plan's spans; sampled tokens."""
        for copy in plan.copies:
            self.blocks[copy.dst] = list(self.blocks[copy.src])
            if self.mixed:
                self.slots[copy.windowed_dst] = list(self.slots[copy.windowed_src])
        sampled = []
        for at, (request, span) in enumerate(zip(plan.requests, plan.step.spans, strict=True)):
            assert span.start < span.stop
            assert len(span.windowed_ids) == len(span.block_ids) * self.mixed
            beside = self.read(span.windowed_ids, span.start, self.slots) if self.mixed else []
            kv = Kv(self.window, self.mixed, self.read(span.block_ids, span.start, self.blocks), beside)
            for position, token in enumerate(request.inputs(span.start, span.stop), span.start):
                kv.append(token)
                block = span.block_ids[position // self.size]
                assert block in plan.step.written
                self.blocks[block][position % self.size] = kv.kv[-1]
                if self.mixed:
                    slot = span.windowed_ids[position // self.size]
                    assert slot in plan.step.windowed_written
                    self.slots[slot][position % self.size] = kv.beside[-1]
            if at in plan.samples:
                sampled.append(Sampled(tuple(self._chosen(request, span, kv))))
        return sampled

    def _chosen(self, request: Request, span: StepSpan, kv: Kv) -> Iterator[int]:
        """One token, and one more for each draft that is what was chosen before it."""
        assert span.stop >= request.num_tokens
        for count in range(request.num_tokens, span.stop + 1):
            token = kv.next_token(count)
            yield token
            if count == span.stop or request.drafts[count - request.num_tokens] != token:
                return
