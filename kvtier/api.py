"""The Python API: `LLM` and `AsyncLLM` join the bundled engine, its adapter and a tiered store.

from kvtier import LLM, SamplingParams

with LLM(tiering={"host": {"capacity": "1GiB"}, "nvme": {"path": "/var/cache/kvtier", "capacity": "20GiB"}}) as llm:
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=16)).text)
"""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, overload

import torch
from kvtier_engine import Connection, connect, namespace_of

from kvtier.config import Config, EngineSettings, EventsSettings, load_config
from kvtier.engine import AsyncEngine, Engine, EngineOptions, EngineStats, RequestOutput, SamplingParams
from kvtier.engine.core import kv_layout, pool_size
from kvtier.engine.draft_model import DraftModel, check_vocabulary
from kvtier.engine.drafting import PromptLookup, Proposer
from kvtier.engine.models import LoadedModel, load_model
from kvtier.engine.models.catalog import cache_dir, fetch_default_model
from kvtier.errors import ConfigError, KVTierError, RequestError
from kvtier.events import EventLog, require_events
from kvtier.events.mirror import Mirror
from kvtier.hints import RequestHints
from kvtier.layout import Layout
from kvtier.store import TieredStore, open_store

if TYPE_CHECKING:
    from kvtier.events.publisher import Publisher

__all__ = ["LLM", "AsyncLLM", "Prompt"]

_SETTLE_SECONDS = 5.0

_T = TypeVar("_T")

Prompt: TypeAlias = str | list[int]
"""Text, or token ids."""


class _Stack:
    """Model, engine and, where tiering is on, store and connection: built together, closed together."""

    def __init__(self, store: TieredStore | None, overrides: Mapping[str, Any]) -> None:
        if store is not None and "tiering" in overrides:
            raise ConfigError("store and tiering both given: a store brings its own tiers; drop one of them")
        self.config = load_config(overrides).config
        self.model = _load(self.config)
        self._owns_store = store is None
        options = EngineOptions.from_config(self.config.engine)
        # Before any tier is opened: an engine that cannot be made leaves no directory behind.
        pool_size(self.model, options)
        layout = kv_layout(self.model, options)
        log = None if self.config.events.endpoint is None else EventLog()
        largest = max(layout.block_bytes(group) for group in range(len(layout.groups)))
        self.store = store or open_store(self.config.tiering, block_bytes=largest, layout=layout, events=log)
        self.connection: Connection | None = None
        self.publisher: Publisher | None = None
        self.closed = False
        try:
            self.engine = self._engine(options, layout)
            self.publisher = self._publish(layout, self.config.events)
        except BaseException:
            self.close()
            raise

    def _engine(self, options: EngineOptions, layout: Layout) -> Engine:
        proposer = _proposer(self.config.engine, self.model, options)
        if self.store is None:
            return Engine(self.model, options, proposer=proposer)
        tiering = self.config.tiering
        self.connection = connect(
            self.store,
            self.model,
            layout,
            options.token_budget,
            recompute_gate=tiering.recompute_gate,
            copies="inclusive" if tiering.host is None else tiering.host.copies,
        )
        engine = Engine(self.model, options, (self.connection.scheduler, self.connection.worker), proposer)
        if unpinned := self.connection.worker.unpinned_regions:
            self.store.metrics.fallbacks.labels(self.store.host.name, "pinning").inc(unpinned)
        return engine

    def _publish(self, layout: Layout, settings: EventsSettings) -> "Publisher | None":
        """Say what is in which tier, if somebody is to hear it."""
        if settings.endpoint is None and settings.replay_endpoint is not None:
            raise ConfigError(
                f"events.replay_endpoint = {settings.replay_endpoint!r}: nothing is published that could be replayed; "
                "name events.endpoint, too"
            )
        if settings.endpoint is None:
            return None
        require_events()
        from kvtier.events.publisher import Publisher  # noqa: PLC0415  # pyzmq is optional

        log, registry = (None, None) if self.store is None else (self.store.events, self.store.metrics.registry)
        window = layout.groups[0].window if len(layout.groups) == 1 else None
        mirror = Mirror(layout.block_size, log, namespace_of(self.model, layout), window=window)
        publisher = Publisher(
            mirror,
            settings.endpoint,
            replay_endpoint=settings.replay_endpoint,
            topic=settings.topic,
            buffer_bytes=settings.buffer,
            queue=settings.queue,
            registry=registry,
        )
        self.engine.follow(mirror)
        return publisher

    def encode(self, prompt: Prompt) -> list[int]:
        return self.model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        tokenizer = self.model.tokenizer
        # The template writes the special tokens itself.
        return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)

    def params(self, params: SamplingParams | None) -> SamplingParams:
        """What a request runs with: the device's own cache follows the store's default about lossy KV, too."""
        chosen = SamplingParams() if params is None else params
        if not isinstance(chosen, SamplingParams):
            raise RequestError(f"params {chosen!r}: expected SamplingParams")
        if chosen.accept_lossy is not None or self.store is None or not self.store.options.accept_lossy:
            return chosen
        return replace(chosen, accept_lossy=True)

    def loaded_bytes(self) -> dict[str, int]:
        if self.store is None:
            return {}
        metrics = self.store.metrics
        return {tier.name: int(metrics.value("loaded_bytes_total", tier=tier.name)) for tier in self.store.tiers}

    def settle(self) -> None:
        """Let the saves under way reach the store; a hung tier is not waited for."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while not self.closed and self.engine.busy and time.monotonic() < deadline:
            self.engine.step()

    def close(self) -> None:
        self.closed = True
        if self.publisher is not None:
            self.publisher.close()
        if self.connection is not None:
            self.connection.close()
        if self.store is not None and self._owns_store:
            self.store.close()


def _load(config: Config) -> LoadedModel:
    settings = config.model
    source = settings.path or str(fetch_default_model(cache_dir(), lambda _stage, _fraction: None))
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device = 'cuda': no CUDA device is visible; use 'cpu' or 'auto'")
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    return load_model(source, dtype, device, settings.weights)


def _proposer(settings: EngineSettings, model: LoadedModel, options: EngineOptions) -> Proposer | None:
    if settings.speculative == "off":
        return None
    if settings.speculative == "prompt_lookup":
        return PromptLookup()
    draft = load_model(settings.speculative, model.model.dtype, model.model.device)
    check_vocabulary(model.config.vocab, draft.config.vocab)
    return DraftModel(draft.model, settings.draft_memory, options.block_size, options.token_budget)


def _overrides(
    model: str | Path | None,
    tiering: Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
    engine: Mapping[str, Any],
) -> dict[str, Any]:
    sections = dict(config or {}) | ({} if tiering is None else {"tiering": tiering})
    for section, values in sections.items():
        if not isinstance(values, Mapping):
            raise ConfigError(f"{section} = {values!r}: expected a mapping of settings")
    overrides: dict[str, Any] = {section: dict(values) for section, values in sections.items()}
    if model is not None:
        overrides.setdefault("model", {})["path"] = str(model)
    if engine:
        overrides.setdefault("engine", {}).update(engine)
    return overrides


def _each(name: str, given: _T | Sequence[_T | None] | None, one: type[_T], prompts: int) -> Sequence[_T | None]:
    """What was given for all prompts, or for each."""
    if given is None or isinstance(given, one):
        return [given] * prompts
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RequestError(f"{name} {given!r}: expected {one.__name__}, or a list of one for each prompt")
    if len(given) != prompts:
        raise RequestError(f"{len(given)} {name} for {prompts} prompts: give one for all, or one for each")
    return given


def _joined(outputs: Mapping[int, RequestOutput]) -> RequestOutput:
    first, *others = (outputs[index] for index in sorted(outputs))
    return replace(first, others=tuple(others))


class LLM:
    """A language model with a tiered KV cache, for use from one thread.

    Args:
        model: Hugging Face directory or GGUF file; None for the default model, fetched on first use.
        tiering: the `tiering` section of the configuration, for instance `{"host": {"capacity": "4GiB"}}`.
        store: a store to share instead; stays the caller's. Excludes `tiering`.
        config: any further sections, as nested mappings.
        engine: settings of the `engine` section, for instance `max_running=32`.

    Raises:
        ConfigError: a setting is unknown, malformed or contradicts another one.
        ModelError: the model cannot be loaded.
        CapacityError: a pool or tier is too small for one block.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tiering: Mapping[str, Any] | None = None,
        store: TieredStore | None = None,
        config: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        self._stack = _Stack(store, _overrides(model, tiering, config, engine))
        self._engine = self._stack.engine
        self._numbers = count(1)

    @property
    def store(self) -> TieredStore | None:
        """The tiers, or None where tiering is off."""
        return self._stack.store

    @property
    def engine(self) -> Engine:
        """The engine, for stepping it by hand."""
        return self._engine

    @property
    def model(self) -> LoadedModel:
        """Weights, configuration and tokenizer."""
        return self._stack.model

    @overload
    def generate(
        self, prompts: str, params: SamplingParams | None = None, *, hints: RequestHints | None = None
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        hints: RequestHints | Sequence[RequestHints | None] | None = None,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: str | list[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        hints: RequestHints | Sequence[RequestHints | None] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Complete prompts, continuously batched; a single text gives a single output.

        Args:
            prompts: one text, or a list of texts and of token-id lists.
            params: for all of them, or one for each.
            hints: what is known of their KV's future, for all of them or one for each; they never change an output.

        Raises:
            RequestError: a prompt is empty or too long, or a parameter is out of range. Nothing was generated.
        """
        batch = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(batch, list):
            raise RequestError(f"prompts {batch!r}: expected a text, or a list of texts and token-id lists")
        chosen = _each("params", params, SamplingParams, len(batch))
        known = _each("hints", hints, RequestHints, len(batch))
        outputs = self._run([self._stack.encode(prompt) for prompt in batch], chosen, known)
        return outputs[0] if isinstance(prompts, str) else outputs

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
        *,
        hints: RequestHints | None = None,
    ) -> RequestOutput:
        """Answer a conversation, written with the model's own chat template."""
        return self._run([self._stack.encode_chat(messages)], [params], [hints])[0]

    def _run(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams | None],
        hints: Sequence[RequestHints | None],
    ) -> list[RequestOutput]:
        if self._stack.closed:
            raise KVTierError("this LLM is closed; make a new one")
        chosen = [self._stack.params(one) for one in params]
        ids = [f"llm-{next(self._numbers)}" for _ in prompts]
        try:
            for request_id, tokens, own, known in zip(ids, prompts, chosen, hints, strict=True):
                self._engine.add(request_id, tokens, own, known)
            finished = self._drive({request_id: own.n for request_id, own in zip(ids, chosen, strict=True)})
        except BaseException:
            for request_id in ids:
                self._engine.abort(request_id)
            raise
        return [finished[request_id] for request_id in ids]

    def _drive(self, wanted: Mapping[str, int]) -> dict[str, RequestOutput]:
        """Step until all is done; of each request, the first of as many sequences as it wants, with the others."""
        finished: dict[str, dict[int, RequestOutput]] = {request_id: {} for request_id in wanted}
        # Goes on until the last blocks are on their way to the store, too.
        while self._engine.has_work or self._engine.busy:
            for output in self._engine.step():
                if output.error is not None and output.id in finished:
                    raise output.error
                if output.finish_reason is not None and output.id in finished:
                    finished[output.id][output.index] = output
        missing = [request_id for request_id, count in wanted.items() if len(finished[request_id]) < count]
        if missing:
            raise RequestError(f"requests {missing} ended without an output; this is a defect, please report it")
        return {request_id: _joined(outputs) for request_id, outputs in finished.items()}

    def loaded_bytes(self) -> dict[str, int]:
        """Bytes loaded into the device so far, by the tier in which they were found."""
        return self._stack.loaded_bytes()

    def clear_device_cache(self) -> None:
        """Forget all KV in device memory that no request uses; the tiers below keep theirs."""
        self._engine.clear_device_cache()

    def clear_tier(self, name: str | None) -> None:
        """Remove every block from one tier, or from all (None).

        Raises:
            ConfigError, BlocksRemain: see `TieredStore.clear`.
        """
        if self.store is not None:
            self.store.clear(name)

    def flush(self) -> None:
        """Wait until everything computed so far has reached the lowest tier."""
        if self.store is not None:
            self.store.flush()

    def close(self) -> None:
        """Let the last saves arrive, then let go of the model, the tiers and their threads. Idempotent."""
        self._stack.settle()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncLLM:
    """A language model with a tiered KV cache, for asyncio: many callers, one continuous batch.

    Takes what `LLM` takes.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tiering: Mapping[str, Any] | None = None,
        store: TieredStore | None = None,
        config: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        self._stack = _Stack(store, _overrides(model, tiering, config, engine))
        self._engine = AsyncEngine(self._stack.engine)

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self._stack.config

    @property
    def store(self) -> TieredStore | None:
        """The tiers, or None where tiering is off."""
        return self._stack.store

    @property
    def model(self) -> LoadedModel:
        """Weights, configuration and tokenizer."""
        return self._stack.model

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its output may have together."""
        return self._stack.engine.max_model_len

    def stats(self) -> EngineStats:
        """Gauges and counters of the engine; from any thread, the gauges may be of a step that is under way."""
        return self._stack.engine.stats()

    def loaded_bytes(self) -> dict[str, int]:
        """Bytes loaded into the device so far, by the tier in which they were found."""
        return self._stack.loaded_bytes()

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, written with the model's own chat template."""
        return self._stack.encode_chat(messages)

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, hints: RequestHints | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt: yields an output for each new piece of text. Cancelling the consumer aborts it."""
        return self._engine.generate(self._stack.encode(prompt), self._stack.params(params), hints)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
        *,
        hints: RequestHints | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, as `generate` does."""
        return self.generate(self._stack.encode_chat(messages), params, hints=hints)

    def close(self) -> None:
        """Abort what runs, end the engine's thread, close the tiers. Idempotent."""
        self._engine.close()
        self._stack.close()
