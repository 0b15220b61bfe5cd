"""Names of blocks: chain keys, namespaces and store keys.

    chain_i   = sha256(chain_{i-1} || uint32le tokens of block i || extra_i), empty seed     32 bytes
    store key = chain_i[:16] XOR mask(namespace, scheme, group, shard)                        16 bytes

A chain key names a block by its whole prefix and is the same in every process, version and machine.
The mask gives each (namespace, scheme, group, shard) its own 128-bit key space.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import RequestError

__all__ = [
    "KEY_SCHEME",
    "STORE_KEY_BYTES",
    "Chain",
    "Namespace",
    "encode_extra",
    "namespace_digest",
    "namespace_index",
    "salted",
    "store_keys",
]

KEY_SCHEME = "kvtier.sha256.1"
STORE_KEY_BYTES = 16

_MAX_TOKEN = 2**32 - 1
_PACKED = np.dtype("<u4")


def encode_extra(items: Sequence[tuple[str, bytes]]) -> bytes:
    """Pack what besides its tokens determines a block (image ids and the like) unambiguously.

    Args:
        items: (tag, value) pairs, for instance ("mm", digest of an image). Order matters.

    Returns:
        Each tag and value preceded by its length as uint32le; b"" for no items.
    """
    packed = bytearray()
    for tag, value in items:
        for part in (tag.encode(), value):
            packed += len(part).to_bytes(4, "little") + part
    return bytes(packed)


def salted(cache_salt: str | None) -> dict[int, bytes]:
    """The extras of a chain that only those who know a salt are to find; of one for everybody where that is None."""
    return {} if cache_salt is None else {0: encode_extra([("cache_salt", cache_salt.encode())])}


def _packed(tokens: Sequence[int] | NDArray[np.integer]) -> bytes:
    if isinstance(tokens, np.ndarray) and tokens.dtype == _PACKED:
        return tokens.tobytes()
    wide = np.asarray(tokens, dtype=np.int64)
    if wide.size and not (0 <= int(wide.min()) and int(wide.max()) <= _MAX_TOKEN):
        raise RequestError(f"token ids {int(wide.min())}..{int(wide.max())}: expected 0..{_MAX_TOKEN}")
    return wide.astype(_PACKED).tobytes()


class Chain:
    """The chain keys of a growing token sequence; only full blocks have one.

    Args:
        block_size: tokens per block.
        extras: block index -> `encode_extra(...)` of what that block holds besides tokens.

    Invariant: `keys[i]` depends on tokens [0, (i + 1) * block_size) and extras[0..i], on nothing else,
    and not on how the tokens were split over calls of `extend`.
    """

    __slots__ = ("_extras", "_pending", "_width", "keys")

    def __init__(self, block_size: int, extras: Mapping[int, bytes] | None = None) -> None:
        self.keys: list[bytes] = []
        self._width = 4 * block_size
        self._extras = dict(extras or {})
        self._pending = b""

    def extend(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Append tokens and name every block that they complete. A uint32 array is hashed as it is: the fast way."""
        data, width = self._pending + _packed(tokens), self._width
        full = len(data) - len(data) % width
        # Locals: at 16 tokens a block, attribute look-ups would cost a quarter of the hash.
        keys, extras, sha256 = self.keys, self._extras, hashlib.sha256
        parent = keys[-1] if keys else b""
        for start in range(0, full, width):
            block = data[start : start + width]
            if extras:
                block += extras.get(len(keys), b"")
            parent = sha256(parent + block).digest()
            keys.append(parent)
        self._pending = data[full:]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must match for KV to be reusable, beside the tokens.

    Args:
        model: fingerprint of weights and revision.
        layout: `Layout.fingerprint`.
        numerics: what changes values without changing shapes (rope scaling, compute dtype).
        lora: adapter identity, empty for none.
        salt: a tenant's or user's secret that separates otherwise equal prefixes.
        scheme: how chain keys are made.
    """

    model: str
    layout: bytes
    numerics: str = ""
    lora: str = ""
    salt: str = ""
    scheme: str = KEY_SCHEME
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        packed = encode_extra(
            [
                ("model", self.model.encode()),
                ("layout", self.layout),
                ("numerics", self.numerics.encode()),
                ("lora", self.lora.encode()),
                ("salt", self.salt.encode()),
                ("scheme", self.scheme.encode()),
            ]
        )
        object.__setattr__(self, "digest", hashlib.sha256(b"kvtier.namespace.1\0" + packed).digest())

    def mask(self, group: int = 0, shard: int = 0) -> bytes:
        """16 bytes that move chain keys into the key space of this namespace and part."""
        part = group.to_bytes(4, "little") + shard.to_bytes(4, "little")
        return hashlib.sha256(b"kvtier.mask.1\0" + self.digest + part).digest()[:STORE_KEY_BYTES]


def store_keys(chain: Sequence[bytes], mask: bytes) -> list[bytes]:
    """Store keys of chain keys (each at least 16 bytes) under `Namespace.mask(...)`, vectorised."""
    if not chain:
        return []
    heads = np.frombuffer(b"".join([key[:STORE_KEY_BYTES] for key in chain]), dtype=np.uint64)
    mixed = heads.reshape(-1, 2) ^ np.frombuffer(mask, dtype=np.uint64)
    keys: list[bytes] = mixed.view(f"V{STORE_KEY_BYTES}").ravel().tolist()
    return keys


_digests: list[bytes] = []
_indices: dict[bytes, int] = {}
_registry_lock = threading.Lock()


def namespace_index(digest: bytes) -> int:
    """This process's index of a namespace digest, registered on first sight (never forgotten)."""
    with _registry_lock:
        index = _indices.setdefault(digest, len(_digests))
        if index == len(_digests):
            _digests.append(digest)
    return index


def namespace_digest(index: int) -> bytes:
    """The digest behind an index that `namespace_index` gave out.

    Raises:
        IndexError: it gave out no such index.
    """
    if index < 0:
        raise IndexError(index)
    return _digests[index]
