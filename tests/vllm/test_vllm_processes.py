"""Engines that end, are killed, or consist of several processes, over one directory."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_llama import BLOCK_BYTES
from vllm_process import Process
from vllm_world import BLOCK, tiers, tokens_of, whole_blocks

from kvtier.nvme.inspection import look

# Each process imports vLLM, and several of them do on a machine of two cores.
pytestmark = pytest.mark.timeout(400)

PROMPTS = [tokens_of(600 + each, 10 * BLOCK + 5) for each in range(24)]
SEPARATE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""vLLM's default: front end, scheduler and workers are processes."""


def sound(directory: Path) -> bool:
    """What `kvtier inspect --verify` says."""
    command = [Path(sys.executable).with_name("kvtier"), "inspect", directory, "--verify", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    report = json.loads(ended.stdout)
    assert ended.returncode == (0 if report["sound"] else 1)
    return bool(report["sound"])


def blocks_in(directory: Path) -> int:
    if not (directory / "META.json").exists():
        return 0
    with look(directory) as found:
        return int(found.stats()["blocks"])


def wait_for_blocks(directory: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while blocks_in(directory) < count:
        assert time.monotonic() < deadline, f"{blocks_in(directory)} blocks in {directory} after a minute"
        time.sleep(0.01)


def test_killed_in_mid_write_and_restarted(tiny, tmp_path, reference):
    directory = tmp_path / "nvme"
    expected = reference(PROMPTS, 8)
    with Process(model=str(tiny), tiering=tiers(directory)) as first:
        first.ask("tokens", PROMPTS)
        wait_for_blocks(directory, 40)
        first.kill()
    written = blocks_in(directory)
    assert sound(directory)
    with Process(model=str(tiny), tiering=tiers(directory)) as second:
        answers, loaded = second.call("loading", PROMPTS)
        assert answers == expected
        assert written // 2 < loaded["nvme"] <= written
        second.close()
    assert sound(directory)


def test_scheduler_and_worker_in_processes_of_their_own(tiny, tmp_path, reference):
    directory = tmp_path / "nvme"
    prompts = PROMPTS[:4]
    expected = reference(prompts, 8)
    with Process(model=str(tiny), tiering=tiers(directory), environment=SEPARATE) as first:
        assert first.call("tokens", prompts) == expected
        assert first.call("tokens", PROMPTS[4:5]) == reference(PROMPTS[4:5], 8)  # while it steps, saves come to an end
        first.call("forget")
        before = first.call("metric", "vllm:kvtier_loaded_bytes", tier="host")
        assert first.call("tokens", prompts) == expected
        loaded = first.call("metric", "vllm:kvtier_loaded_bytes", tier="host") - before
        assert loaded == whole_blocks(prompts) * BLOCK_BYTES
        first.close()
    assert sound(directory)
    with Process(model=str(tiny), tiering=tiers(directory)) as second:
        assert second.call("loading", prompts) == [expected, {"nvme": whole_blocks(prompts)}]


def test_two_workers_have_blocks_of_their_own(tiny, tmp_path, reference):
    directory = tmp_path / "nvme"
    prompts = PROMPTS[:3]
    expected = reference(prompts, 8)
    with Process(model=str(tiny), tiering=tiers(directory)) as single:
        single.call("tokens", prompts)
        single.close()
    with Process(model=str(tiny), tiering=tiers(directory), environment=SEPARATE, tensor_parallel_size=2) as double:
        assert double.call("tokens", prompts) == expected
        assert double.call("metric", "vllm:kvtier_loaded_bytes") == 0
        assert double.call("tokens", PROMPTS[4:5]) == reference(PROMPTS[4:5], 8)
        double.call("forget")
        assert double.call("tokens", prompts) == expected
        assert double.call("metric", "vllm:kvtier_loaded_bytes", tier="host") == whole_blocks(prompts) * BLOCK_BYTES
        double.close()
    assert sound(directory)
