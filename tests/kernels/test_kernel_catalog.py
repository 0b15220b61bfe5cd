"""Kernels compile for real devices, without one. In a process of its own: this one interprets kernels."""

import json
import os
import subprocess
import sys

import pytest

from kvtier.errors import ConfigError
from kvtier.gpu.kernels.catalog import compile_all, entries

# One of everything that is written differently; the whole catalog is for `benchmarks/gpu.py --dry-run`.
CHOSEN = [
    "decode.split.bfloat16.128x8",
    "decode.fp8.128x8",
    "decode.int4r.128x8",
    "decode.split.bfloat16.96x1",
    "prefill.bfloat16.128x8",
    "prefill.bfloat16.192x8",
    "mass.bfloat16.128x8",
    "write.bfloat16.128x8",
    "write.fp8.128x8",
    "write.int4r.128x8",
    "latent.bfloat16.128",
    "product.bfloat16.16",
    "product.bfloat16.512",
    "gather",
    "bounds",
]

PROGRAM = """
import json, sys
from kvtier.gpu.kernels.catalog import compile_all
chosen = set(json.loads(sys.argv[2]))
for one in compile_all(int(sys.argv[1]), chosen.__contains__):
    print(json.dumps([one.name, one.shared, one.ptx]))
"""


def compiled(arch, names, cache):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", PROGRAM, str(arch), json.dumps(names)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


# A compiler on a busy machine.
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("arch", "shared_limit"), [(80, 163 << 10), (90, 227 << 10)])
def test_compiles_for(arch, shared_limit, tmp_path):
    found = compiled(arch, CHOSEN, tmp_path)
    assert {name.rpartition(".")[0] for name, _, _ in found} == set(CHOSEN)
    for name, shared, ptx in found:
        assert f".target sm_{arch}" in ptx, name
        assert shared <= shared_limit, name
    code = {name: ptx for name, _, ptx in found}
    assert "mma" in code["decode.split.bfloat16.128x8.decode"]
    assert ".bf16" in code["prefill.bfloat16.128x8.prefill"]
    assert "mma" in code["product.bfloat16.512.product"]


def test_names_are_unique_and_the_chosen_are_there():
    names = [entry.name for entry in entries()]
    assert len(names) == len(set(names))
    assert set(CHOSEN) <= set(names)


def test_every_entry_prepares_launches():
    for entry in entries():
        for launch in entry.prepare():
            given = {*launch.arguments, *launch.constants}
            assert given == set(launch.kernel.arg_names), entry.name
            assert min(launch.grid) > 0, entry.name


def test_an_interpreting_process_refuses():
    with pytest.raises(ConfigError, match="TRITON_INTERPRET is set"):
        compile_all(90, "gather".__eq__)
