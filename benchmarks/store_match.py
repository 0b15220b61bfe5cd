"""`match.8192` and `hash.128k`: what a look-up costs before any byte moves, in CPU time.

match.8192   TieredStore.match of a chain of which 8,192 blocks lie in host, or in the NVMe tier's index; the peer
             asks the same tier for every key. `resident` below `asked`: the prefix ends somewhere.
hash.128k    the chain keys of 131,072 tokens out of a uint32 buffer; the peer is the bare loop of the definition
             over bytes that are packed already. `store_keys_ms`: masking them for a namespace, on top.
"""

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from harness import Measure, Report, Result, Rounds, interleaved, require, timed
from numpy.typing import NDArray
from store_host import BATCH, fresh_refs

from kvtier.cpu import HostTier
from kvtier.keys import Chain, Namespace, store_keys
from kvtier.nvme import NvmeTier
from kvtier.store import TieredStore
from kvtier.tiers import BlockRef, Handle, Tier

__all__ = ["run"]

BLOCKS = 8192
BLOCK_BYTES = 4096
TOKENS = 1 << 17
REPEAT = 5


def fill(tier: Tier, refs: list[BlockRef]) -> None:
    data = memoryview(bytes(BLOCK_BYTES))
    for at in range(0, len(refs), BATCH * 16):
        batch = refs[at : at + BATCH * 16]
        slots = tier.reserve(batch, [BLOCK_BYTES] * len(batch), ["raw"] * len(batch), "benchmark")
        handles = [slot for slot in slots if isinstance(slot, Handle)]
        tier.write([(handle, data) for handle in handles]).wait()
        tier.commit(handles)


def add_cpu_ms(report: Report, name: str, params: Mapping[str, object], rounds: Rounds, peer: str, repeat: int) -> None:
    ours, theirs = (1e3 * rounds.median(way).cpu_seconds / repeat for way in ("ours", peer))
    report.add(Result(name, ours, "ms CPU", params, peer, theirs, rounds.cpu_ratio("ours", peer)))


def match(report: Report, store: TieredStore, tier: Tier, refs: list[BlockRef], resident: int, rounds: int) -> None:
    keys = [ref.key for ref in refs]
    require(len(store.match(keys).tiers) == resident, "match did not find what is there")
    measures: dict[str, Measure] = {
        "ours": lambda: timed(lambda: [store.match(keys) for _ in range(REPEAT)]),
        "contains of every key": lambda: timed(lambda: [tier.contains(keys).wait() for _ in range(REPEAT)]),
    }
    params = {"tier": tier.name, "asked": len(keys), "resident": resident, "rounds": rounds}
    add_cpu_ms(report, "match.8192", params, interleaved(measures, rounds), "contains of every key", REPEAT)


def matches(report: Report, directory: Path, rounds: int) -> None:
    chain = fresh_refs(2 * BLOCKS)
    host = HostTier(2 * BLOCKS * BLOCK_BYTES)
    nvme = NvmeTier(directory, 2 * BLOCKS * BLOCK_BYTES)
    below = TieredStore(HostTier(1 << 20), [nvme])
    alone = TieredStore(host)
    for store, tier in ((alone, host), (below, nvme)):
        fill(tier, chain[:BLOCKS])
        match(report, store, tier, chain[:BLOCKS], BLOCKS, rounds)
        match(report, store, tier, chain, BLOCKS, rounds)
        store.close()


def chain_keys(tokens: NDArray[np.uint32], block_size: int) -> list[bytes]:
    chain = Chain(block_size)
    chain.extend(tokens)
    return chain.keys


def definition(data: bytes, width: int) -> Iterable[bytes]:
    key = b""
    for start in range(0, len(data), width):
        key = hashlib.sha256(key + data[start : start + width]).digest()
        yield key


def hashes(report: Report, block_size: int, rounds: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 150_000, TOKENS, dtype=np.uint32)
    data, mask = tokens.tobytes(), Namespace("benchmark", b"layout").mask()
    keys = chain_keys(tokens, block_size)
    require(keys == list(definition(data, 4 * block_size)), "chain keys differ from their definition")
    peer = "bare sha256 loop"
    measures: dict[str, Measure] = {
        "ours": lambda: timed(lambda: chain_keys(tokens, block_size)),
        "store keys": lambda: timed(lambda: store_keys(keys, mask)),
        peer: lambda: timed(lambda: list(definition(data, 4 * block_size))),
    }
    result = interleaved(measures, rounds)
    masking = round(1e3 * result.median("store keys").cpu_seconds, 3)
    params = {"block": block_size, "tokens": TOKENS, "rounds": rounds, "store_keys_ms": masking}
    add_cpu_ms(report, "hash.128k", params, result, peer, 1)


def run(report: Report, quick: bool) -> None:  # noqa: FBT001  every section's signature
    """Add `match.8192` and `hash.128k`."""
    rounds = 15 if quick else 51
    directory = report.directory / "match"
    shutil.rmtree(directory, ignore_errors=True)
    matches(report, directory, rounds)
    shutil.rmtree(directory)
    for block_size in (16, 256):
        hashes(report, block_size, rounds)
