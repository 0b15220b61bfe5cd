"""KVTierCache: a transformers cache that begins with what the tiers know of a prompt, and gives back the rest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvtier.config import load_config
from kvtier.connector.prefixes import HeldPrefix, Prefixes
from kvtier.errors import ConfigError, ModelError, RequestError
from kvtier.keys import Chain, Namespace
from kvtier.layout import Layout
from kvtier.store import PutResult, TieredStore
from kvtier.store import open_store as open_tiers
from kvtier_transformers.blocks import PrefixTensors, raw_blocks
from kvtier_transformers.evidence import check_tokens
from kvtier_transformers.identity import namespace_of
from kvtier_transformers.layers import PrefixLayer
from kvtier_transformers.prompts import Prompt, Tokens, token_rows
from kvtier_transformers.shapes import CachedShape, cache_argument, cached_shape

__all__ = ["BLOCK_SIZE", "KVTierCache", "open_store"]

BLOCK_SIZE = 16

# Of raw blocks, gathered from the layers at a time.
_PIECE_BYTES = 64 << 20


def open_store(tiering: Mapping[str, Any], model: PreTrainedModel, block_size: int = BLOCK_SIZE) -> TieredStore:
    """Open the tiers of a `tiering` section, checked against this model's blocks. The caller closes the store.

    Args:
        tiering: for instance `{"host": {"capacity": "4GiB"}, "nvme": {"path": "/var/cache/kvtier"}}`.
        model: whose KV it is to hold; other models may share it.
        block_size: tokens per block.

    Raises:
        CapacityError: a tier is too small for one block.
        ConfigError: a setting is unknown, malformed or contradicts another one, or tiering is off.
        ModelError: see `KVTierCache.from_prompt`.
    """
    settings = load_config({"tiering": dict(tiering)}).config.tiering
    layout = cached_shape(model).layout(block_size)
    store = open_tiers(settings, block_bytes=layout.block_bytes(), layout=layout)
    if store is None:
        raise ConfigError("tiering.host is none: there is nothing to keep KV in; give host a capacity")
    return store


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a cache's blocks are kept, and what they are. Copies of a cache share it.

    Args:
        model: that fills the cache.
        identify: says whose blocks the model computes now.
        namespace: whose blocks it computed when the cache was made.
        blocks: of that namespace.
        shape: of the layers.
        layout: of the blocks.
        argument: by which the model takes a cache.
    """

    model: PreTrainedModel
    identify: Callable[[], Namespace]
    namespace: Namespace
    blocks: Prefixes
    shape: CachedShape
    layout: Layout
    argument: str

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def chain(self, tokens: NDArray[np.int64]) -> list[bytes]:
        """Names of the full blocks of a sequence."""
        chain = Chain(self.layout.block_size)
        chain.extend(tokens)
        return chain.keys

    def check(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Refuse what another model has cached, or this one while it was another."""
        _check_mode(self.model)
        self.shape.check(layers)
        if self.identify() != self.namespace:
            raise ModelError(
                "the model's weights or settings have changed since the cache was made, and its KV may be of both: "
                "make a new cache after each change"
            )


class KVTierCache(Cache):
    """A `Cache` for one `generate`, or one conversation, of one prompt or a batch of prompts.

        cache = KVTierCache.from_prompt(store, input_ids, model)
        output = model.generate(input_ids, cache=cache, max_new_tokens=64)
        cache.commit(output)

    It is made by `from_prompt` and used as a `DynamicCache` is. Not thread-safe; caches share stores freely.

    Invariants:
        1. At most all but the last of a prompt's tokens are restored: something is left to compute logits from.
        2. A leased block is copied once, into the layers; no lease outlives `from_prompt`.
        3. `commit` stores nothing whose tokens are not known: after beams were reordered that is the prompts alone.
           What it is told of tokens it checks (`evidence`).
        4. What was computed on top of a lossy block is stored as not exact.

    Attributes:
        restored: tokens of each prompt that were found in the tiers and need not be computed.
    """

    def __init__(self, home: _Home, prompt: Prompt) -> None:
        super().__init__(layers=[PrefixLayer() for _ in home.shape.devices])
        self.restored = (0,) * len(prompt.rows)
        self._home = home
        self._prompt = prompt
        self._exact = [True] * len(prompt.rows)
        self._sources = list(range(len(prompt.rows)))  # the prompt of each row, before rows are repeated
        self._reordered = False

    @classmethod
    def from_prompt(
        cls,
        store: TieredStore,
        input_ids: Tensor,
        model: PreTrainedModel,
        *,
        attention_mask: Tensor | None = None,
        block_size: int = BLOCK_SIZE,
        fingerprint: str | None = None,
        salt: str = "",
        accept_lossy: bool | None = None,
    ) -> Self:
        """A cache that begins with the longest prefix of `input_ids` that is in the tiers.

        A batch begins with as many slots as all of its rows can fill, padding included.

        Args:
            store: stays the caller's.
            input_ids: [rows, slots], as `generate` gets them, padded on the left.
            model: a decoder with full attention in all layers, in evaluation mode.
            attention_mask: as `generate` gets it: [rows, slots], zeros for padding. None: there is no padding.
            block_size: tokens per block; caches find each other's blocks only where it is the same.
            fingerprint: names the weights, which are hashed at their first use otherwise (`weights_fingerprint`).
            salt: separates users who must not share prefixes.
            accept_lossy: whether KV that was stored in a lossy format will do; None: as the store's options say.

        Raises:
            ConfigError: a tier's format cannot take this model's KV.
            FormatMismatch: block_size is no number of tokens.
            ModelError: sliding windows, recurrent states, indexed attention, or KV that cannot be reused for another
                reason; the message names it.
            RequestError: input_ids or attention_mask cannot be used, or the model is wrapped or in training mode.
        """
        _check_mode(model)
        shape = cached_shape(model)
        layout = shape.layout(block_size)
        prompt = Prompt.of(input_ids, attention_mask, model)
        identify = partial(namespace_of, model, layout, fingerprint, salt)
        namespace = identify()
        blocks = Prefixes(store, namespace, layout)
        cache = cls(_Home(model, identify, namespace, blocks, shape, layout, cache_argument(model)), prompt)
        cache._restore(accept_lossy=accept_lossy)
        return cache

    @property
    def kwargs(self) -> dict[str, "KVTierCache"]:
        """The cache under the name that the model takes it by: `model.generate(input_ids, **cache.kwargs)`."""
        return {self._home.argument: self}

    # ---- the way up

    def _restore(self, *, accept_lossy: bool | None) -> None:
        held: list[HeldPrefix] = []
        try:
            for row in range(len(self._prompt.rows)):
                chain = self._home.chain(self._prompt.tokens(row))
                held.append(self._home.blocks.hold(chain, lossy=accept_lossy))
            self._fill(held)
        finally:
            for prefix in held:
                prefix.close()

    def _fill(self, held: Sequence[HeldPrefix]) -> None:
        """Restore as many slots as all rows can fill from what they hold."""
        slots = self._common([len(prefix) for prefix in held])
        needed = [self._blocks(row, slots) for row in range(len(held))]
        slots = self._common([prefix.fetch(blocks) for prefix, blocks in zip(held, needed, strict=True)], slots)
        if all(slots <= padding for padding in self._prompt.padding):
            return
        tensors = PrefixTensors(self._home.shape, self._home.layout, self._prompt.padding, slots)
        for row, prefix in enumerate(held):
            slots = self._write(tensors, row, prefix, slots)
        self.restored = tuple(max(slots - padding, 0) for padding in self._prompt.padding)
        if not any(self.restored):
            return
        self._exact = [prefix.is_exact(self._blocks(row, slots)) for row, prefix in enumerate(held)]
        for layer, (keys, values) in zip(self._own, tensors.layers(slots), strict=True):
            layer.restore(keys, values, self._prompt.slots)

    def _common(self, blocks: Sequence[int], most: int | None = None) -> int:
        """Leading slots that all rows can fill, where each has so many blocks."""
        size, last = self._home.layout.block_size, self._prompt.slots - 1
        filled = [padding + found * size for padding, found in zip(self._prompt.padding, blocks, strict=True)]
        return min(*filled, last, last if most is None else most)

    def _blocks(self, row: int, slots: int) -> int:
        """Blocks of a row in so many leading slots, the last one perhaps in part."""
        return max(-(-(slots - self._prompt.padding[row]) // self._home.layout.block_size), 0)

    def _write(self, tensors: PrefixTensors, row: int, held: HeldPrefix, slots: int) -> int:
        """Copy a row's blocks into place; returns the slots that are filled, fewer where a block cannot be decoded."""
        size = self._home.layout.block_size
        for block in range(self._blocks(row, slots)):
            begin = self._prompt.padding[row] + block * size
            raw = held.raw(block)
            if raw is None:
                return begin
            tensors.write(row, begin, raw, min(size, slots - begin))
        return slots

    # ---- the way down

    def commit(self, token_ids: Tokens | None = None) -> PutResult:
        """Store the full blocks of prompts and generated output that the tiers lack.

        Args:
            token_ids: what `generate` returned, [rows, tokens], padded as the prompts were, or rows of different
                lengths; None: the prompts alone. A token that was never fed to the model (the last one, as a rule) has
                no KV yet. After beam search the cache's rows are not the output's: the prompts alone are stored.

        Returns:
            Blocks newly stored, blocks that were there, blocks that no tier took. When it returns they are in host;
            `store.flush()` waits for the tiers below.

        Raises:
            ModelError: the model has cached in another dtype or shape than it was asked about, or has changed since.
            RequestError: there are not as many sequences as rows, or one of them is not what the model was fed.
        """
        layers = self._states()
        if not layers:
            return PutResult(0, 0, 0)
        self._home.check(layers)
        # A forward that was interrupted has reached some of the layers only.
        slots = min(keys.shape[-2] for keys, _ in layers)
        rows = []
        for row, source, tokens in self._sequences(token_ids, self._rows(len(layers[0][0]))):
            begin = self._prompt.padding[source]
            own = [(keys[row, :, begin:], values[row, :, begin:]) for keys, values in layers]
            rows.append((own, source, self._checked(row, source, own[0], tokens[begin:slots])))
        results = [PutResult(0, 0, 0), *(self._put(*row) for row in rows)]
        return PutResult(*map(sum, zip(*results, strict=True)))

    @property
    def _own(self) -> list[PrefixLayer]:
        return cast("list[PrefixLayer]", self.layers)

    def _states(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer; empty where some have none, or other rows than the first one."""
        found = [states for layer in self._own if (states := layer.states()) is not None]
        whole = len(found) == len(self.layers) and len({len(keys) for keys, _ in found}) == 1
        return found if whole else []

    def _rows(self, rows: int) -> list[int]:
        """Which prompt each of the cache's rows continues."""
        prompts = len(self._sources)
        if rows % prompts:
            raise RequestError(f"{rows} rows in a cache of {prompts} prompts: expected as many for each of them")
        return [source for source in self._sources for _ in range(rows // prompts)]

    def _sequences(self, token_ids: Tokens | None, sources: Sequence[int]) -> list[tuple[int, int, NDArray[np.int64]]]:
        """Rows whose tokens are known, the prompt that each continues, and its slots' ids."""
        if token_ids is None or self._reordered:
            return [(sources.index(source), source, self._prompt.rows[source]) for source in sorted(set(sources))]
        sequences = token_rows(token_ids)
        if len(sequences) != len(sources):
            raise RequestError(f"{len(sequences)} sequences for {len(sources)} rows of the cache: expected as many")
        return list(zip(range(len(sources)), sources, sequences, strict=True))

    def _checked(self, row: int, source: int, first: tuple[Tensor, Tensor], tokens: NDArray[np.int64]) -> list[bytes]:
        """Names of the full blocks of a row, whose first layer has to be that of these tokens."""
        home = self._home
        chain = home.chain(tokens)
        if home.blocks.known(chain, exact=self._exact[source]) < len(chain):
            check_tokens(home.model, home.argument, first, tokens[: len(chain) * home.layout.block_size], row)
        return chain

    def _put(self, layers: Sequence[tuple[Tensor, Tensor]], source: int, chain: Sequence[bytes]) -> PutResult:
        """Store what is not there of one row, without its padding."""
        home, exact = self._home, self._exact[source]
        first = home.blocks.known(chain, exact=exact)
        result = PutResult(0, first, 0)
        step = max(_PIECE_BYTES // home.layout.block_bytes(), 1)
        for start in range(first, len(chain), step):
            count = min(step, len(chain) - start)
            raw = raw_blocks(home.shape, home.layout, layers, start, count)
            put = home.blocks.put(chain, start, raw, exact=exact)
            result = PutResult(*map(sum, zip(result, put, strict=True)))
        return result

    # ---- what generation does to rows

    def activate_past_recording(self) -> None:
        """Assisted decoding begins, which feeds the whole prompt whatever the cache holds: it is computed anew."""
        if any(layer.untouched for layer in self._own):
            self.reset()
        super().activate_past_recording()  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """Forget all KV. The tiers keep theirs."""
        super().reset()  # type: ignore[no-untyped-call]
        self.restored = (0,) * len(self._prompt.rows)
        self._exact = [True] * len(self._prompt.rows)
        self._sources, self._reordered = list(range(len(self._prompt.rows))), False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i continues what row beam_idx[i] was; which tokens that is, is not told."""
        self._select(beam_idx)
        self._reordered = True
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._select(indices)
        super().batch_select_indices(indices)

    def _select(self, indices: Tensor) -> None:
        layers = self._states()
        if layers:
            rows = np.array(self._rows(len(layers[0][0])))
            self._sources = rows[indices.cpu().numpy()].tolist()


def _check_mode(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel):
        raise RequestError(
            f"model is a {type(model).__name__}: expected one of transformers' own; of a model that is wrapped "
            "(compiled, adapted, parallel) pass the one inside, and generate with either"
        )
    if model.training:
        raise RequestError("the model is in training mode, in which its KV is random: call model.eval()")
    if model.can_generate() and model.generation_config.use_cache is False:
        raise RequestError(
            "the model's generation_config.use_cache is False: each step would feed the whole sequence again, on top of "
            "what is cached; set it to True"
        )
