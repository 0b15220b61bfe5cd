"""SIGKILL at any instant: what is left serves no wrong byte and leaks no page.

Children write self-identifying blocks without end, replace, remove and evict them; the parent kills them at a random
instant, reopens the directory and checks every record. As a script: `test_nvme_kill.py --rounds 50`.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.testing.blocks import chain_refs, content
from kvtier.tiers import BlockRef, Handle, Status

_CAPACITY = 8 << 20
_OPTIONS = NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0)
_CHAINS = 40
_SIZES = (4096, 10_000, 16_384, 65_536)
_FAULTS = ("leaked_pages", "overlaps", "wrong_sums", "lost_rows", "corrupt", "dead_holds")


def _size(ref: BlockRef) -> int:
    return _SIZES[(ref.key[0] + ref.exact) % len(_SIZES)]


def _put(tier: NvmeTier, refs: list[BlockRef]) -> None:
    results = tier.reserve(refs, [_size(ref) for ref in refs], ["raw"] * len(refs), "child")
    handles = [result for result in results if isinstance(result, Handle)]
    statuses = tier.write([(handle, content(handle.ref, handle.nbytes)) for handle in handles]).wait(30).statuses
    tier.commit([handle for handle, status in zip(handles, statuses, strict=True) if status is Status.OK])
    tier.abort(handles)


def _work_forever(path: Path, seed: int) -> None:
    """A child's life: put, replace, read, remove and flush at random, over more blocks than fit."""
    dice = random.Random(seed)
    with_lossy = [[chain_refs(24, seed=chain, exact=exact) for exact in (False, True)] for chain in range(_CHAINS)]
    tier = NvmeTier(path, _CAPACITY, _OPTIONS)
    print("ready", flush=True)
    while True:
        refs = dice.choice(dice.choice(with_lossy))[: dice.randint(1, 24)]
        _put(tier, refs)
        handles = tier.acquire([ref.key for ref in refs], "child").wait(30).handles
        if dice.random() < 0.2:
            tier.remove([dice.choice(refs).key])
        tier.release(handles)
        if dice.random() < 0.02:
            tier.flush()


def _kill_round(path: Path, writers: int, dice: random.Random) -> Counter[str]:
    """Let children write, kill them all, reopen; returns counts of blocks verified, wrong, and faults."""
    command = [sys.executable, __file__, "--child", str(path), "--seed"]
    children = [
        subprocess.Popen([*command, str(dice.randrange(1 << 30))], stdout=subprocess.PIPE, text=True)
        for _ in range(writers)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        time.sleep(dice.uniform(0.0, 0.5))
        assert all(child.poll() is None for child in children)
    finally:
        for child in children:
            child.send_signal(signal.SIGKILL)
            child.communicate()
    return _inspect(path)


def _inspect(path: Path) -> Counter[str]:
    tier = NvmeTier(path, _CAPACITY, _OPTIONS)
    found: Counter[str] = Counter()
    try:
        for chain in range(_CHAINS):
            for ref in chain_refs(24, seed=chain):
                for handle in tier.acquire([ref.key], "parent").wait(30).handles:
                    buffer = memoryview(bytearray(handle.nbytes))
                    status = tier.read([(handle, buffer)]).wait(30).statuses[0]
                    expected = content(handle.ref, _size(handle.ref))
                    found["verified"] += 1
                    found["wrong"] += status is not Status.OK or buffer != expected
                    tier.release([handle])
        report = tier.check(verify=True)
        found["wrong"] += report["blocks"] != found["verified"]
        found["faults"] += sum(report[fault] for fault in _FAULTS)
        found["leaked"] += report["leaked_pages"]
    finally:
        tier.close()
    return found


def _run(path: Path, rounds: int, seed: int) -> Counter[str]:
    dice = random.Random(seed)
    total: Counter[str] = Counter()
    for number in range(rounds):
        total += _kill_round(path, 1 + number % 2, dice)
    return total


def test_killed_writers_leave_no_wrong_byte_and_leak_nothing(tmp_path: Path) -> None:
    """Every other round has two writers on the same directory; each round goes on where the last one was killed."""
    total = _run(tmp_path / "nvme", 10, seed=random.randrange(1 << 30))
    assert total["verified"] > 100
    assert (total["wrong"], total["faults"], total["leaked"]) == (0, 0, 0)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        _work_forever(arguments.child, arguments.seed)
    with tempfile.TemporaryDirectory() as directory:
        total = _run(Path(directory) / "nvme", arguments.rounds, arguments.seed)
    print(
        f"rounds {arguments.rounds}, blocks verified {total['verified']}, wrong {total['wrong']}, "
        f"leaked {total['leaked']}, other faults {total['faults']}"
    )
    sys.exit(bool(total["wrong"] or total["leaked"] or total["faults"]))


if __name__ == "__main__":
    _main()
