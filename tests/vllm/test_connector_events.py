"""What is told of the tiers to who follows vLLM's events, when a store changes faster than it is told of."""

from types import SimpleNamespace

from kvtier_vllm.events import Names
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.events import EventLog
from kvtier.tiers import BlockRef

NS = 7
SIZE = 4
KEYS = [bytes([at]) * 16 for at in range(6)]
HASHES = [bytes([at]) * 32 for at in range(6)]
NAMES = [maybe_convert_block_hash(one) for one in HASHES]


def told(names: Names) -> list[tuple[type, list[object], str]]:
    return [(type(event), event.block_hashes, event.medium) for event in names.take()]


def ref(at: int) -> BlockRef:
    return BlockRef(KEYS[at], NS, at, KEYS[at - 1] if at else None, exact=True)


def test_what_was_told_of_and_may_be_gone_is_taken_back():
    log = EventLog(4)
    names = Names(log, NS, SIZE)
    request = SimpleNamespace(block_hashes=HASHES, lora_request=None, all_token_ids=list(range(6 * SIZE)))
    names.learn(SimpleNamespace(request=request), 0, KEYS)
    log.stored("host", [ref(0), ref(1)])
    assert told(names) == [(BlockStored, [NAMES[0]], "CPU"), (BlockStored, [NAMES[1]], "CPU")]
    log.removed("host", [(NS, KEYS[0])], "evicted")
    for at in (2, 3, 4, 5):
        log.stored("host", [ref(at)])
    # The removal is kept no more, and what else there was is not known: it is told of when it is stored again.
    assert told(names) == [
        (BlockRemoved, NAMES[:2], "CPU"),
        *[(BlockStored, [NAMES[at]], "CPU") for at in (2, 3, 4, 5)],
    ]
    log.removed("host", [(NS, KEYS[2]), (NS, KEYS[1])], "evicted")
    assert told(names) == [(BlockRemoved, [NAMES[2]], "CPU")]
