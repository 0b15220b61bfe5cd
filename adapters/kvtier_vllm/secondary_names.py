"""What blocks of vLLM's host tier are called in kvtier: names only, no vLLM.

    store key = sha256(vLLM's block hash || group id)[:16] XOR mask(namespace)

vLLM names a block by a chained hash over its tokens and extra keys (LoRA, cache salt, images), but not the weights, the
shape of the KV or the kernel that wrote it: those are the namespace. With vLLM's default, `sha256`, a hash is that of a
pickle under a fixed seed: equal in every process of one vLLM and Python version. After an upgrade it may be another
one, which is a miss; `--prefix-caching-hash-algo sha256_cbor` does not depend on pickle. With the `xxhash` algorithms
the seed is random, and nothing is found again in a new process unless PYTHONHASHSEED is set.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.connector.checkpoint import fingerprint
from kvtier.errors import ConfigError, ModelError
from kvtier.keys import Namespace, namespace_index, store_keys
from kvtier.tiers import BlockRef

__all__ = ["BlockNames", "namespace_of", "weights_of"]

_SCHEME = "vllm.block_hash.1"


def weights_of(model: str) -> str:
    """What names a model's weights: 32 hex digits over every byte of its files and its config.

    Args:
        model: a directory, as vLLM loads it.

    Raises:
        ConfigError: it is none: a name says neither which revision nor which weights were loaded.
    """
    config = Path(model, "config.json")
    try:
        return fingerprint(Path(model), [config.read_text()])
    except (ModelError, OSError) as error:
        raise ConfigError(
            f"the weights of model {model!r} cannot be told from others ({error}): name them yourself, "
            '"model": "<name>@<revision>" in the configuration of this secondary tier'
        ) from error


def namespace_of(model: str, facts: Mapping[str, Any], salt: str = "") -> Namespace:
    """What must match for blocks to be reusable.

    Args:
        model: names the weights.
        facts: whatever the bytes of a block depend on beside them, as JSON has it.
        salt: separates users who must not share prefixes.
    """
    layout = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    return Namespace(model, layout, salt=salt, scheme=_SCHEME)


class BlockNames:
    """Store keys of vLLM's offload keys, each of them a block hash and a group id.

    Nobody says what comes before a block: it has no parent and no depth here.
    """

    def __init__(self, namespace: Namespace) -> None:
        self._ns = namespace_index(namespace.digest)
        self._mask = namespace.mask()

    def keys(self, offload_keys: Iterable[bytes]) -> list[bytes]:
        """The store key of each."""
        return store_keys([hashlib.sha256(key).digest() for key in offload_keys], self._mask)

    def refs(self, offload_keys: Iterable[bytes]) -> Sequence[BlockRef]:
        """Each as a block that is to be stored: exact bytes."""
        return [BlockRef(key, self._ns, -1, None, True) for key in self.keys(offload_keys)]
