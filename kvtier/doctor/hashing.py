"""Do other processes give the same blocks the same names? If not, nothing that outlives a process is ever found."""

import os
import subprocess
import sys
from collections.abc import Iterator

from kvtier.doctor.findings import Finding, Subject, ok, problem
from kvtier.keys import KEY_SCHEME, Chain, Namespace, store_keys

__all__ = ["hashing", "sample_keys"]

_SEEDS = ("0", "4242")
_TOKENS = range(64)
_CODE = "from kvtier.doctor.hashing import sample_keys; print(sample_keys())"


def sample_keys() -> str:
    """Store keys of a fixed text in a fixed namespace, as hexadecimal digits."""
    chain = Chain(16, {1: b"extra"})
    chain.extend(_TOKENS)
    return b"".join(store_keys(chain.keys, Namespace("doctor", b"layout", salt="salt").mask())).hex()


def hashing(_: Subject) -> Iterator[Finding]:
    """Names blocks in fresh interpreters with unequal hash seeds, and compares."""
    own = sample_keys()
    for seed in _SEEDS:
        environment = os.environ | {"PYTHONHASHSEED": seed}
        child = subprocess.run(
            [sys.executable, "-c", _CODE], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        if child.returncode:
            said = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
            yield problem("hashing", f"a second process cannot name blocks: {said}", "repair the installation")
            return
        if child.stdout.strip() != own:
            yield problem(
                "hashing",
                f"with PYTHONHASHSEED={seed} the same tokens get other names: nothing is found after a restart",
                "make sure that every process runs the same release of kvtier",
            )
            return
    yield ok("hashing", f"{KEY_SCHEME}: equal names in processes with unequal hash seeds")
