"""PrefilledLLM and DisaggregatedLLM: prompts are prefilled by another engine, and decoded by this one.

    from kvtier.disaggregated import DisaggregatedLLM

    with DisaggregatedLLM(directory="/dev/shm/kv", prefill={"token_budget": 1024}) as llm:
        print(llm.generate(long_prompt).text)

DistServe (Zhong et al., arXiv:2401.09670) and Splitwise (Patel et al., arXiv:2311.18677) separate the two phases, so
that a long prompt does not delay the tokens of those that are being decoded; Mooncake (Qin et al., arXiv:2407.00079)
hands the KV over through a store, while prefill still runs.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

from prometheus_client import Counter

from kvtier.api import AsyncLLM, Prompt
from kvtier.config import load_config
from kvtier.disaggregated.identity import Side
from kvtier.disaggregated.process import PrefillProcess, PrefillSupervisor
from kvtier.disaggregated.receiving import HandoverOptions, Receiver, Reception
from kvtier.engine import RequestOutput, SamplingParams
from kvtier.engine.models import LoadedModel
from kvtier.engine.models.catalog import cache_dir, fetch_default_model
from kvtier.errors import RequestError
from kvtier.hints import RequestHints
from kvtier.store import TieredStore

__all__ = ["DisaggregatedLLM", "PrefilledLLM"]


class PrefilledLLM(AsyncLLM):
    """An `AsyncLLM` whose long prompts are computed by a prefill engine, as far as there is one.

    A request that is handed over waits, outside of the engine's queue, until its prompt's blocks are in the shared
    directory; its engine then loads them and computes what is left: the last tokens, or all that did not come. So its
    output is the one of a single engine, whatever becomes of the peer.

    Args:
        model: see `LLM`.
        prefill: the peer's socket.
        options: what is handed over, and for how long it is waited for.
        tiering: with the same `nvme.path` as the peer's.
        config: any further sections.
        engine: settings of the `engine` section.

    Raises:
        ConfigError: a setting is wrong, or the peer computes other KV than this engine needs.
        TierUnavailable: nobody answers at the socket.
        ModelError, CapacityError: see `LLM`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        prefill: Path,
        options: HandoverOptions | None = None,
        tiering: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        super().__init__(model, tiering=tiering, config=config, **engine)
        try:
            self._receiver = self._connect(prefill, options or HandoverOptions())
        except BaseException:
            super().close()
            raise

    def _connect(self, prefill: Path, options: HandoverOptions) -> Receiver:
        return Receiver(Side.of(self), prefill, options)

    @property
    def receiver(self) -> Receiver:
        """The connection to the prefill engine, and what came over it."""
        return self._receiver

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, hints: RequestHints | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `AsyncLLM.generate`. Cancelling the consumer cancels the prefill, too."""
        tokens, chosen = self._stack.encode(prompt), self._stack.params(params)
        return self._handed(tokens, chosen, super().generate(tokens, chosen, hints=hints))

    async def _handed(
        self, tokens: list[int], params: SamplingParams, stream: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        arrival = time.perf_counter()
        reception = self._begin(tokens, params)
        try:
            if reception is not None:
                await reception.ended()
            async with aclosing(stream):
                async for output in stream:
                    if reception is not None:
                        reception.close()  # its KV is on the device
                    yield replace(output, metrics=replace(output.metrics, arrival=arrival))
        finally:
            if reception is not None:
                reception.close()

    def _begin(self, tokens: list[int], params: SamplingParams) -> Reception | None:
        try:
            valid = [index(token) for token in tokens]
        except TypeError:
            return None  # the engine says what is wrong with it
        if not valid or min(valid) < 0 or max(valid) >= self.model.config.vocab or len(valid) >= self.max_model_len:
            return None
        return self._receiver.begin(valid, params)

    def close(self) -> None:
        """End the connection, then as `AsyncLLM.close`. Idempotent."""
        self._receiver.close()
        super().close()


class _DecodeLLM(PrefilledLLM):
    """The decode half of two engines that are loaded at the same time.

    Args:
        process: the other half.
        socket, options, config: see `PrefilledLLM`.
    """

    def __init__(
        self, process: PrefillSupervisor, socket: Path, options: HandoverOptions | None, config: Mapping[str, Any]
    ) -> None:
        self._process = process
        super().__init__(prefill=socket, options=options, config=config)

    def _connect(self, prefill: Path, options: HandoverOptions) -> Receiver:
        self._process.wait_ready()
        return super()._connect(prefill, options)


class DisaggregatedLLM:
    """Two engines: one in a process of its own, which only prefills, and one in this process, which decodes.

    Each has its own device pool and host tier; KV goes from one to the other through the NVMe tier's format in a shared
    directory, block by block while prefill still runs. In `/dev/shm` that is a copy in memory.

    A prefill process that dies is started again; until it is up, prompts are computed here.

    Args:
        model: see `LLM`; None for the default model.
        directory: shared by both, made if absent; what is there is found again by the next one.
        capacity: of the directory.
        prefill: settings of the prefill engine's `engine` section.
        decode: settings of the decode engine's `engine` section.
        config: any further sections, for both.
        options: what is handed over, and for how long it is waited for.
        prefill_threads: threads of the prefill process's tensor operations; None: as the environment says.

    Raises:
        ConfigError: a setting is unknown, malformed or contradicts another one.
        TierUnavailable: the prefill process could not be started.
        ModelError, CapacityError: see `LLM`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        directory: str | Path,
        capacity: str | int = "8GiB",
        prefill: Mapping[str, Any] | None = None,
        decode: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        options: HandoverOptions | None = None,
        prefill_threads: int | None = None,
    ) -> None:
        shared = _settings(model, Path(directory), capacity, config or {})
        self._sockets = tempfile.TemporaryDirectory(prefix="kvtier-")
        socket = Path(self._sockets.name) / "prefill"
        start = partial(PrefillProcess, socket, _with_engine(shared, prefill), prefill_threads)
        self._process = PrefillSupervisor(start)
        try:
            self._llm = _DecodeLLM(self._process, socket, options, _with_engine(shared, decode))
        except BaseException:
            self._end_process()
            raise
        registry = self._llm.receiver.registry
        self._process.restarted = Counter(
            "kvtier_prefill_restarts", "Prefill processes that were started again", registry=registry
        ).inc

    @property
    def llm(self) -> PrefilledLLM:
        """The decode engine."""
        return self._llm

    @property
    def store(self) -> TieredStore | None:
        """The decode engine's tiers."""
        return self._llm.store

    @property
    def model(self) -> LoadedModel:
        """Weights, configuration and tokenizer."""
        return self._llm.model

    @property
    def prefill_process(self) -> PrefillProcess:
        """The other process, or the one that took its place."""
        return self._process.process

    def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, hints: RequestHints | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, as `AsyncLLM.generate` does."""
        return self._llm.generate(prompt, params, hints=hints)

    @overload
    def generate(
        self, prompts: str, params: SamplingParams | None = None, *, hints: RequestHints | None = None
    ) -> RequestOutput: ...

    @overload
    def generate(
        self, prompts: list[Prompt], params: SamplingParams | None = None, *, hints: RequestHints | None = None
    ) -> list[RequestOutput]: ...

    def generate(
        self, prompts: str | list[Prompt], params: SamplingParams | None = None, *, hints: RequestHints | None = None
    ) -> RequestOutput | list[RequestOutput]:
        """Complete prompts, continuously batched; a single text gives a single output. Not from within an event loop.

        Args:
            prompts: one text, or a list of texts and of token-id lists.
            params: for all of them.
            hints: for all of them.

        Raises:
            RequestError: a prompt is empty or too long, or a parameter is out of range.
        """
        batch = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(batch, list):
            raise RequestError(f"prompts {batch!r}: expected a text, or a list of texts and token-id lists")
        outputs = asyncio.run(self._complete(batch, params, hints))
        return outputs[0] if isinstance(prompts, str) else outputs

    async def _complete(
        self, prompts: Sequence[Prompt], params: SamplingParams | None, hints: RequestHints | None
    ) -> list[RequestOutput]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_last(self.agenerate(prompt, params, hints=hints))) for prompt in prompts]
        return [task.result() for task in tasks]

    def close(self) -> None:
        """End the decode engine, then the prefill process. Idempotent."""
        self._llm.close()
        self._end_process()

    def _end_process(self) -> None:
        self._process.close()
        self._sockets.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _last(stream: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    """The end of each sequence of a request; the first one, with the others."""
    ended: dict[int, RequestOutput] = {}
    async for output in stream:
        if output.finish_reason is not None:
            ended[output.index] = output
    first, *others = (ended[at] for at in sorted(ended))
    return replace(first, others=tuple(others))


def _settings(
    model: str | Path | None, directory: Path, capacity: str | int, config: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Sections that both engines have in common."""
    sections = {name: dict(values) for name, values in config.items()}
    nvme = {"path": str(directory.absolute()), "capacity": capacity, "write": "through"}
    # What was handed over was worth computing elsewhere: that it may be cheaper to compute here is no reason to.
    sections["tiering"] = {"recompute_gate": False, **sections.get("tiering", {})}
    sections["tiering"]["nvme"] = {**sections["tiering"].get("nvme", {}), **nvme}
    source = str(model) if model is not None else load_config(sections).config.model.path
    # Fetched once, before two processes want it at the same time.
    source = source or str(fetch_default_model(cache_dir(), lambda _stage, _fraction: None))
    sections["model"] = {**sections.get("model", {}), "path": str(Path(source).absolute())}
    return sections


def _with_engine(sections: Mapping[str, dict[str, Any]], engine: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    return {**sections, "engine": {**sections.get("engine", {}), **(engine or {})}}
