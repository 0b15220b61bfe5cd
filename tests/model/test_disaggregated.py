"""Prefill and decode in two processes, on the real model: fp32 greedy output is transformers', whatever happens."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import until

from kvtier import SamplingParams
from kvtier.disaggregated import DisaggregatedLLM, HandoverOptions, PrefilledLLM
from kvtier.disaggregated.handover import Handover
from kvtier.engine import RequestOutput
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import ConfigError

pytestmark = pytest.mark.model

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
NAMES = ("batch", "other", "order", "abort", "corrupt", "killed")
LENGTH = 150
TOKENS = 4
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
OPTIONS = HandoverOptions(patience=60)


@pytest.fixture(scope="module")
def prompts(default_model: Path) -> dict[str, list[int]]:
    """One for each purpose, no two with a common block."""
    tokens = Tokenizer.from_directory(default_model).encode(TEXT)
    found = {name: tokens[at * LENGTH : (at + 1) * LENGTH] for at, name in enumerate(NAMES)}
    return found | {"short": tokens[50:90], "long": tokens[-400:]}


@pytest.fixture(scope="module")
def reference(default_model: Path, prompts: dict[str, list[int]]) -> dict[str, tuple[int, ...]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    outputs = {name: model.generate(torch.tensor([prompt]), **options)[0] for name, prompt in prompts.items()}
    return {name: tuple(ids[len(prompts[name]) :].tolist()) for name, ids in outputs.items()}


@pytest.fixture(scope="module")
def llm(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DisaggregatedLLM]:
    # Room for two prompts of LENGTH tokens, and for fewer than 400 tokens.
    nvme = {"segment_size": "8MiB", "min_free": 0}
    with DisaggregatedLLM(
        default_model,
        directory=tmp_path_factory.mktemp("shared") / "kv",
        capacity="16MiB",
        prefill={"num_blocks": 64, "token_budget": 16},
        decode={"num_blocks": 64},
        config={"model": {"dtype": "float32"}, "tiering": {"host": {"capacity": "128MiB"}, "nvme": nvme}},
        options=OPTIONS,
        prefill_threads=1,
    ) as llm:
        yield llm


class Watched:
    """The next handover of an engine. Its prefill process is stopped as soon as its first blocks have arrived."""

    def __init__(self, llm: DisaggregatedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handover: Handover | None = None
        self.keys: Sequence[bytes] = ()
        self.arrived = 0
        self.pid = llm.prefill_process.pid
        self._receiver = llm.llm.receiver
        self._begin, self._prefetch = self._receiver.begin, self._receiver.prefetch
        monkeypatch.setattr(self._receiver, "begin", self.begin)
        monkeypatch.setattr(self._receiver, "prefetch", self.prefetch)
        self.at_first: Callable[[], Any] = lambda: os.kill(self.pid, signal.SIGSTOP)

    def begin(self, *arguments: Any) -> Any:
        reception = self._begin(*arguments)
        self.handover = reception.handover
        return reception

    def prefetch(self, keys: Sequence[bytes], owner: str, start: int, stop: int) -> int:
        if not self.arrived:
            self.at_first()
        self.keys, self.arrived = keys, stop
        return self._prefetch(keys, owner, start, stop)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


async def complete(llm: DisaggregatedLLM, prompt: list[int]) -> RequestOutput:
    async for output in llm.agenerate(prompt, GREEDY):
        last = output
    return last


async def until_async(condition: Callable[[], Any]) -> None:
    await asyncio.to_thread(until, condition, 60.0)


def endings(llm: DisaggregatedLLM, ending: str) -> float:
    return llm.store.metrics.value("handovers_total", ending=ending)


def test_an_engine_of_another_dtype_is_refused(default_model: Path, llm: DisaggregatedLLM) -> None:
    with pytest.raises(ConfigError, match=r"numerics is .* in prefill and .* in decode"):
        PrefilledLLM(
            default_model,
            prefill=Path(llm._sockets.name) / "prefill",
            tiering={"nvme": {"path": str(llm.llm.config.tiering.nvme.path) + "-2", "capacity": "8MiB", "min_free": 0}},
            config={"model": {"dtype": "bfloat16"}},
            num_blocks=8,
        )


def test_output_is_that_of_one_engine_and_kv_comes_from_the_other(
    llm: DisaggregatedLLM, prompts: dict[str, list[int]], reference: dict[str, tuple[int, ...]]
) -> None:
    assert llm.prefill_process.pid == llm.llm.receiver.client.peer_pid != os.getpid()
    names = ["batch", "short", "other"]
    outputs = dict(zip(names, llm.generate([prompts[name] for name in names], GREEDY), strict=True))
    assert {name: output.token_ids for name, output in outputs.items()} == {name: reference[name] for name in names}
    blocks = (LENGTH - 1) // 16
    for name in ("batch", "other"):
        assert outputs[name].metrics.loaded_tokens == blocks * 16
        assert outputs[name].metrics.computed_tokens == LENGTH - blocks * 16
        assert 0 < outputs[name].metrics.ttft < 100
    # Not worth the way.
    assert outputs["short"].metrics.computed_tokens == len(prompts["short"])
    assert endings(llm, "finished") == 2
    assert llm.store.metrics.value("handed_blocks_total") == 2 * blocks
    # What is there already is not asked for again.
    assert llm.generate([prompts["batch"]], GREEDY)[0].token_ids == reference["batch"]
    assert endings(llm, "finished") == 2


def test_the_first_blocks_are_in_host_before_the_last_chunk_is_computed(
    llm: DisaggregatedLLM,
    prompts: dict[str, list[int]],
    reference: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(llm, monkeypatch)

    async def scenario() -> RequestOutput:
        task = asyncio.create_task(complete(llm, prompts["order"]))
        try:
            # The other process stands still from here on.
            await until_async(lambda: watched.arrived)
            await until_async(lambda: all(llm.store.held(watched.keys[: watched.arrived], exact=True)))
            assert 0 < watched.arrived < watched.handover.total
            assert not watched.handover.computed
            assert not watched.handover.future.done()
        finally:
            watched.go_on()
        return await task

    output = asyncio.run(scenario())
    assert output.token_ids == reference["order"]
    assert watched.handover.computed
    assert output.metrics.loaded_tokens == (LENGTH - 1) // 16 * 16


def test_an_aborted_request_is_not_prefilled_any_further(
    llm: DisaggregatedLLM,
    prompts: dict[str, list[int]],
    reference: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(llm, monkeypatch)

    async def scenario() -> None:
        task = asyncio.create_task(complete(llm, prompts["abort"]))
        try:
            await until_async(lambda: watched.arrived)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until_async(watched.handover.future.done)
        finally:
            watched.go_on()
        assert watched.handover.future.result().ending == "cancelled"

    asyncio.run(scenario())
    client = llm.llm.receiver.client
    until(lambda: client.peer_jobs == 0)
    monkeypatch.undo()
    # The other engine is free again, and what it had done is found.
    assert llm.generate([prompts["abort"]], GREEDY)[0].token_ids == reference["abort"]
    stats = llm.llm.stats()
    assert stats.free_blocks == stats.num_blocks


def test_blocks_that_are_damaged_on_their_way_are_computed(
    llm: DisaggregatedLLM,
    prompts: dict[str, list[int]],
    reference: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(llm, monkeypatch)

    def damage() -> None:
        os.kill(watched.pid, signal.SIGSTOP)
        for segment in (llm.llm.config.tiering.nvme.path).glob("seg*"):
            data = bytearray(segment.read_bytes())
            data[::64] = bytes(byte ^ 1 for byte in data[::64])
            with segment.open("r+b") as file:
                file.write(data)
        watched.go_on()

    watched.at_first = damage
    output = llm.generate([prompts["corrupt"]], GREEDY)[0]
    assert output.token_ids == reference["corrupt"]
    assert llm.store.metrics.value("corrupt_blocks_total", tier="nvme") > 0
    assert output.metrics.computed_tokens > LENGTH % 16


def test_a_prompt_that_the_directory_has_no_room_for(
    llm: DisaggregatedLLM, prompts: dict[str, list[int]], reference: dict[str, tuple[int, ...]]
) -> None:
    before = endings(llm, "finished")
    output = llm.generate([prompts["long"]], GREEDY)[0]
    assert output.token_ids == reference["long"]
    assert endings(llm, "finished") == before + 1
    assert output.metrics.computed_tokens > 32


def test_a_killed_process_costs_time_only(
    llm: DisaggregatedLLM,
    prompts: dict[str, list[int]],
    reference: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(llm, monkeypatch)
    watched.at_first = lambda: os.kill(watched.pid, signal.SIGKILL)
    output = llm.generate([prompts["killed"]], GREEDY)[0]
    assert output.token_ids == reference["killed"]
    assert endings(llm, "lost") == 1
    assert watched.handover.blocks < watched.handover.total
    assert not watched.handover.computed
    monkeypatch.undo()

    until(lambda: not llm.llm.receiver.client.connected)
    # The first token is another one: nothing of it is there, nor is anybody to ask for it.
    alone = llm.generate([[1, *prompts["killed"][1:]]], GREEDY)[0]
    assert alone.metrics.computed_tokens == LENGTH
    assert (endings(llm, "lost"), endings(llm, "away")) == (1, 1)

    # Another process takes its place.
    until(lambda: llm.llm.receiver.client.connected, seconds=120)
    assert llm.llm.receiver.client.peer_pid == llm.prefill_process.pid != watched.pid
    until(lambda: llm.store.metrics.value("prefill_restarts_total") == 1)
    handed = llm.generate([[2, *prompts["killed"][1:]]], GREEDY)[0]
    assert handed.metrics.loaded_tokens == (LENGTH - 1) // 16 * 16
    assert endings(llm, "lost") == 1
