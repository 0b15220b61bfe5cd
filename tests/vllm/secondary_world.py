"""vLLM's native tiering on a CPU with kvtier's tier below its host tier; as a script, one run of a fresh process."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiny_llama import BLOCK_BYTES
from vllm import LLM
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_world import BLOCK, Vllm, tokens_of, whole_blocks

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from vllm_native import transfer_config

HOST_BYTES = 64 << 20
PROMPTS = [tokens_of(seed, count) for seed, count in enumerate((100, 257, 330))]
BYTES = whole_blocks(PROMPTS) * BLOCK_BYTES
"""Of what can be loaded for them."""


def nvme(directory: Path) -> dict[str, Any]:
    """Settings of a tier there, with less staging than the prompts need."""
    return {"nvme": {"path": str(directory), "capacity": 64 << 20, "min_free": 0}, "host": {"capacity": 1 << 20}}


class Tiered(Vllm):
    """An engine with vLLM's own host tier and one secondary tier.

    Args:
        model: directory.
        tier: settings of `KVTierSecondaryTier`.
        host_bytes: of vLLM's host tier.
    """

    def __init__(self, model: Path | str, tier: dict[str, Any], host_bytes: int = HOST_BYTES) -> None:
        named = {"type": "KVTierSecondaryTier", "module_path": "kvtier_vllm.secondary", **tier}
        self.llm = LLM(
            str(model),
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            block_size=BLOCK,
            max_model_len=512,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            num_gpu_blocks_override=64,
            kv_transfer_config=KVTransferConfig(**transfer_config(host_bytes, named)),
            seed=0,
        )
        self.engine = self.llm.llm_engine
        self._submitted = 0
        self.answers = {}

    @property
    def tier(self) -> Any:
        """The `KVTierSecondaryTier`."""
        (tier,) = self.connector.scheduler.manager.secondary_tiers
        return tier

    def settle(self) -> None:
        """Let everything that was computed reach every tier."""
        while self.scheduler.has_requests():
            self.step()
        self.tier.drain_jobs()
        self.step()

    def forget_hosts(self) -> None:
        """Leave what was computed in the tiers below, nowhere above."""
        self.settle()
        assert self.llm.reset_prefix_cache(reset_connector=True)
        self.tier.store.clear("host")

    def read_blocks(self, name: str = "nvme") -> int:
        """Blocks of vLLM's that were read and verified by a tier so far."""
        return int(self.tier.store.metrics.value("read_bytes_total", tier=name)) // self.tier.block_size_bytes

    def given(self, prompts: Sequence[Sequence[int]], tokens: int = 8) -> tuple[list[list[int]], int]:
        """Tokens, and the bytes that were copied into device blocks meanwhile."""
        worker = get_kv_transfer_group().connector_worker.worker
        before = worker.loaded_bytes
        found = self.tokens(prompts, tokens)
        return found, worker.loaded_bytes - before


def fresh(model: Path, tier: dict[str, Any], prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """`Tiered.given` of a process of its own."""
    job = json.dumps([str(model), tier, prompts])
    done = subprocess.run([sys.executable, __file__], input=job, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    tokens, nbytes = json.loads(done.stdout.splitlines()[-1])
    return tokens, nbytes


def main() -> None:
    model, tier, prompts = json.load(sys.stdin)
    with Tiered(model, tier) as vllm:
        given = vllm.given(prompts)
        vllm.settle()
    print(json.dumps(given), flush=True)
    # The engine has ended; what Python would do after it takes vLLM's modules seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
