"""vLLM's side of benchmarks/adapters.py: one engine in this process, calls and answers as lines of JSON.

PYTHON benchmarks/adapters_peer.py '{"side": "kvtier", "model": "DIR", "directory": "DIR", …}'

Afterwards every line in is `[method, arguments…]` of `Engine`, every line out what it returned.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before vLLM is imported: all in this process, all cores for the work, nothing fetched or sent, keys that are stable.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_NUM_OF_RESERVED_CPU="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    LMCACHE_TRACK_USAGE="false",
    LMCACHE_LOG_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
    DO_NOT_TRACK="1",
    PYTHONHASHSEED="0",
)

from adapters_sides import SIDES
from harness import forget_pages

_PR_SET_PDEATHSIG = 1
BLOCK_SIZE = 32  # the smallest that has vLLM's fast kernel


class Engine:
    """One vLLM with one connector.

    Args:
        side: a key of `SIDES`.
        model: directory.
        directory: where the connector keeps blocks.
        dtype: of weights and KV.
        blocks: device blocks; None: as many as 1 GiB holds.
        max_len: tokens of a request.
    """

    def __init__(
        self,
        side: str,
        model: str,
        directory: str,
        dtype: str = "bfloat16",
        blocks: int | None = None,
        max_len: int = 2560,
    ) -> None:
        self._side = SIDES[side](directory)
        from vllm import LLM  # noqa: PLC0415  after the environment is set
        from vllm.config import KVTransferConfig  # noqa: PLC0415

        config = self._side.config()
        if config is not None:
            # By it the parent finds what vLLM leaves in /dev/shm when it is killed.
            config["engine_id"] = f"adapters-{os.getpid()}"
        self._llm = LLM(
            model,
            dtype=dtype,
            enforce_eager=True,
            block_size=BLOCK_SIZE,
            max_model_len=max_len,
            max_num_seqs=8,
            max_num_batched_tokens=4096,
            num_gpu_blocks_override=blocks,
            kv_transfer_config=None if config is None else KVTransferConfig(**config),
            seed=0,
        )
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._directory = Path(directory)
        self._requests = 0
        self._spent: dict[str, int] = {}

    def generate(self, prompts: list[list[int]], output: int) -> dict[str, Any]:
        """All at once: seconds, CPU seconds, tokens and cached tokens of each prompt, bytes loaded, steps."""
        before = self._side.loaded_bytes(self._core)
        cpu, began = time.process_time(), time.perf_counter()
        names = self._submit(prompts, output)
        tokens: dict[str, list[int]] = {}
        cached: dict[str, int] = {}
        steps = 0
        while self._llm.llm_engine.has_unfinished_requests():
            for each in self._llm.llm_engine.step():
                tokens[each.request_id] = list(each.outputs[0].token_ids)
                cached[each.request_id] = each.num_cached_tokens or 0
            steps += 1
        return {
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - cpu,
            "tokens": [tokens[name] for name in names],
            "cached": [cached[name] for name in names],
            "loaded_bytes": self._side.loaded_bytes(self._core) - before,
            "steps": steps,
        }

    def _submit(self, prompts: list[list[int]], output: int) -> list[str]:
        from vllm import SamplingParams  # noqa: PLC0415

        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        names = [str(self._requests + at) for at in range(len(prompts))]
        self._requests += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return names

    def settle(self) -> None:
        """Wait until what was stored is where it will stay."""
        self._side.settle(self._core)

    def forget(self, place: str) -> None:
        """`device`: its prefix cache. `host`: host memory, too. `pages`: the page cache, of the connector's files."""
        self.settle()
        if place == "device":
            self._llm.reset_prefix_cache()
        else:
            self._side.forget_host(self._llm)
        if place == "pages":
            forget_pages(self._directory)

    def block_bytes(self) -> int:
        """KV of one block, all layers."""
        config = self._core.scheduler.kv_cache_config
        return int(config.kv_cache_tensors[0].size // config.num_blocks)

    def hook(self, prompts: list[list[int]], steps: int) -> float:
        """Microseconds of this thread in the connector's methods per step, of so many in which all prompts decode."""
        self.settle()
        spent = self._spent = self._spent or _watched(self._core)
        self._submit(prompts, steps + 8)
        # All prompts are computed and their blocks saved.
        for _ in range(6):
            self._llm.llm_engine.step()
        spent["ns"] = spent["calls"] = 0
        for _ in range(steps):
            self._llm.llm_engine.step()
        found = spent["ns"] - spent["calls"] * _clock_ns()
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()
        return found / steps / 1000


def _clock_ns() -> float:
    """What the clock itself adds to a method that does nothing."""
    spent = {"ns": 0, "calls": 0, "depth": 0}
    nothing = _counted(lambda: None, spent)
    for _ in range(1000):
        nothing()
    return spent["ns"] / 1000


def _watched(core: Any) -> dict[str, int]:
    """Count, from now on, what both halves of the connector take of the calling thread's CPU."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group  # noqa: PLC0415
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1  # noqa: PLC0415

    spent = {"ns": 0, "calls": 0, "depth": 0}
    if not has_kv_transfer_group():
        return spent
    names = [name for name, each in vars(KVConnectorBase_V1).items() if callable(each) and not name.startswith("_")]
    for connector in (core.scheduler.connector, get_kv_transfer_group()):
        for name in names:
            method = getattr(connector, name)
            if method.__self__ is connector:
                setattr(connector, name, _counted(method, spent))
    return spent


def _counted(method: Callable[..., Any], spent: dict[str, int]) -> Callable[..., Any]:
    """What it calls of the same connector is counted once."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if spent["depth"]:
            return method(*args, **kwargs)
        spent["depth"] = 1
        spent["calls"] += 1
        began = time.thread_time_ns()
        try:
            return method(*args, **kwargs)
        finally:
            spent["ns"] += time.thread_time_ns() - began
            spent["depth"] = 0

    return call


def main() -> None:
    # A parent that dies leaves nobody behind that is stopped for ever.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # vLLM logs to standard output, which is the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = Engine(**json.loads(sys.argv[1]))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        method, *args = json.loads(line)
        print(json.dumps(getattr(engine, method)(*args)), file=answers, flush=True)
    engine._llm.llm_engine.engine_core.shutdown()  # noqa: SLF001  what is under way is finished
    os._exit(0)


if __name__ == "__main__":
    main()
