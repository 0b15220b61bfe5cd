"""Blocks for tests: chains of keys in namespaces, and content that tells whose it is."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from kvtier.errors import LeaseError
from kvtier.keys import Chain, Namespace, namespace_index, store_keys
from kvtier.tiers import BlockRef, Handle, Reservation, Status, Tier

__all__ = ["chain_refs", "content", "load", "put", "raises_lease_error", "run_length"]


def chain_refs(blocks: int, *, seed: int = 0, salt: str = "", exact: bool = True) -> list[BlockRef]:
    """A chain of blocks: equal seeds have equal token blocks, unequal salts live in separate namespaces."""
    chain = Chain(1)
    chain.extend([seed, *range(1, blocks)])
    space = Namespace("testing", b"layout", salt=salt)
    keys = store_keys(chain.keys, space.mask())
    ns = namespace_index(space.digest)
    return [BlockRef(key, ns, at, keys[at - 1] if at else None, exact) for at, key in enumerate(keys)]


def content(ref: BlockRef, nbytes: int) -> memoryview:
    """Bytes that follow from the key, exactness and place: no other block's, and no shifted copy, equals them."""
    seed = hashlib.sha256(ref.key + bytes([ref.exact])).digest()
    words = np.frombuffer(seed, np.uint64)[np.arange(-(-nbytes // 8)) % 4] + np.arange(-(-nbytes // 8), dtype=np.uint64)
    return memoryview(words.tobytes())[:nbytes]


def put(tier: Tier, refs: Sequence[BlockRef], nbytes: int, owner: str = "writer") -> list[Reservation]:
    """Reserve, write and commit blocks of `content`; returns what `reserve` said."""
    results = tier.reserve(refs, [nbytes] * len(refs), ["raw"] * len(refs), owner)
    handles = [result for result in results if isinstance(result, Handle)]
    statuses = tier.write([(handle, content(handle.ref, nbytes)) for handle in handles]).wait(30).statuses
    good = [handle for handle, status in zip(handles, statuses, strict=True) if status is Status.OK]
    tier.commit(good)
    tier.abort(handles)
    return results


def load(tier: Tier, keys: Sequence[bytes], owner: str = "reader") -> list[tuple[Status, bytes]]:
    """Acquire, read and release; per key its first status that is not OK, or OK and the bytes."""
    done = tier.acquire(keys, owner).wait(30)
    buffers = [memoryview(bytearray(handle.nbytes)) for handle in done.handles]
    read = tier.read(list(zip(done.handles, buffers, strict=True))).wait(30).statuses
    tier.release(done.handles)
    statuses = [*read, *done.statuses[len(read) :]]
    found = [bytes(buffer) for buffer in buffers] + [b""] * (len(keys) - len(buffers))
    return [(status, data if status is Status.OK else b"") for status, data in zip(statuses, found, strict=True)]


def run_length(tier: Tier, refs: Sequence[BlockRef]) -> int:
    """How many leading blocks are there, without renewing anything."""
    statuses = tier.contains([ref.key for ref in refs]).wait(30).statuses
    return next((at for at, status in enumerate(statuses) if status is not Status.OK), len(statuses))


def raises_lease_error(verb: Callable[[Sequence[Handle]], object], handles: Sequence[Handle]) -> bool:
    """Whether a tier's verb refuses these handles."""
    try:
        verb(handles)
    except LeaseError:
        return True
    return False
