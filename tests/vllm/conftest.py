"""vLLM on the CPU: its environment, the models that it runs, and what it answers without a connector.

Collects nothing where vLLM is not installed; `make test-vllm` makes an environment that has it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

# Before vLLM is imported: engine, scheduler and worker in this process, one thread each, nothing fetched or sent.
os.environ.update(
    HF_HUB_OFFLINE="1",
    DO_NOT_TRACK="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_NUM_OF_RESERVED_CPU="0",
)

_vllm = find_spec("vllm")
# Where it is missing, this very folder is found in its place.
if _vllm is None or _vllm.origin is None:
    collect_ignore_glob = ["*"]

from tiny_llama import save_adapter, save_llama  # noqa: E402
from vllm_process import Process  # noqa: E402

Reference = Callable[..., list[list[int]]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers and two KV heads, random weights."""
    return save_llama(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="session")
def tiny_adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two LoRA adapters for `tiny`."""
    return [save_adapter(tmp_path_factory.mktemp("adapter"), seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="session")
def reference(tiny: Path) -> Iterator[Reference]:
    """reference(prompts, tokens): what `tiny` answers without connector, each prompt alone, nothing cached."""
    known: dict[tuple[int, ...], list[int]] = {}
    with Process(model=str(tiny)) as process:

        def answers(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
            keys = [(tokens, *prompt) for prompt in prompts]
            new = list(dict.fromkeys(key for key in keys if key not in known))
            if new:
                told = process.call("alone", [list(key[1:]) for key in new], tokens)
                known.update(zip(new, told, strict=True))
            return [known[key] for key in keys]

        yield answers
