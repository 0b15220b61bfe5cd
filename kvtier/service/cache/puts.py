"""From what callers put to what the store takes, checked before anything changes."""

from collections.abc import Sequence
from dataclasses import replace

from kvtier.hints import NO_HINT, Hint
from kvtier.keys import STORE_KEY_BYTES, store_keys
from kvtier.service.cache.callers import Caller
from kvtier.service.cache.errors import ServiceError
from kvtier.service.cache.namespaces import OpenNamespace
from kvtier.service.cache.records import BlockPut
from kvtier.tiers import BlockRef
from kvtier.wire.packing import PackedKeys

__all__ = ["check_blocks", "check_keys", "items", "own_session"]

_LONGEST_KEY = 32
_KEY_LENGTHS = set(range(STORE_KEY_BYTES, _LONGEST_KEY + 1))
_DEEPEST = (1 << 31) - 1
# On average, in a call of as many keys as there may be.
_PARTS_PER_KEY = 16
_LONGEST_SESSION = 128


def check_keys(keys: Sequence[bytes], most: int, parts: int = 1) -> None:
    """Let chain keys of one call pass.

    Args:
        keys: of the call.
        most: that there may be.
        parts: of each block that are looked for, one after the other.

    Raises:
        ServiceError: invalid, or too_large.
    """
    if len(keys) > most:
        raise ServiceError("too_large", f"{len(keys)} keys: at most {most} at a time; split the call")
    if len(keys) * parts > _PARTS_PER_KEY * most:
        raise ServiceError(
            "too_large",
            f"{len(keys)} keys of {parts} parts each: at most {_PARTS_PER_KEY * most} parts at a time; split the call",
        )
    wrong = ({keys.width} if isinstance(keys, PackedKeys) else set(map(len, keys))) - _KEY_LENGTHS
    if wrong:
        raise ServiceError("invalid", f"key of {min(wrong)} bytes: expected {STORE_KEY_BYTES} to {_LONGEST_KEY}")


def check_blocks(blocks: Sequence[BlockPut], space: OpenNamespace, *, largest: int, quota: int) -> int:
    """Let blocks pass that this namespace can have; returns their bytes.

    Args:
        blocks: to be put.
        space: into which.
        largest: bytes of one block, at most.
        quota: the tenant's bytes in host.

    Raises:
        ServiceError: invalid, wrong_layout, too_large, quota_exceeded; conflict: depth and parent
            contradict each other.
    """
    total = 0
    sizes = space.spec.block_bytes
    for block in blocks:
        nbytes = block.data.nbytes
        _check_place(block, space.parts)
        if nbytes < 1 or not block.data.c_contiguous:
            raise ServiceError("invalid", f"block of {nbytes} bytes: expected at least 1, contiguous")
        if sizes and nbytes != sizes[block.part]:
            raise ServiceError(
                "wrong_layout",
                f"block of {nbytes} bytes: expected {sizes[block.part]}, as the layout says of part {block.part}",
            )
        if nbytes > largest:
            raise ServiceError("too_large", f"block of {nbytes} bytes: at most {largest}")
        if nbytes > quota:
            raise ServiceError("quota_exceeded", f"block of {nbytes} bytes: the tenant's quota in host is {quota}")
        total += nbytes
    return total


def _check_place(block: BlockPut, parts: int) -> None:
    if not 0 <= block.part < parts:
        raise ServiceError("wrong_layout", f"part {block.part}: expected 0 to {parts - 1}")
    if not -1 <= block.depth <= _DEEPEST:
        raise ServiceError("invalid", f"depth {block.depth}: expected -1 (parent unknown) to {_DEEPEST}")
    if (block.parent is None) != (block.depth < 1):
        raise ServiceError(
            "conflict",
            f"depth {block.depth} {'without' if block.parent is None else 'with'} a parent: depth 0 has none, deeper "
            "blocks name theirs, and -1 says that it is unknown",
        )


def items(blocks: Sequence[BlockPut], space: OpenNamespace) -> tuple[list[tuple[BlockRef, memoryview]], list[Hint]]:
    """What `TieredStore.put_each` takes."""
    rows: list[tuple[BlockRef, memoryview] | None] = [None] * len(blocks)
    for part, places in space.by_part([block.part for block in blocks]):
        some = [blocks[at] for at in places]
        keys = store_keys([block.key for block in some], space.masks[part])
        parents = space.masked([block.parent for block in some], part)
        for at, key, parent, block in zip(places, keys, parents, some, strict=True):
            ref = BlockRef(key, space.indices[part], block.depth, parent, block.exact)
            rows[at] = (ref, block.data.cast("B"))
    return [row for row in rows if row is not None], [block.hint or NO_HINT for block in blocks]


def own_session(caller: Caller, hint: Hint) -> Hint:
    """Who may use some namespaces only has sessions of its own: ending others' would touch others' blocks.

    Raises:
        ServiceError: invalid: a name that is longer than a store is to remember.
    """
    if hint.session is not None and len(hint.session) > _LONGEST_SESSION:
        raise ServiceError("invalid", f"session of {len(hint.session)} characters: expected at most {_LONGEST_SESSION}")
    if hint.session is None or caller.namespaces is None:
        return hint
    return replace(hint, session=f"{caller.token}/{hint.session}")
