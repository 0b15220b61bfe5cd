"""One vLLM engine in this process, with kvtier's connector or without one, and what can be seen of both."""

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from tiny_llama import BLOCK_BYTES, VOCABULARY
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, has_kv_transfer_group
from vllm.lora.request import LoRARequest

from kvtier.hooks import Step, TransferPlan
from kvtier.store import TieredStore

BLOCK = 32  # tokens; the least that vLLM's CPU attention takes in fp32
SETTLE_SECONDS = 30.0
_NOWHERE = 9999  # a region that no worker maps


def tiers(nvme: Path | None = None, *, host: str = "64MiB", **own: Any) -> dict[str, Any]:
    """Settings of the connector: host, NVMe where a directory is given, patience, no gate that would rather compute."""
    below = (
        {}
        if nvme is None
        else {"nvme": {"path": str(nvme), "capacity": "64MiB", "segment_size": "4MiB", "min_free": 0}}
    )
    return {"host": {"capacity": host}, "recompute_gate": False, "load_deadline": 60, **below, **own}


def whole_blocks(prompts: Iterable[Sequence[int]]) -> int:
    """Blocks that can be loaded for these prompts: one token each is left to compute."""
    return sum((len(prompt) - 1) // BLOCK for prompt in prompts)


def tokens_of(seed: int, count: int, vocabulary: int = VOCABULARY) -> list[int]:
    """A prompt of `count` random tokens, equal for equal seeds."""
    return np.random.default_rng(seed).integers(2, vocabulary, count).tolist()


class Answer(NamedTuple):
    """tokens: generated. cached: prompt tokens that were not computed. reason: stop, length, abort or error."""

    tokens: list[int]
    cached: int
    reason: str | None


def transfer_config(tiering: Mapping[str, Any], policy: str) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="KVTierConnector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config=dict(tiering),
    )


class Vllm:
    """An engine in fp32, greedy, stepped by hand. A context manager; only one may live in a process at a time.

    Args:
        model: directory.
        tiering: `kv_connector_extra_config`; None: no connector.
        policy: `kv_load_failure_policy`.
        blocks: of the device pool, vLLM's null block included.
        options: of vLLM's engine.
    """

    def __init__(
        self,
        model: str,
        tiering: Mapping[str, Any] | None = None,
        *,
        policy: str = "recompute",
        blocks: int = 64,
        **options: Any,
    ) -> None:
        assert not has_kv_transfer_group(), "an engine with a connector is alive in this process"
        defaults = {
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "block_size": BLOCK,
            "max_model_len": 512,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 512,
            "disable_log_stats": False,
            "seed": 0,
        }
        transfer = None if tiering is None else transfer_config(tiering, policy)
        try:
            self.llm = LLM(
                str(model), num_gpu_blocks_override=blocks, kv_transfer_config=transfer, **(defaults | options)
            )
        except BaseException:
            # vLLM leaves its half-made worker behind.
            ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()
            raise
        self.engine = self.llm.llm_engine
        self._submitted = 0
        self.answers: dict[str, Answer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine. What it left to the collector must be gone before another one begins."""
        self.engine.engine_core.shutdown()
        del self.llm, self.engine
        gc.collect()

    # ---- requests

    def submit(
        self, prompt: Sequence[int], tokens: int = 8, *, salt: str | None = None, lora: LoRARequest | None = None
    ) -> str:
        """Queue a request; `answers[id]` grows as `engine.step` is called."""
        name = str(self._submitted)
        self._submitted += 1
        salted = {} if salt is None else {"cache_salt": salt}
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": list(prompt), **salted}, params, lora_request=lora)
        return name

    def step(self) -> None:
        for output in self.engine.step():
            done = output.outputs[0]
            self.answers[output.request_id] = Answer(
                list(done.token_ids), output.num_cached_tokens or 0, done.finish_reason
            )

    def run(self) -> None:
        """Step until every request has ended."""
        while self.engine.has_unfinished_requests():
            self.step()

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int = 8, **request: Any) -> list[Answer]:
        """All prompts at once."""
        names = [self.submit(prompt, tokens, **request) for prompt in prompts]
        self.run()
        return [self.answers[name] for name in names]

    def tokens(self, prompts: Sequence[Sequence[int]], tokens: int = 8, **request: Any) -> list[list[int]]:
        return [answer.tokens for answer in self.generate(prompts, tokens, **request)]

    def alone(self, prompts: Sequence[Sequence[int]], tokens: int = 8) -> list[list[int]]:
        """Each prompt by itself, from an empty device."""
        found = []
        for prompt in prompts:
            self.forget()
            found += self.tokens([prompt], tokens)
        return found

    def abort(self, names: Sequence[str]) -> None:
        self.engine.abort_request(list(names))

    def within_next_step(self, act: Callable[[], None]) -> None:
        """Act when the next step has run and the scheduler does not know yet what came of it: aborts are taken then."""
        scheduler, update = self.scheduler, self.scheduler.update_from_output

        def late(*arguments: Any) -> Any:
            scheduler.update_from_output = update
            act()
            return update(*arguments)

        scheduler.update_from_output = late

    def spoil_next_load(self, block: int) -> list[int]:
        """The memory of one block of the next load is gone; jobs that this befell."""
        hook, spoiled = self.connector._scheduler.hook, list[int]()
        plan = hook.plan

        def spoiling(step: Step) -> TransferPlan:
            made = plan(step)
            if spoiled or not made.loads:
                return made
            job, loads = next(iter(made.loads.items()))
            bad = loads[block]._replace(span=loads[block].span._replace(region=_NOWHERE))
            spoiled.append(job)
            return replace(made, loads={**made.loads, job: (*loads[:block], bad, *loads[block + 1 :])})

        hook.plan = spoiling
        return spoiled

    def forget(self) -> None:
        """Empty the device's prefix cache."""
        assert self.llm.reset_prefix_cache()

    # ---- what can be seen

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    @property
    def connector(self) -> Any:
        """The scheduler's side."""
        return self.scheduler.connector

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def all_free(self) -> bool:
        """Whether no request and no connector holds a device block."""
        return bool(self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1)

    @property
    def store(self) -> TieredStore:
        return self.connector._scheduler.store

    def value(self, name: str, **labels: str) -> int:
        """Of a metric of the store; see `Metrics.value`."""
        return int(self.store.metrics.value(name, **labels))

    def loaded(self) -> dict[str, int]:
        """Blocks' bytes copied into the device so far, by the tier that had them; tiers that gave none are left out."""
        sizes = {tier.name: self.value("loaded_bytes_total", tier=tier.name) for tier in self.store.tiers}
        return {name: size for name, size in sizes.items() if size}

    def loading(self, prompts: Sequence[Sequence[int]], tokens: int = 8, **request: Any) -> tuple[Any, dict[str, int]]:
        """What `tokens` gives, and the blocks loaded meanwhile, by tier."""
        before = self.loaded()
        found = self.tokens(prompts, tokens, **request)
        after = self.loaded()
        gained = {name: size - before.get(name, 0) for name, size in after.items()}
        assert all(size % BLOCK_BYTES == 0 for size in gained.values())
        return found, {name: size // BLOCK_BYTES for name, size in gained.items() if size}

    def metric(self, name: str, **labels: str) -> float:
        """The sum of vLLM's own Prometheus samples of a name that have these labels; also from other processes."""
        samples = [metric for metric in self.llm.get_metrics() if metric.name == name]
        return sum(each.value for each in samples if labels.items() <= each.labels.items())

    def settle(self) -> None:
        """Let everything that was computed reach every tier."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.scheduler.has_requests():
            assert time.monotonic() < deadline, "the connector keeps the engine stepping"
            self.step()
        self.store.flush()

    def only(self, tier: str) -> None:
        """Leave what was computed in this tier and those below it, nowhere above."""
        self.settle()
        self.forget()
        for above in self.store.tiers:
            if above.name == tier:
                return
            self.store.clear(above.name)

    def check_at_rest(self) -> None:
        """With no request left: no device block, lease, pin, staging slot or waiting write is held by anybody."""
        self.settle()
        assert self.all_free
        own = self.store.stats()["store"]
        assert {name: own[name] for name in ("leases", "pins", "waiting_bytes")} == {
            "leases": 0,
            "pins": 0,
            "waiting_bytes": 0,
        }
