"""SIGKILL at any instant: what is left serves no wrong byte and leaks no page.

Two writers put self-identifying blocks without end, replace, remove and evict them, while a reader compares what it
reads with what the key says. The parent kills a writer or all three at a random instant, reopens the directory, checks
every record, and lets the next round go on from there. As a script: `test_nvme_kill.py --rounds 200`.
"""

import argparse
import mmap
import random
import signal
import struct
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
_COUNTS = struct.Struct("<3Q")


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


def _read_forever(path: Path, seed: int, counts: Path) -> None:
    """The reader's life. Its counts, good, raced and wrong reads, lie in a file, so that they outlive it."""
    dice = random.Random(seed)
    tier = NvmeTier(path, _CAPACITY, _OPTIONS)
    with counts.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), _COUNTS.size)
    good, raced, wrong = _COUNTS.unpack(memory[:])
    print("ready", flush=True)
    while True:
        refs = chain_refs(24, seed=dice.randrange(_CHAINS))
        handles = tier.acquire([ref.key for ref in refs], "reader").wait(30).handles
        if dice.random() < 0.3:
            time.sleep(dice.uniform(0, 0.01))  # let the writers reuse what is leased in this process only
        buffers = [memoryview(bytearray(handle.nbytes)) for handle in handles]
        statuses = tier.read(list(zip(handles, buffers, strict=True))).wait(30).statuses
        for handle, buffer, status in zip(handles, buffers, statuses, strict=True):
            good += status is Status.OK
            raced += status is Status.MISS
            wrong += status is Status.CORRUPT or (status is Status.OK and buffer != content(handle.ref, handle.nbytes))
        tier.release(handles)
        memory[:] = _COUNTS.pack(good, raced, wrong)


def _start(path: Path, seed: int, *more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "--child", str(path), "--seed", str(seed), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _kill_round(path: Path, counts: Path, dice: random.Random) -> Counter[str]:
    """Let children work, kill them, reopen; returns counts of blocks verified, wrong, and faults."""
    children = [_start(path, dice.randrange(1 << 30)) for _ in range(2)]
    children.append(_start(path, dice.randrange(1 << 30), "--reader", str(counts)))
    over = 0
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        time.sleep(dice.uniform(0.0, 0.5))
        assert all(child.poll() is None for child in children)
        if dice.random() < 0.5:
            # The others go on without the first, whose pages they reclaim.
            children[0].send_signal(signal.SIGKILL)
            time.sleep(dice.uniform(0.0, 0.3))
            assert all(child.poll() is None for child in children[1:])
        over = sum(file.stat().st_size for file in path.glob("seg-*.kv")) > _CAPACITY
    finally:
        for child in children:
            child.send_signal(signal.SIGKILL)
            child.communicate()
    found = _inspect(path)
    found["over"] += over
    return found


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
        stats = tier.stats()
        found["over"] += stats["bytes"] > stats["capacity_bytes"]
    finally:
        tier.close()
    return found


def _run(path: Path, rounds: int, seed: int) -> Counter[str]:
    dice = random.Random(seed)
    total: Counter[str] = Counter()
    counts = path.parent / "counts"
    counts.write_bytes(bytes(_COUNTS.size))
    for _ in range(rounds):
        total.update(_kill_round(path, counts, dice))
    good, raced, wrong = _COUNTS.unpack(counts.read_bytes())
    total.update({"read": good, "raced": raced, "wrong": wrong})
    return total


def test_killed_writers_leave_no_wrong_byte_and_leak_nothing(tmp_path: Path) -> None:
    """Each round goes on where the last one was killed."""
    total = _run(tmp_path / "nvme", 8, seed=random.randrange(1 << 30))
    assert total["verified"] > 100
    assert total["read"] > 100
    assert (total["wrong"], total["faults"], total["leaked"], total["over"]) == (0, 0, 0, 0)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path)
    parser.add_argument("--reader", type=Path)
    arguments = parser.parse_args()
    if arguments.reader:
        _read_forever(arguments.child, arguments.seed, arguments.reader)
    if arguments.child:
        _work_forever(arguments.child, arguments.seed)
    with tempfile.TemporaryDirectory() as directory:
        total = _run(Path(directory) / "nvme", arguments.rounds, arguments.seed)
    print(
        f"rounds {arguments.rounds}, blocks verified {total['verified']}, wrong {total['wrong']}, "
        f"leaked {total['leaked']}, over capacity {total['over']}, other faults {total['faults']}; "
        f"concurrent reads: good {total['read']}, raced {total['raced']}"
    )
    sys.exit(bool(total["wrong"] or total["leaked"] or total["faults"] or total["over"]))


if __name__ == "__main__":
    _main()
