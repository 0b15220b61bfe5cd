"""The example for vLLM, where vLLM is installed (`make test-vllm`)."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

_vllm = find_spec("vllm")
pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(400),
    pytest.mark.skipif(_vllm is None or _vllm.origin is None, reason="vLLM is not installed: make test-vllm has it"),
]


def test_it_shows_what_it_says(default_model: Path) -> None:
    example = Path(__file__).parents[2] / "examples/vllm_offline.py"
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, example, default_model],
        env=environment,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"again: [1-9]\d* of \d+ prompt tokens were not computed\nanswers are the same", done.stdout)
