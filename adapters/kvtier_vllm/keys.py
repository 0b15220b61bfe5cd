"""Names of vLLM's blocks: chain keys from token ids, and from all that vLLM itself tells blocks apart by.

vLLM's own block hashes are not used: what they are made of (pickles, a seed) is not the same in every process.

    adapter (name, path, content of its files), cache salt    extras of block 0, which the whole chain carries on
    images, sounds (identifier, where in the block it begins) extras of every block that they touch
"""

import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvtier.connector.checkpoint import fingerprint
from kvtier.errors import ModelError
from kvtier.hints import RequestHints
from kvtier.keys import Chain, encode_extra
from kvtier_vllm.hints import hints_of

__all__ = ["Tracked", "nameable"]

_log = logging.getLogger(__name__)


def nameable(request: Any) -> bool:
    """Whether tokens and extras say all that a request's KV depends on.

    Not where a prompt has embeddings, whose tokens are placeholders; nor where tokens may be replaced later (streaming
    input); nor where an adapter's files cannot be read: another content under its name would not be noticed.
    """
    if request.prompt_embeds is not None or request.resumable:
        return False
    return request.lora_request is None or _adapter(request.lora_request.lora_path) is not None


class Tracked:
    """One request of vLLM's, as the hook sees it. Implements `kvtier.hooks.RequestView`.

    Attributes:
        request: vLLM's own.
        done: leading full blocks of which the hook was told.
        local: tokens that the device had, when it was asked last.
        promised: device blocks that the load under way is to fill.
        waits: whether that is loaded between steps.

    Args:
        request: `nameable`.
        block_size: tokens per block.
    """

    __slots__ = ("_block_size", "_chain", "_hashed", "done", "hints", "id", "local", "promised", "request", "waits")

    lossy: bool | None = None

    def __init__(self, request: Any, block_size: int) -> None:
        self.id: str = request.request_id
        self.request = request
        self.hints: RequestHints | None = hints_of(request)
        self.done = 0
        self.local = 0
        self.promised: tuple[int, ...] = ()
        self.waits = False
        self._block_size = block_size
        self._chain = Chain(block_size, _extras(request, block_size))
        self._hashed = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far, without drafts."""
        count: int = self.request.num_tokens
        return count

    @property
    def chain(self) -> list[bytes]:
        """Chain keys of full blocks; tokens are hashed once, when a block is full."""
        full = self.num_tokens // self._block_size * self._block_size
        if full > self._hashed:
            self._chain.extend(self.request.all_token_ids[self._hashed : full])
            self._hashed = full
        return self._chain.keys


def _extras(request: Any, block_size: int) -> Mapping[int, bytes]:
    items: dict[int, list[tuple[str, bytes]]] = {}
    lora = request.lora_request
    if lora is not None:
        content = _adapter(lora.lora_path) or ""
        items[0] = [("lora", part.encode()) for part in (lora.lora_name, lora.lora_path, content)]
    if request.cache_salt:
        items.setdefault(0, []).append(("vllm.cache_salt", request.cache_salt.encode()))
    for feature in request.mm_features:
        offset, length = feature.mm_position.offset, feature.mm_position.length
        for block in range(offset // block_size, -(-(offset + length) // block_size)):
            begins = str(offset - block * block_size)
            items.setdefault(block, []).append(("mm", encode_extra([(begins, feature.identifier.encode())])))
    return {block: encode_extra(found) for block, found in items.items()}


@lru_cache(maxsize=256)
def _adapter(path: str) -> str | None:
    try:
        config = Path(path, "adapter_config.json")
        return fingerprint(Path(path), [config.read_text() if config.is_file() else ""])
    except (ModelError, OSError) as error:
        _log.warning("adapter %s: %s: its requests are served, and their KV is not kept", path, error)
        return None
