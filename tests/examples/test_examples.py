"""Every example runs as a user runs it, and shows what it says; what cannot run here has its settings checked."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvtier_sglang.settings import read_settings as read_sglang
from kvtier_vllm.settings import read_settings as read_vllm

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SGLANG = ROOT / "build/sglang"

# What takes the model as its argument -> what its output says.
SHOWN = {
    "agent_loop.py": r"alice, turn 1: 0 tokens loaded; open sessions: 1\n(.*\n)+bob, turn 3: .*open sessions: 0\n",
    "disaggregated.py": r"question 0: \d{3} tokens came from the other process",
    "offline_batch.py": r"second batch: .* [1-9]\d* loaded from host\nanswers are the same\n",
    "own_tier.py": r"found in heap: [1-9]\d* loaded",
    "quantized_tiers.py": r"from NVMe in int4r: [1-9]\d* tokens for who accepts lossy KV, 0 for who does not",
    "rag_hints.py": r"loaded of the documents after other work: \d+ tokens without hints, [1-9]\d* with them",
    "remote_tiers.py": r"Valkey: 0 .*\nS3: 0 .*\ndirectory: 0 .*",
    "transformers_cache.py": r"0 of \d+ tokens restored, .*\n[1-9]\d* of \d+ tokens restored",
    "chat_server.sh": r"Paris",
}
ELSEWHERE = {
    "shared_daemon.py": "tests/model/test_shared_daemon.py",
    "shared_document.py": "tests/model/test_demo.py",
    "own_format.py": "tests/conformance/test_example_conformance.py",
    "own_policy.py": "tests/conformance/test_example_conformance.py",
    "vllm_offline.py": "tests/examples/test_vllm_example.py",
    "Containerfile": "tests/unit/service/test_service_docs.py",
    "kvtier-cache.service": "tests/unit/service/test_service_docs.py",
}
HERE = {"mla_model.py", "rest_curl.sh", "openai_client.py", "vllm_serve.sh", "sglang_serve.sh", "sglang_kvtier.json"}
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def run(name: str, *arguments: object) -> str:
    interpreter = [] if name.endswith(".sh") else [sys.executable]
    command = [*interpreter, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.model
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SHOWN)
def test_it_shows_what_it_says(name: str, default_model: Path) -> None:
    assert re.search(SHOWN[name], run(name, default_model))


def test_latent_attention() -> None:
    lines = run("mla_model.py").splitlines()
    assert "the same answer" in lines[1]
    assert lines[1].startswith("raw    1280 bytes a token")


def test_rest_from_curl() -> None:
    output = run("rest_curl.sh")
    assert output.count('{"outcome":"stored"}') == 3
    assert "then the last one: 404" in output


@contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    command = [Path(sys.executable).parent / "kvtier", "serve", model, "--port", "0"]
    with log.open("w") as file:
        server = subprocess.Popen(command, env=ENVIRONMENT, stdout=file, stderr=file)
    try:
        found, deadline = None, time.monotonic() + 100
        while found is None:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
            found = re.search(r"http://[\d.]+:\d+", log.read_text())
        yield f"{found[0]}/v1"
    finally:
        server.kill()
        server.wait(30)


@pytest.mark.model
@pytest.mark.timeout(400)
def test_a_conversation_with_the_openai_client(default_model: Path, tmp_path: Path) -> None:
    with served(default_model, tmp_path / "log") as url:
        output = run("openai_client.py", url)
    cached = [int(number) for number in re.findall(r"\((\d+) of \d+ prompt tokens", output)]
    assert cached[0] == 0 < cached[1]


# ---- host engines: what of their command lines is kvtier's


def test_vllm_takes_the_settings() -> None:
    text = (EXAMPLES / "vllm_serve.sh").read_text()
    config = json.loads(re.search(r"--kv-transfer-config '(.*?)'", text, re.DOTALL)[1])
    extra = config.pop("kv_connector_extra_config")
    settings = read_vllm(extra, config["kv_load_failure_policy"])
    assert config == {"kv_connector": "KVTierConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    assert settings.tiering.nvme is not None
    assert settings.tiering.nvme.capacity == 200 << 30


def test_sglang_takes_the_settings() -> None:
    extra = json.loads((EXAMPLES / "sglang_kvtier.json").read_text())
    assert {extra[name] for name in ("module_path", "class_name")} == {"kvtier_sglang", "KVTierStorage"}
    # SGLang's own, which the plug-in never sees.
    assert extra.pop("prefetch_threshold") >= 1
    settings = read_sglang(extra)
    assert settings.tiering.nvme is not None
    assert settings.tiering.nvme.capacity == 200 << 30


def test_sglang_knows_the_flags() -> None:
    sources = list(SGLANG.glob("*/sglang/srt/arg_groups/field_order.py"))
    if not sources:
        pytest.skip("SGLang's wheel is not unpacked in build/sglang: make test-sglang fetches it")
    known = set(re.findall(r'"(\w+)"', sources[0].read_text()))
    flags = re.findall(r" --([a-z-]+)", (EXAMPLES / "sglang_serve.sh").read_text())
    assert len(flags) == 6
    assert {flag.replace("-", "_") for flag in flags} <= known


def test_scripts_are_sound() -> None:
    for script in EXAMPLES.glob("*.sh"):
        assert os.access(script, os.X_OK), script
        subprocess.run(["bash", "-n", script], check=True)


def test_none_is_forgotten() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    # An example is either run by a test, or does not exist.
    assert names <= SHOWN.keys() | HERE | ELSEWHERE.keys()
    index = (EXAMPLES / "README.md").read_text()
    assert [name for name in names if f"({name})" not in index] == []
    assert [test for name, test in ELSEWHERE.items() if name in names and not (ROOT / test).exists()] == []
