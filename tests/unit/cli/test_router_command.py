"""`kvtier router` as a process: options, errors, SIGTERM."""

import os
import re
import signal
import subprocess
import sys

import httpx
import pytest
from patience import PATIENCE

from kvtier.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "router.engines: expected at least one URL"),
        (["--engine", "nonsense"], "'nonsense': expected a URL"),
        (["--engine", "http://a", "--events", "tcp://a", "--events", "tcp://b"], "router.events: 2 for 1 engines"),
        (["--engine", "http://a", "--api-key-file", "/nowhere"], "router.api_key_file /nowhere"),
        (["--engine", "http://a", "--tokenizer", "/nowhere"], "/nowhere"),
        (["--engine", "http://a", "--host", "203.0.113.1"], "router.host = '203.0.113.1'"),
    ],
)
def test_what_is_wrong_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVTIER_CONFIG", raising=False)
    assert main(["router", "--port", "0", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_it_serves_until_it_is_told_to_end() -> None:
    start = "import sys; from kvtier.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "router", "--engine", "http://127.0.0.1:9", "--port", "0"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"KVTIER_ROUTER__HEALTH_INTERVAL": "0.1"}
    )
    try:
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "it ended by itself"
            found = re.search(r"http://127.0.0.1:\d+", line) if "listening" in line else None
        with httpx.Client(base_url=found[0], timeout=PATIENCE, trust_env=False, verify=False) as client:
            assert client.get("/healthz").status_code == 200
            assert client.get("/readyz").json() == {"status": "no engine", "engines": 0}
            answer = client.post("/v1/completions", json={"prompt": "a"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.communicate()
