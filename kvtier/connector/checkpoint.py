"""What a checkpoint on disk holds, as a name: for host engines that load weights themselves."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from kvtier.errors import ModelError

__all__ = ["fingerprint"]

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_PIECE = 64 << 20
_MOST_THREADS = 8


def fingerprint(source: Path, facts: Sequence[str] = ()) -> str:
    """32 hex digits that change whenever a byte of the weight files or one of `facts` does.

    Every byte is read once (xxh3_128, several files at a time), mostly from the page cache, since who loaded the
    weights has just read them. Names and times of files do not matter but for their order.

    Args:
        source: directory of weight files, or one such file.
        facts: what else makes the model what it is: its config.

    Raises:
        ModelError: there are no weights, or they cannot be read.
    """
    files = sorted(path for path in source.glob("*") if path.suffix in _WEIGHTS) if source.is_dir() else [source]
    if not files or not all(path.is_file() for path in files):
        raise ModelError(f"model {source}: no weight files ({', '.join(_WEIGHTS)}) to tell it from other models by")
    pieces = [(path, start) for path in files for start in range(0, max(path.stat().st_size, 1), _PIECE)]
    try:
        with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
            digests = list(pool.map(_digest, pieces))
    except OSError as error:
        raise ModelError(f"model {source}: {error}: its weights cannot be read") from error
    digest = hashlib.sha256(b"kvtier.checkpoint.1\0")
    for (_, start), piece in zip(pieces, digests, strict=True):
        digest.update(start.to_bytes(8, "little") + piece)
    for fact in facts:
        digest.update(hashlib.sha256(fact.encode()).digest())
    return digest.hexdigest()[:32]


def _digest(piece: tuple[Path, int]) -> bytes:
    path, start = piece
    with path.open("rb") as file:
        return xxhash.xxh3_128_digest(np.fromfile(file, np.uint8, _PIECE, offset=start).data)
