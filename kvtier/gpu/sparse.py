"""SparseAttention: single new tokens of some sequences attend to a few of their blocks, chosen layer by layer.

    table      [s] [.] [.] [x] [.] [x] [.] [r] [r]      s sink, r recent (the last one is being written),
    head 0      s           x       x       r   r       x chosen: by each KV head for itself
    head 1      s   x               x       r   r

All other spans, and the writing of K and V, are left to the attention that it is built on. A sparse span is shown to
that one with its last block only, or, where all layers and heads take the same blocks, with those. Keys carry their
rotation, so that blocks may be attended to in any company.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.errors import FormatMismatch
from kvtier.gpu.batches import AttentionSpan
from kvtier.gpu.block_scores import BlockScores, make_block_scores
from kvtier.gpu.sparse_choice import Choice, make_choice
from kvtier.gpu.storage import DevicePool
from kvtier.layout import GroupKind

__all__ = ["SparseAttention", "SparseRule", "SparseSpan"]


class SparseRule(Protocol):
    """What a request asks for; `kvtier.engine.sparse.Sparse` is one."""

    @property
    def kind(self) -> str:
        """`streaming`, `h2o` or `quest`."""
        ...

    @property
    def sink(self) -> int:
        """Leading blocks that are always attended to."""
        ...

    @property
    def recent(self) -> int:
        """Latest blocks that are."""
        ...

    def budget(self, blocks: int) -> int:
        """How many of so many blocks are attended to."""
        ...


class SparseSpan(NamedTuple):
    """Whose span it is, and what its request asks for.

    prompt: leading tokens that attend to all before them, however they are cut into spans: their KV counts as exact.
    """

    request_id: str
    rule: SparseRule | None
    prompt: int = 0


class _Base(Protocol):
    def plan(self, spans: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class _Shown(NamedTuple):
    """A span as the attention below sees it."""

    block_ids: Sequence[int]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Row:
    """A sparse decode: row of the flat batch, table, tokens, chosen by."""

    row: int
    blocks: Tensor
    stop: int
    rule: SparseRule
    choice: Choice


@dataclass(frozen=True, slots=True)
class _Watched:
    """A prefill whose latest queries tell what will be attended to: rows [first, last) of the flat batch."""

    first: int
    last: int
    blocks: Tensor
    stop: int
    choice: Choice


class SparseAttention:
    """Attention in which some sequences' decodes are sparse. Implements `kvtier.engine.models.base.Attention`.

    Args:
        base: attends for all others, over the same pool.
        pool: GQA.
        num_heads: query heads.
        windows: per layer, as the model has them: there must be none.
        scores: what blocks are chosen by; None: as the pool's device calls for.

    Raises:
        FormatMismatch: an MLA pool, a coded one, or a model with sliding windows: what is attended to is the model's
            affair there.
    """

    def __init__(
        self,
        base: _Base,
        pool: DevicePool,
        num_heads: int,
        windows: Sequence[int | None] = (),
        scores: BlockScores | None = None,
    ) -> None:
        if pool.group.kind is not GroupKind.GQA or any(windows):
            raise FormatMismatch(
                f"sparse attention over a {pool.group.kind} pool with windows {list(windows)}: it needs gqa without "
                "sliding windows; leave `sparse` out"
            )
        if pool.coded is not None:
            raise FormatMismatch("sparse attention over a coded pool: it reads raw blocks; leave `sparse` out")
        self._base = base
        self._pool = pool
        self._group = num_heads // pool.group.kv_heads
        self._scores = scores or make_block_scores(pool)
        self._choices: dict[str, Choice] = {}
        self._rows: list[_Row] = []
        self._watched: list[_Watched] = []

    def plan(self, spans: Sequence[AttentionSpan], asked: Sequence[SparseSpan]) -> None:
        """Prepare a step. Raises what the attention below does.

        Args:
            spans: one after the other in the flat batch.
            asked: one for each span. Of one with a rule, single tokens behind the prompt and the first are sparse.
        """
        self._rows, self._watched, shown, first = [], [], [], 0
        for span, (request_id, rule, prompt) in zip(spans, asked, strict=True):
            last = first + span.stop - span.start
            shown.append(span if rule is None else self._shown(span, request_id, rule, prompt, first))
            first = last
        self._base.plan(shown)

    def _shown(self, span: AttentionSpan, request_id: str, rule: SparseRule, prompt: int, first: int) -> AttentionSpan:
        size = self._pool.layout.block_size
        whole = span.stop - span.start > 1 or span.start < max(prompt, 1)
        if rule.kind == "streaming":
            return span if whole else _first_and_latest(span, rule, size)
        blocks = torch.tensor(span.block_ids[: -(-span.stop // size)], device=self._pool.device)
        choice = self._choices.get(request_id)
        if choice is None:
            choice = self._choices[request_id] = make_choice(rule.kind, self._pool, self._scores)
        choice.follow(blocks, span.stop)
        if whole or not choice.ready:
            self._watched.append(_Watched(first, first + span.stop - span.start, blocks, span.stop, choice))
            return span
        self._rows.append(_Row(first, blocks, span.stop, rule, choice))
        full = span.start // size
        return _Shown(span.block_ids[full : full + 1], span.start - full * size, span.stop - full * size)

    def fork(self, parent_id: str, child_id: str) -> None:
        """A sequence goes on from another one's KV: it chooses as that one would, until they differ."""
        choice = self._choices.get(parent_id)
        if choice is not None:
            self._choices[child_id] = choice.copy()

    def forget(self, request_id: str) -> None:
        """The sequence has ended. Unknown ids are tolerated."""
        self._choices.pop(request_id, None)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `PagedAttention`."""
        out = self._base(layer, q, k, v)
        for watched in self._watched:
            watched.choice.watch(layer, self._grouped(q[watched.first : watched.last]), watched.blocks, watched.stop)
        for row in self._rows:
            out[row.row] = self._attend(layer, self._grouped(q[row.row : row.row + 1])[:, :, 0], row)
        return out

    def _grouped(self, q: Tensor) -> Tensor:
        """[T, heads, head_dim] as [kv_heads, group, T, head_dim]."""
        return q.reshape(len(q), -1, self._group, q.shape[-1]).permute(1, 2, 0, 3)

    def _attend(self, layer: int, q: Tensor, row: _Row) -> Tensor:
        """Outputs [heads, head_dim] of queries [kv_heads, group, head_dim]."""
        size, count = self._pool.layout.block_size, len(row.blocks)
        places = row.choice.choose(layer, q, row.rule.budget(count), row.rule.sink, row.rule.recent)
        rows, kv_heads = len(places), len(q)
        heads = torch.arange(kv_heads, device=q.device).repeat_interleave(rows // kv_heads)[:, None]
        chosen = self._pool.tensor[row.blocks[places], layer, :, heads]
        q = q.reshape(rows, -1, q.shape[-1])
        # The block that is being written comes last, so that what is not written yet is cut off.
        tokens = (places.shape[1] - 1) * size + row.stop - (count - 1) * size
        key, value = (chosen[:, :, plane].flatten(1, 2)[:, :tokens] for plane in (0, 1))
        if not row.choice.wants_mass:
            return functional.scaled_dot_product_attention(q, key, value).flatten(0, 1)
        weights = torch.softmax((q @ key.transpose(1, 2)).float() * q.shape[-1] ** -0.5, dim=-1)
        mass = functional.pad(weights.sum(1), (0, places.shape[1] * size - tokens))
        row.choice.learn(layer, places, mass.view(len(mass), -1, size).sum(2))
        return (weights.to(value.dtype) @ value).flatten(0, 1)


def _first_and_latest(span: AttentionSpan, rule: SparseRule, size: int) -> _Shown:
    """The span without the blocks between its first and its latest ones."""
    blocks = span.block_ids[: -(-span.stop // size)]
    budget = rule.budget(len(blocks))
    first, left_out = min(rule.sink, budget), len(blocks) - budget
    shown = (*blocks[:first], *blocks[first + left_out :])
    return _Shown(shown, span.start - left_out * size, span.stop - left_out * size)
