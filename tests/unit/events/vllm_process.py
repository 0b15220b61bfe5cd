"""vLLM's own event classes and publisher, without the rest of vLLM: decodes what stdin names, publishes what it asks.

Commands, one JSON object a line: {"decode": hex} -> repr of the batch; {"publish": [hash, …]} -> the latest number.
"""

import json
import logging
import sys
import types
from pathlib import Path

STUBS = {
    "vllm.config.kv_events": {"KVEventsConfig": types.SimpleNamespace},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.utils.network_utils": dict.fromkeys(("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path")),
    "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
}


def main(source: str, endpoint: str, replay: str) -> None:
    for name, members in STUBS.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module
    theirs = types.ModuleType("theirs")
    sys.modules["theirs"] = theirs
    exec(compile(Path(source).read_text(), source, "exec"), theirs.__dict__)

    import msgspec

    publisher = theirs.ZmqEventPublisher(
        data_parallel_rank=0, endpoint=endpoint, replay_endpoint=replay, buffer_steps=5, topic="kv"
    )
    count = 0
    for line in sys.stdin:
        command = json.loads(line)
        if "decode" in command:
            batch = msgspec.msgpack.decode(bytes.fromhex(command["decode"]), type=theirs.KVEventBatch)
            print(repr(batch), flush=True)
            continue
        for one in command["publish"]:
            stored = theirs.BlockStored(
                block_hashes=[one], parent_block_hash=None, token_ids=[1, 2], block_size=2, lora_id=None,
                medium="GPU", lora_name=None, extra_keys=[("salt",)],
            )  # fmt: skip
            publisher.publish(theirs.KVEventBatch(ts=1.0, events=[stored]))
            count += 1
        print(count - 1, flush=True)
    publisher.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
