"""Against vLLM's own classes, where its source lies: it reads what we publish, we follow what it publishes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from events_world import View
from patience import until

from kvtier.events.frames import BlockRemoved, BlocksCleared, BlockStored, encode_batch
from kvtier.events.subscriber import Subscriber

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted(ROOT.glob("build/vllm-venv/lib/python3*/site-packages/vllm/distributed/kv_events.py"))

pytestmark = pytest.mark.skipif(not SOURCES, reason="vLLM's source is not here")


class TheirProcess:
    def __init__(self, place: Path) -> None:
        self.endpoint, self.replay = f"ipc://{place}/pub", f"ipc://{place}/replay"
        script = Path(__file__).with_name("vllm_process.py")
        command = [sys.executable, str(script), str(SOURCES[0]), self.endpoint, self.replay]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **command: Any) -> str:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TheirProcess]:
    process = TheirProcess(tmp_path_factory.mktemp("vllm"))
    try:
        yield process
    finally:
        process.process.kill()
        process.process.communicate()


def test_vllm_reads_what_we_publish(theirs: TheirProcess) -> None:
    events = [
        BlockStored([b"a" * 16, b"b" * 16], b"p" * 16, list(range(8)), 4, None, "CPU", None, locality="REMOTE"),
        BlockStored([b"c" * 16], None, [1], 1, None, "GPU", None),
        BlockRemoved([b"a" * 16], "GPU"),
        BlocksCleared(),
    ]
    told = theirs.ask(decode=encode_batch(1.5, events).hex())
    assert told.startswith("KVEventBatch(ts=1.5, events=[BlockStored(block_hashes=[b'aaaaaaaaaaaaaaaa', b'bbbb")
    for piece in (
        "parent_block_hash=b'pppppppppppppppp', token_ids=[0, 1, 2, 3, 4, 5, 6, 7], block_size=4, lora_id=None",
        "medium='CPU'",
        "locality='REMOTE'",
        "BlockRemoved(block_hashes=[b'aaaaaaaaaaaaaaaa'], medium='GPU'",
        "AllBlocksCleared()], data_parallel_rank=None)",
    ):
        assert piece in told


def test_we_follow_what_vllm_publishes_and_have_it_replayed(theirs: TheirProcess) -> None:
    assert theirs.ask(publish=[1, 2, 3]) == "2"
    view = View()
    subscriber = Subscriber(theirs.endpoint, view, replay_endpoint=theirs.replay, topic="kv", quiet_seconds=0.2)
    try:
        until(lambda: view.hashes() == {1, 2, 3})
        theirs.ask(publish=[4])
        until(lambda: view.hashes() == {1, 2, 3, 4})
        assert view.media["GPU"][4] == (None, (1, 2))
        assert (subscriber.counts.failures, subscriber.counts.malformed, view.resets) == (0, 0, 0)
    finally:
        subscriber.close()


def test_what_vllm_has_forgotten_is_not_claimed(theirs: TheirProcess) -> None:
    theirs.ask(publish=list(range(10, 20)))
    view = View()
    subscriber = Subscriber(theirs.endpoint, view, replay_endpoint=theirs.replay, quiet_seconds=0.2)
    try:
        until(lambda: view.hashes() == {15, 16, 17, 18, 19})
        theirs.ask(publish=[20])
        until(lambda: 20 in view.hashes())
    finally:
        subscriber.close()
