"""SGLang's own host pools and its controller's own code over KVTierStorage: nothing of ours stands in for anything."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.sglang.conftest import python
from tests.sglang_world import MHA_LAYOUTS, MLA_LAYOUTS

DEFAULT = Path(__file__).parents[2] / "build" / "sglang" / "deps"


@pytest.fixture(scope="module")
def found(sglang, tmp_path_factory):
    """What `pool_process` says; skips where what SGLang's pools import is not there."""
    dependencies = Path(os.environ.get("KVTIER_SGLANG_DEPS", DEFAULT))
    if not (dependencies / "orjson").is_dir():
        pytest.skip(f"nothing that SGLang imports in {dependencies}: run make test-sglang")
    place = tmp_path_factory.mktemp("pools")
    process = python(
        *("tests.sglang.pool_process", str(sglang.path), str(dependencies), str(place)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, error = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, error
    return json.loads(out.splitlines()[-1])


CASES = [f"mha {layout}" for layout in MHA_LAYOUTS] + [f"mla {layout}" for layout in MLA_LAYOUTS]


@pytest.mark.parametrize("case", CASES)
def test_pages_that_sglang_backs_up_and_prefetches_come_back(found, case):
    assert {name: good for name, good in found.items() if name.startswith(f"{case} ") and "fake" not in name} == {
        f"{case} v1 bare": 5,
        f"{case} v1 chained": 5,
        f"{case} generic bare": 5,
    }


@pytest.mark.parametrize("case", CASES)
def test_our_own_pools_are_like_sglangs(found, case):
    assert found[f"{case} fake"] is True
